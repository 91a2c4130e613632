"""parameter_server: every host runs the program, and beside it the server that
holds a part of the parameters.

Three frameworks mean three things by it. TensorFlow: a cluster of ``master``,
``worker`` and ``ps`` tasks in TF_CONFIG.
MXNet: scheduler, servers and workers, told apart by DMLC_ROLE; ``import mxnet`` is all that a
server has to do. PyTorch
has no servers: its processes find each other by MASTER_ADDR and RANK. Source: what the platform's
own framework toolkits start, since scripts were written against that.

A server has no end of its own, and serves the programs of all hosts: it is ended with the job, not
with the program beside it.
"""

from __future__ import annotations

from typing import Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.json_values import Json, compact
from trainworks_launcher.job.job import Job
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.modes.common import Variable
from trainworks_launcher.plan.plan import Auxiliary, NodePlan, Reason

_FRAMEWORKS = ("tensorflow", "mxnet", "torch")


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError if the image has none of the three frameworks."""
    manifest = job.environment.manifest
    installed = [name for name in _FRAMEWORKS if name in manifest.components]
    framework = (
        manifest.framework if manifest.framework in _FRAMEWORKS else next(iter(installed), "")
    )
    if framework == "tensorflow":
        return _tensorflow(job)
    if framework == "mxnet":
        return _mxnet(job)
    if framework == "torch":
        return _torch(job)
    problem = "parameter_server needs TensorFlow, MXNet or PyTorch"
    raise RefusalError(
        [Problem(problem, f"image {manifest.name!r}", "use an image that has one of them")]
    )


def _tensorflow(job: Job) -> NodePlan:
    """One host needs no servers (as sagemaker-training)."""
    hosts = job.placement.distribution_hosts
    if len(hosts) == 1:
        choice = Reason(
            f"mode {job.placement.mode}",
            "a single host shares parameters with no other host, so it runs only the program",
        )
        return common.own_process(job, common.command(job), [choice])
    python = common.program(job, "python", "TensorFlow's parameter server needs it")
    first = job.placement.host == job.placement.leader
    row = Variable(
        "TF_CONFIG",
        _tensorflow_cluster(
            hosts,
            "master" if first else "worker",
            job.placement.host_rank if first else job.placement.host_rank - 1,
        ),
        "how the processes of the cluster find each other",
        ours=True,
    )
    server = Auxiliary(
        name="TensorFlow parameter server",
        argv=(python, f"{job.environment.launcher_directory}/programs/tensorflow_server.py"),
        # No GPU: two TensorFlow processes on one GPU take each other's memory.
        env={
            "TF_CONFIG": _tensorflow_cluster(hosts, "ps", job.placement.host_rank),
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    choice = Reason(
        f"mode {job.placement.mode}",
        "every host runs the program, and a parameter server beside it",
    )
    made = common.own_process(job, common.command(job), [choice], [row])
    return made._replace(auxiliaries=(server,), needs=tuple(dict.fromkeys((*made.needs, python))))


def _tensorflow_cluster(hosts: Sequence[str], task: str, index: int) -> str:
    """TF_CONFIG of one task: the first host is the master, the others are
    workers, and each has a ps task.
    """
    programs: list[Json] = [f"{host}:{names.TENSORFLOW_WORKER_PORT}" for host in hosts]
    servers: list[Json] = [f"{host}:{names.TENSORFLOW_SERVER_PORT}" for host in hosts]
    cluster: dict[str, Json] = {"master": programs[:1], "ps": servers, "worker": programs[1:]}
    own: dict[str, Json] = {"index": index, "type": task}
    return compact({"cluster": cluster, "environment": "cloud", "task": own})


def _mxnet(job: Job) -> NodePlan:
    """Plan MXNet: a scheduler on the first host, and on every host a server and
    the program, which is the worker.
    """
    python = common.program(job, "python", "MXNet's servers need it")
    count = str(len(job.placement.distribution_hosts))
    user = job.environment.user_hyperparameters
    port = str(user.get("_ps_port") or names.MXNET_SCHEDULER_PORT)
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise RefusalError(
            [Problem(f"{port!r} is not a TCP port", "hyperparameter _ps_port", "use 1024 to 65535")]
        )
    address = job.placement.leader_address if len(job.placement.hosts) > 1 else names.LOOPBACK
    rows = [
        Variable("DMLC_ROLE", "worker", "the program is a worker", ours=True),
        Variable("DMLC_NUM_WORKER", count, "one worker per host", ours=True),
        Variable("DMLC_NUM_SERVER", count, "one server per host", ours=True),
        Variable(
            _SCHEDULER,
            address,
            "where the scheduler is; each process looks its address up",
            ours=True,
        ),
        Variable("DMLC_PS_ROOT_PORT", port, "where the scheduler listens", ours=True),
        Variable("PS_VERBOSE", str(user.get("_ps_verbose") or 0), "how much the servers say"),
    ]
    if job.network.interface:
        rows.append(
            Variable(
                "DMLC_INTERFACE",
                job.network.interface,
                f"the servers listen there: {job.network.interface_why}",
            )
        )
    roles = ("scheduler", "server") if job.placement.host == job.placement.leader else ("server",)
    environment = job.environment
    program = f"{environment.launcher_directory}/programs/resolve.py"
    # The scheduler's host name becomes an address on the host itself.
    look_up = (environment.launcher_python, "-I", program, _SCHEDULER, "--")
    servers = tuple(
        Auxiliary(f"MXNet {role}", (*look_up, python, "-c", "import mxnet"), {"DMLC_ROLE": role})
        for role in roles
    )
    choice = Reason(
        f"mode {job.placement.mode}",
        f"every host runs the program, and beside it: {', '.join(roles)}",
    )
    before = Reason("resolve.py", "MXNet listens on an address and knows no names", words=look_up)
    made = common.own_process(job, (before, *common.command(job)), [choice], rows)
    return made._replace(auxiliaries=servers, needs=(*made.needs, python))


_SCHEDULER = "DMLC_PS_ROOT_URI"


def _torch(job: Job) -> NodePlan:
    """One process per host; the script starts whatever servers it wants."""
    rows = [
        Variable("RANK", str(job.placement.host_rank), "index of this host"),
        Variable("WORLD_SIZE", str(len(job.placement.distribution_hosts)), "one process per host"),
    ]
    why = (
        "PyTorch has no parameter servers: every host runs the program once, and they find each"
        " other by MASTER_ADDR"
    )
    return common.own_process(
        job, common.command(job), [Reason(f"mode {job.placement.mode}", why)], rows
    )
