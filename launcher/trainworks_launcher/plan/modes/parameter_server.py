"""Plan mode parameter_server: every host runs the program, and a parameter server beside it.

The mode differs by framework. TensorFlow: a cluster of ``master``, ``worker`` and ``ps`` tasks in
TF_CONFIG. MXNet: a scheduler, servers and workers, with the role in DMLC_ROLE; a scheduler or a
server only has to ``import mxnet``. PyTorch has no servers: its processes connect by MASTER_ADDR
and RANK. Source: the processes that the SageMaker toolkits of these frameworks start, for which
scripts were written.

A server serves the programs of all hosts and does not end by itself. The launcher ends the servers
with the job.
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
_LAST_PORT = 65535


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Raises RefusalError if the image has none of the three frameworks."""
    manifest = job.environment.manifest
    framework = manifest.framework
    if framework not in _FRAMEWORKS:
        # The image is not for one of the three, but may have one: the first counts.
        installed = [name for name in _FRAMEWORKS if name in manifest.components]
        framework = next(iter(installed), "")
    if framework == "tensorflow":
        return _tensorflow(job)
    if framework == "mxnet":
        return _mxnet(job)
    if framework == "torch":
        return _torch(job)
    problem = Problem(
        "parameter_server needs TensorFlow, MXNet or PyTorch",
        f"image {manifest.name!r}",
        "use an image that has one of them",
    )
    raise RefusalError([problem])


def _tensorflow(job: Job) -> NodePlan:
    """Plan TensorFlow: the program, and a parameter server beside it.

    A single host has no servers (as sagemaker-training). Raises RefusalError for an image without
    Python.
    """
    hosts = job.placement.distribution_hosts
    mode = f"mode {job.placement.mode}"
    if len(hosts) == 1:
        why = "a single host shares parameters with no other host, so it runs only the program"
        return common.own_process(job, common.command(job), [Reason(mode, why)])
    python = common.program(job, "python", "TensorFlow's parameter server needs it")
    host_rank = job.placement.host_rank
    if job.placement.host == job.placement.leader:
        config = _tf_config(hosts, "master", host_rank)
    else:
        # Workers are counted from 0, and the leader is none of them.
        config = _tf_config(hosts, "worker", host_rank - 1)
    config_why = "how the processes of the cluster find each other"
    row = Variable("TF_CONFIG", config, config_why, ours=True)
    server = Auxiliary(
        name="TensorFlow parameter server",
        argv=(python, f"{job.environment.launcher_directory}/programs/tensorflow_server.py"),
        # No GPU, because TensorFlow's server would take the memory of the program's GPU.
        env={"TF_CONFIG": _tf_config(hosts, "ps", host_rank), "CUDA_VISIBLE_DEVICES": ""},
    )
    why = "every host runs the program, and a parameter server beside it"
    node_plan = common.own_process(job, common.command(job), [Reason(mode, why)], [row])
    needs = tuple(dict.fromkeys((*node_plan.needs, python)))
    return node_plan._replace(auxiliaries=(server,), needs=needs)


def _tf_config(hosts: Sequence[str], task_type: str, index: int) -> str:
    """Return the JSON of TF_CONFIG for one task.

    The leader has the master, every other host a worker, and every host a ps.

    Args:
        hosts: The hosts of the distribution, the leader first.
        task_type: ``master``, ``worker`` or ``ps``.
        index: Number of the task among the tasks of its type.
    """
    programs: list[Json] = [f"{host}:{names.TENSORFLOW_WORKER_PORT}" for host in hosts]
    servers: list[Json] = [f"{host}:{names.TENSORFLOW_SERVER_PORT}" for host in hosts]
    cluster: dict[str, Json] = {"master": programs[:1], "ps": servers, "worker": programs[1:]}
    task: dict[str, Json] = {"index": index, "type": task_type}
    return compact({"cluster": cluster, "environment": "cloud", "task": task})


_SCHEDULER = "DMLC_PS_ROOT_URI"
"""MXNet's variable for the address of the scheduler."""


def _mxnet(job: Job) -> NodePlan:
    """Plan MXNet: a scheduler on the leader, and on every host a server and the program.

    The program is the host's worker. Raises RefusalError for a wrong port, and for an image without
    Python.
    """
    python = common.program(job, "python", "MXNet's servers need it")
    environment = job.environment
    # MXNet listens on an address. resolve.py replaces the name of the leader by its address.
    program = f"{environment.launcher_directory}/programs/resolve.py"
    resolve = (environment.launcher_python, "-I", program, _SCHEDULER, "--")
    roles = ["server"]
    if job.placement.host == job.placement.leader:
        roles = ["scheduler", "server"]
    servers = []
    for role in roles:
        # The import does not return: with its role in DMLC_ROLE it is the scheduler or the server.
        argv = (*resolve, python, "-c", "import mxnet")
        servers.append(Auxiliary(f"MXNet {role}", argv, {"DMLC_ROLE": role}))
    why = f"every host runs the program, and beside it: {', '.join(roles)}"
    choice = Reason(f"mode {job.placement.mode}", why)
    resolve_why = "MXNet listens on an address and knows no names"
    command = (Reason("resolve.py", resolve_why, words=resolve), *common.command(job))
    node_plan = common.own_process(job, command, [choice], _mxnet_variables(job))
    return node_plan._replace(auxiliaries=tuple(servers), needs=(*node_plan.needs, python))


def _mxnet_variables(job: Job) -> list[Variable]:
    """Return MXNet's variables of the program. Raises RefusalError for a wrong port.

    The user's hyperparameters ``_ps_port`` and ``_ps_verbose`` replace the defaults.
    """
    user = job.environment.user_hyperparameters
    port = str(user.get("_ps_port") or names.MXNET_SCHEDULER_PORT)
    if not port.isdecimal() or not 1 <= int(port) <= _LAST_PORT:
        problem = Problem(
            f"{port!r} is not a TCP port", "hyperparameter _ps_port", "use 1024 to 65535"
        )
        raise RefusalError([problem])
    address = names.LOOPBACK
    if len(job.placement.hosts) > 1:
        address = job.placement.leader_address
    address_why = "where the scheduler is; each process looks its address up"
    count = str(len(job.placement.distribution_hosts))
    verbosity = str(user.get("_ps_verbose") or 0)
    rows = [
        Variable("DMLC_ROLE", "worker", "the program is a worker", ours=True),
        Variable("DMLC_NUM_WORKER", count, "one worker per host", ours=True),
        Variable("DMLC_NUM_SERVER", count, "one server per host", ours=True),
        Variable(_SCHEDULER, address, address_why, ours=True),
        Variable("DMLC_PS_ROOT_PORT", port, "where the scheduler listens", ours=True),
        Variable("PS_VERBOSE", verbosity, "how much the servers say"),
    ]
    if job.network.interface:
        why = f"the servers listen there: {job.network.interface_why}"
        rows.append(Variable("DMLC_INTERFACE", job.network.interface, why))
    return rows


def _torch(job: Job) -> NodePlan:
    """Plan PyTorch: one process per host. The script may start servers itself."""
    hosts = len(job.placement.distribution_hosts)
    rows = [
        Variable("RANK", str(job.placement.host_rank), "index of this host"),
        Variable("WORLD_SIZE", str(hosts), "one process per host"),
    ]
    why = (
        "PyTorch has no parameter servers: every host runs the program once, and they find each"
        " other by MASTER_ADDR"
    )
    choice = Reason(f"mode {job.placement.mode}", why)
    return common.own_process(job, common.command(job), [choice], rows)
