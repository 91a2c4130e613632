"""pytorchxla: every host runs torch_xla's own starter, which starts one process
per GPU of that host.

Source: the variables that sagemaker-training gives it; the starter with ``--num_gpus`` comes with
SageMaker's build of torch_xla. EFA depends on devices and is not always on, as in all modes.
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

    Raises RefusalError without GPUs, without torch_xla, and for other programs than scripts.
    """
    python = common.programs_of_mode(job)["python"]
    _check(job)
    gpus = job.placement.processes_per_host
    hosts = job.placement.distribution_hosts
    workers = "|".join(
        f"localservice:{rank};{host}:{names.XLA_WORKER_PORT}" for rank, host in enumerate(hosts)
    )
    rows = [
        Variable("XRT_HOST_ORDINAL", str(job.placement.host_rank), "index of this host", ours=True),
        Variable("XRT_SHARD_WORLD_SIZE", str(len(hosts)), "hosts of the distribution", ours=True),
        Variable("XRT_WORKERS", workers, "where the worker of each host listens", ours=True),
        Variable("GPU_NUM_DEVICES", str(gpus), "GPUs of this host", ours=True),
    ]
    if len(hosts) > 1:
        address = f"{job.placement.leader_address}:{names.XLA_MESH_PORT}"
        rows.append(
            Variable(
                "XRT_MESH_SERVICE_ADDRESS", address, "the hosts find each other there", ours=True
            )
        )
    if job.network.fabric.efa:
        why = "several connections per GPU use more of EFA's bandwidth"
        rows.append(Variable("OFI_NCCL_NIC_DUP_CONNS", str(gpus), why, Origin.FABRIC))
    starter = (python, "-m", "torch_xla.distributed.xla_spawn")
    command = [
        Reason("xla_spawn", "starts the processes of this host", Origin.IMAGE, starter),
        Reason(
            "--num_gpus",
            common.counts_and_why(job),
            job.placement.processes_origin,
            ("--num_gpus", str(gpus)),
        ),
        *common.explained_program(job, (job.program.entry.name,)),
    ]
    choice = Reason(
        "mode pytorchxla",
        "every host starts its own processes; they find each other by XRT_WORKERS",
    )
    made = common.own_process(job, command, [choice], rows)
    return made._replace(processes=gpus, ranks_by="spawn")


def _check(job: Job) -> None:
    """What the starter would find out on every host of a running cluster."""
    problems: list[Problem] = []
    unknown = job.environment.manifest.lacks(job.placement.instance_type)
    if not unknown and not accelerators(job.environment, job.placement.instance_type)[0]:
        advice = "use an instance type with GPUs, or torch_distributed"
        problems.append(
            Problem(
                "pytorchxla is for GPUs only",
                f"instance type {job.placement.instance_type}",
                advice,
            )
        )
    if job.program.entry.kind != "script":
        advice = "name a .py file as the entry point"
        problems.append(
            Problem(
                "pytorchxla starts Python scripts only",
                f"entry point {job.program.entry.name!r}",
                advice,
            )
        )
    problems += common.missing_package(job, ("torch_xla",))
    if problems:
        raise RefusalError(problems)
