"""Plan mode pytorchxla: every host runs torch_xla's xla_spawn, which starts one rank per GPU.

Source: the variables of sagemaker-training for this mode; xla_spawn with ``--num_gpus`` is part of
SageMaker's build of torch_xla. As in all modes EFA is used only on hosts with EFA devices.
"""

from __future__ import annotations

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.job.job import Job
from trainworks_launcher.job.placement import accelerators
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.modes.common import Variable
from trainworks_launcher.plan.plan import NodePlan, Reason


def plan(job: Job) -> NodePlan:
    """Plan the job's host.

    Raises RefusalError for hosts without GPUs, an image without torch_xla, and a program that is no
    Python script.
    """
    python = common.programs_of_mode(job)["python"]
    _check(job)
    gpus = job.placement.processes_per_host
    starter = (python, "-m", "torch_xla.distributed.xla_spawn")
    gpus_why = common.counts_and_why(job)
    gpus_origin = job.placement.processes_origin
    command = [
        Reason("xla_spawn", "starts the processes of this host", Origin.IMAGE, starter),
        Reason("--num_gpus", gpus_why, gpus_origin, ("--num_gpus", str(gpus))),
        *common.explained_program(job, (job.program.entry.name,)),
    ]
    choice = Reason(
        "mode pytorchxla",
        "every host starts its own processes; they find each other by XRT_WORKERS",
    )
    node_plan = common.own_process(job, command, [choice], _variables(job))
    return node_plan._replace(processes=gpus, ranks_by="spawn")


def _variables(job: Job) -> list[Variable]:
    """Return the variables of torch_xla's XRT runtime.

    XRT_WORKERS of two hosts: ``localservice:0;algo-1:PORT|localservice:1;algo-2:PORT``.

    ``ours`` marks a variable that replaces the container's value, because the hosts need the
    launcher's value to connect. A variable without it yields to the container's value.
    """
    host_rank = str(job.placement.host_rank)
    hosts = job.placement.distribution_hosts
    gpus = str(job.placement.processes_per_host)
    addresses = []
    for rank, host in enumerate(hosts):
        addresses.append(f"localservice:{rank};{host}:{names.XLA_WORKER_PORT}")
    workers = "|".join(addresses)
    rows = [
        Variable("XRT_HOST_ORDINAL", host_rank, "index of this host", ours=True),
        Variable("XRT_SHARD_WORLD_SIZE", str(len(hosts)), "hosts of the distribution", ours=True),
        Variable("XRT_WORKERS", workers, "where the worker of each host listens", ours=True),
        Variable("GPU_NUM_DEVICES", gpus, "GPUs of this host", ours=True),
    ]
    if len(hosts) > 1:
        mesh = f"{job.placement.leader_address}:{names.XLA_MESH_PORT}"
        why = "the hosts find each other there"
        rows.append(Variable("XRT_MESH_SERVICE_ADDRESS", mesh, why, ours=True))
    if job.network.fabric.efa:
        # As many connections as GPUs: the value of sagemaker-training for this mode. It is a choice
        # for this host's fabric, not of the platform, and the user may set another value.
        why = "several connections per GPU use more of EFA's bandwidth"
        rows.append(Variable("OFI_NCCL_NIC_DUP_CONNS", gpus, why, Origin.FABRIC))
    return rows


def _check(job: Job) -> None:
    """Refuse a job that xla_spawn would end on every host.

    Raises RefusalError with all problems: hosts without GPUs, a program that is not a Python
    script, an image without torch_xla.
    """
    problems: list[Problem] = []
    instance_type = job.placement.instance_type
    # Of an instance type that the manifest does not know, the GPUs are not known either.
    is_known = not job.environment.manifest.lacks(instance_type)
    gpus, _ = accelerators(job.environment, instance_type)
    if is_known and not gpus:
        problem = "pytorchxla is for GPUs only"
        advice = "use an instance type with GPUs, or torch_distributed"
        problems.append(Problem(problem, f"instance type {instance_type}", advice))
    if job.program.entry.kind != "script":
        problem = "pytorchxla starts Python scripts only"
        where = f"entry point {job.program.entry.name!r}"
        problems.append(Problem(problem, where, "name a .py file as the entry point"))
    problems += common.missing_package(job, ("torch_xla",))
    if problems:
        raise RefusalError(problems)
