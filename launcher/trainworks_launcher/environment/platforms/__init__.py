"""Recognises the platform that started this host, and describes the job's hosts. Pure.

A platform is a scheduler or a service: Slurm, Kubeflow, AWS Batch. The file of a platform has a
function ``describe(sources) -> Description``, which reads environment variables, and files that
variables name. ``Description`` has the job's hosts in one form for all platforms, SageMaker's
resource config. All later steps are the same on every platform.

A job is refused, with the variables to set, if its scheduler does not name the other hosts;
otherwise each host would start a job of its own. To add a platform, write ``platforms/NAME.py``, or
a function in ``platforms/simple.py``, and add its row to PLATFORMS. ``Reader`` in ``common.py``
reads variables and collects the missing ones. A file is imported only when one of its marks is
present.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib import import_module
from types import MappingProxyType
from typing import Callable, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.json_values import NOTHING, Json, without_brackets
from trainworks_launcher.environment import cluster_hosts
from trainworks_launcher.environment.resource_config import Hosts, read_hosts

_GPU_DIGITS = 9
"""Digits of the largest number of a GPU that is read."""

_START_DIGITS = 9
"""Digits of a number of starts that are read, the last ones."""


class Platform(NamedTuple):
    """A row of PLATFORMS: how a platform is recognised.

    Attributes:
        name: Name of the platform and of its file, as ``train --plan`` shows it.
        marks: Variables that recognise the platform: one of them is set, even if it is empty. A
            star stands for any text: ``SLURM_JOB_*``. Three marks do not name a variable:
            RESOURCE_CONFIG_FILE stands for that file, HYPERPOD_AGENT for that program, and A_KIND
            for the variables that ``cluster_hosts.py`` recognises.
        ends_jobs: Whether the platform sends KILL itself, some time after its stop signal.
        starts: Variable with the number of starts, ``""`` if the platform has none.
        first_start: Value of that variable at the first start.
        job: Variables that together name one attempt of the job, with equal values on all of its
            hosts; ``()`` if there are none.
        in_rows: Whether ROWS in ``simple.py`` describes the platform, not a file of its name.
    """

    name: str
    marks: tuple[str, ...]
    ends_jobs: bool = True
    starts: str = ""
    first_start: int = 0
    job: tuple[str, ...] = ()
    in_rows: bool = False

    def restarts(self, variables: Mapping[str, str]) -> int:
        """Return how often the platform started the job again; 0 if it does not say."""
        value = variables.get(self.starts, "")
        if not value.isdecimal():
            return 0
        # Python refuses to convert a text of very many digits. No job was started so often.
        starts = int(value[-_START_DIGITS:])
        return max(0, starts - self.first_start)


HYPERPOD_AGENT = "hyperpodrun"
"""Program of the command line that gets its ranks from the HyperPod training operator."""

A_KIND = "(a count with an index, or a list of hosts)"
"""Mark of an unknown scheduler: variables such as ``X_TASK_COUNT=2`` with ``X_TASK_INDEX=0``."""

_ROWS = (
    Platform("hosts", (names.HOSTS_VARIABLE, names.HOST_VARIABLE), ends_jobs=False),
    Platform(
        "sagemaker", (names.RESOURCE_CONFIG_FILE,), job=(names.JOB_NAME_VARIABLE,), in_rows=True
    ),
    Platform("hyperpod", (HYPERPOD_AGENT,), in_rows=True),
    Platform(
        "mpirun",
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        in_rows=True,
    ),
    Platform(
        "slurm",
        (
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
            "SLURM_PROCID",
            "SLURM_NODEID",
            "SLURM_NNODES",
            "SLURM_JOB_*",
            "SLURM_STEP_*",
        ),
        starts="SLURM_RESTART_COUNT",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
    Platform("mpi_operator", ("K_MPI_JOB_ROLE", names.MPI_HOSTFILE_VARIABLE)),
    Platform(
        "kubeflow", ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_*")
    ),
    Platform("volcano", ("VC_*_HOSTS", "VC_TASK_INDEX", "VK_TASK_INDEX")),
    Platform("leader_worker_set", ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")),
    Platform(
        "batch",
        (
            "AWS_BATCH_JOB_NUM_NODES",
            "AWS_BATCH_JOB_NODE_INDEX",
            "AWS_BATCH_JOB_MAIN_NODE_INDEX",
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
        ),
        starts="AWS_BATCH_JOB_ATTEMPT",
        first_start=1,
    ),
    Platform("dstack", ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_NODES_IPS"), in_rows=True),
    Platform(
        "skypilot", ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"), in_rows=True
    ),
    Platform("vertex", ("CLUSTER_SPEC",)),
    Platform("azureml", ("AZUREML_NODE_COUNT",)),
    Platform(
        "ranks",
        (
            "PMI_SIZE",
            "PMI_RANK",
            "PMIX_RANK",
            "ALPS_APP_PE",
            "HOROVOD_SIZE",
            "HOROVOD_RANK",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "TORCHELASTIC_RUN_ID",
            "TF_CONFIG",
        ),
    ),
    # In a container the engine sends KILL; without one these variables may be a person's own.
    Platform(
        "environment", ("MASTER_ADDR", "WORLD_SIZE", "RANK", "NNODES", "NODE_RANK"), ends_jobs=False
    ),
    Platform("flux", ("FLUX_JOB_NNODES", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"), job=("FLUX_JOB_ID",)),
    Platform(
        "lsf",
        ("LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "LSB_DJOB_NUMPROC"),
        job=("LSB_JOBID", "LSB_JOBINDEX"),
        in_rows=True,
    ),
    Platform(
        "pbs", ("PBS_JOBID", "PBS_NODEFILE", "PBS_NUM_NODES"), job=("PBS_JOBID",), in_rows=True
    ),
    Platform(
        "oar", ("OAR_JOB_ID", "OAR_NODEFILE", "OAR_NODE_FILE"), job=("OAR_JOB_ID",), in_rows=True
    ),
    Platform(
        "kuberay", ("KUBERAY_GEN_RAY_START_CMD", "RAY_CLUSTER_NAME", "FQ_RAY_IP"), in_rows=True
    ),
    Platform(
        "counted",
        (
            "NHOSTS",
            "COBALT_JOBSIZE",
            "_CONDOR_NPROCS",
            "BEAKER_REPLICA_COUNT",
            "LEPTON_JOB_TOTAL_WORKERS",
            "TPU_WORKER_HOSTNAMES",
            "DMLC_NUM_WORKER",
            "PADDLE_TRAINERS_NUM",
            "JAX_NUM_PROCESSES",
            "NUM_NODES",
            "NODE_COUNT",
            "MLP_WORKER_NUM",
            "BT_GROUP_SIZE",
            "NGC_ARRAY_SIZE",
            "HOST_NUM",
            "PJM_NODE",
            "MEGASCALE_NUM_SLICES",
            "TPU_PROCESS_ADDRESSES",
            "NEURON_PJRT_PROCESSES_NUM_DEVICES",
            "LOADL_PROCESSOR_LIST",
        ),
        in_rows=True,
    ),
    Platform("several", (A_KIND,), in_rows=True),
    Platform("indexed_job", (names.INDEX_VARIABLE,), in_rows=True),
)
PLATFORMS: Mapping[str, Platform] = MappingProxyType({row.name: row for row in _ROWS})
"""Name -> row.

If several platforms are recognised, the first one counts. The order: variables that a person sets,
SageMaker's file, schedulers (each before those that it is built on), and at the end schedulers that
do not name the hosts.
"""


_OTHER_MARKS = MappingProxyType(
    {
        names.RESOURCE_CONFIG_FILE: "there is a resource config",
        HYPERPOD_AGENT: f"the program is {HYPERPOD_AGENT}",
    }
)
"""Mark that does not name a variable -> the reason that ``train --plan`` shows."""

_HIDES_NOTHING: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class Sources(NamedTuple):
    """The sources from which a platform is recognised and its hosts are read.

    Attributes:
        variables: The process's environment.
        resource_config: The file RESOURCE_CONFIG_FILE, empty if there is none.
        hostname: The kernel's host name.
        read: Returns the text of a file that a variable names; ``""`` if it cannot be read.
        address: Returns this host's address on the interface of the default
            route; ``""`` if there is none.
        program: Name of the program on the command line; ``""`` for none.
    """

    variables: Mapping[str, str]
    resource_config: Mapping[str, Json] = NOTHING
    hostname: str = ""
    read: Callable[[str], str] = lambda _: ""
    address: Callable[[], str] = lambda: ""
    program: str = ""

    @property
    def pairs(self) -> tuple[cluster_hosts.Pair, ...]:
        """Pairs of a count and an index, for example ``X_TASK_COUNT`` and ``X_TASK_INDEX``."""
        return cluster_hosts.find_pairs(self.variables)

    @property
    def lists(self) -> tuple[cluster_hosts.HostList, ...]:
        """Lists of several hosts, for example ``X_HOST_LIST=10.0.0.4,10.0.0.5``."""
        return cluster_hosts.find_lists(self.variables, self.read)


class Tasks(NamedTuple):
    """This process's place among the ranks, where the platform itself starts every rank.

    Attributes:
        rank: Rank of this process in the job.
        local_rank: Rank of this process on its host.
        counts: Ranks of each host, in the order of the hosts, for example ``(8, 8)``.
    """

    rank: int
    local_rank: int
    counts: tuple[int, ...]


class Description(NamedTuple):
    """A platform's description of the job's hosts.

    Attributes:
        platform: Name of the platform; ``""`` if none is recognised, and the job is this one host.
        why: The mark that recognised the platform, and assumptions about its variables, in words
            for ``train --plan``.
        resource_config: The job's hosts, in the form of RESOURCE_CONFIG_FILE: ``hosts``, the leader
            first, and ``current_host``; empty for a job of this one host.
        where: Source of the hosts for messages, for example ``SLURM_STEP_NODELIST``.
        leader_address: Name or address by which the hosts reach the leader;
            ``""``: the leader's name.
        names_resolve: Whether DNS resolves the names of the hosts. Names such as ``node-0`` are
            only labels; a host's address is known once it has joined the leader.
        served: Hosts on which no launcher runs: they serve ssh, with keys that the platform mounts.
            Only mpirun can start ranks there.
        gpus: Number of the host's GPUs that this process may use, by CUDA_VISIBLE_DEVICES, else by
            the platform; None: all.
        processes_per_host: Number of processes on each host that the platform requests; 0: none is
            requested.
        processes_why: Source of ``processes_per_host``, for example ``PET_NPROC_PER_NODE``.
        mode: Name of the mode of a job that requests none; ``""``: none.
        tasks: Set where the platform starts every rank; None where it starts each host once.
        control_port: Default of the control channel's port; 0: the launcher's own.
        master_port: Default of the port of rank 0's store; 0: the launcher's own.
        ends_jobs: As ``Platform.ends_jobs``.
        restarts: How often the platform started the job again.
        hidden: ``mpirun``, ``torchrun`` or ``ranks`` -> beginnings of variables that the program
            must not see, because it would read them as its own settings. Ranks that mpirun starts
            get the variables hidden from mpirun, with the values of their own host; the variables
            under ``ranks`` are hidden from ranks, too.
        kept: Variables of the rendezvous that the launcher leaves as they are.
        ranks_elsewhere: Variable that shows that another program has started this process as one
            of several, for example ``RANK=3``; ``""``: none shows it.
        job_id: The scheduler's name of the job, for the directory of its
            results; ``""`` if there is none.
        warnings: Lines to print before the start.
        problems: Variables that are missing or wrong.
    """

    platform: str = ""
    why: str = (
        "no platform's variable is set, and there is no resource config: the job is this one host"
    )
    resource_config: Mapping[str, Json] = NOTHING
    where: str = names.RESOURCE_CONFIG_FILE
    leader_address: str = ""
    names_resolve: bool = True
    served: tuple[str, ...] = ()
    gpus: int | None = None
    processes_per_host: int = 0
    processes_why: str = ""
    mode: str = ""
    tasks: Tasks | None = None
    control_port: int = 0
    master_port: int = 0
    ends_jobs: bool = False
    restarts: int = 0
    hidden: Mapping[str, tuple[str, ...]] = _HIDES_NOTHING
    kept: tuple[str, ...] = ()
    ranks_elsewhere: str = ""
    job_id: str = ""
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def hosts(self) -> Hosts:
        """The job's hosts."""
        return read_hosts(self.resource_config)


def job_name(platform: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of ``Platform.job``, the same on all hosts of the job.

    For example ``("1234", "0", "")`` of Slurm. ``()`` if the platform does not name its jobs.
    """
    if not platform:
        return ()
    return tuple(variables.get(name, "") for name in PLATFORMS[platform].job)


NONE = Description()
"""The description without a platform: ``docker run`` by hand, a laptop."""


def recognise(sources: Sources) -> tuple[tuple[Platform, str], ...]:
    """Return each recognised platform with its mark, in the order of PLATFORMS."""
    recognised = []
    for row in PLATFORMS.values():
        for mark in row.marks:
            present = _present(mark, sources)
            if present:
                recognised.append((row, present[0]))
                break
    return tuple(recognised)


def _present(mark: str, sources: Sources) -> tuple[str, ...]:
    """Return the variables that a mark stands for and that are set, even if they are empty."""
    if mark == A_KIND:
        counts = [pair.names[0] for pair in sources.pairs]
        lists = [listed.name for listed in sources.lists]
        return (*counts, *lists)
    if "*" in mark:
        return tuple(name for name in sorted(sources.variables) if fnmatchcase(name, mark))
    if mark == names.RESOURCE_CONFIG_FILE:
        is_present = bool(sources.resource_config)
    elif mark == HYPERPOD_AGENT:
        is_present = sources.program == mark
    else:
        is_present = mark in sources.variables
    return (mark,) if is_present else ()


def describe(sources: Sources) -> Description:
    """Return the platform's description of the job's hosts.

    Never raises: mistakes become ``problems``.
    """
    recognised = recognise(sources)
    description = _described(sources, recognised) if recognised else NONE
    # A scheduler counts its starts also where it does not describe the hosts: TRAINWORKS_HOSTS
    # names them, or the job has one node of AWS Batch.
    restarts = max(row.restarts(sources.variables) for row in PLATFORMS.values())
    description = description._replace(restarts=restarts)
    # CUDA obeys this variable on every platform, also where the platform names another number.
    visible = visible_gpus(sources.variables)
    if visible is None:
        return description
    return description._replace(gpus=len(visible))


def _described(sources: Sources, recognised: Sequence[tuple[Platform, str]]) -> Description:
    """Return the description of the first recognised platform, with its problems.

    recognised: at least one platform, each with the mark that recognised it (``recognise``).
    """
    (row, mark), *others = recognised
    description = _read(sources, row)

    value = sources.variables.get(mark, mark)
    default = f"{mark} is set" if value else f"{mark} is set, but empty"
    why = _OTHER_MARKS.get(mark, default)
    for other, other_mark in others:
        # The platform's own variables are also a count or a list of an unknown scheduler.
        if _is_own(other_mark, row) or _is_mark(other_mark, row):
            continue
        why += f"; {other_mark} alone would mean platform {other.name!r}, which counts after it"
    if description.why != NONE.why:
        why += f"; {description.why}"

    # One kind of problem at a time: the later checks need what the earlier ones have found right.
    problems = description.problems
    if not problems:
        problems = _check_addresses(sources, description)
    if not problems:
        problems = _check_counts(sources, row, description, others)
    return description._replace(
        platform=row.name,
        why=why,
        ends_jobs=row.ends_jobs,
        problems=problems,
    )


def _read(sources: Sources, row: Platform) -> Description:
    """Call the platform's ``describe``, in a file of its own or in ``simple.py``.

    Imports that file.
    """
    read: Callable[[Sources], Description]
    if row.in_rows:
        read = import_module(f"{__name__}.simple").ROWS[row.name]
    else:
        read = import_module(f"{__name__}.{row.name}").describe
    return read(sources)


def _check_addresses(sources: Sources, description: Description) -> tuple[Problem, ...]:
    """Return a problem if several hosts cannot reach their leader at an address in a variable."""
    from trainworks_launcher.environment.platforms import (
        common,  # a recognised platform has loaded it
    )

    count = _count_of(description)
    if count < 2:
        return ()
    addresses = [(description.where, description.leader_address)]
    if "MASTER_ADDR" in description.kept:
        # The script reads this variable, beside the platform's own.
        master = without_brackets(sources.variables.get("MASTER_ADDR", ""))
        addresses.append(("MASTER_ADDR", master))
    for variable, address in addresses:
        if not address:
            continue
        mistake = common.why_no_leader(address, count)
        if mistake:
            advice = "give the name or address of the first host alone"
            return (Problem(mistake, f"variable {variable}", advice),)
    return ()


_DECIDES_ALONE = ("hosts", "sagemaker", "hyperpod", "mpirun", "ranks")
"""Platforms that are not compared with others: variables that a person sets, the platform's own
file, and programs that have started each process themselves.
"""

_COUNTERS = ("counted", "flux", "lsf", "oar", "pbs", "several")
"""Platforms that refuse every job of several hosts, because they do not name the hosts."""


def _check_counts(
    sources: Sources,
    row: Platform,
    description: Description,
    others: Sequence[tuple[Platform, str]],
) -> tuple[Problem, ...]:
    """Return a problem if the platform has one host, and another recognised platform has more.

    Args:
        sources: The sources of all platforms.
        row: The platform that counts.
        description: Its description.
        others: The other recognised platforms, each with its mark.
    """
    # A platform with several hosts has found them all.
    if row.name in _DECIDES_ALONE or _count_of(description) > 1 or description.served:
        return ()
    if description.tasks is not None or description.ranks_elsewhere:
        return ()
    for other, mark in others:
        # A count among the platform's own variables was read with them.
        if other.name == "several" and _is_own(mark, row):
            continue
        second = _read(sources, other)
        count = _count_of(second)
        is_world_size = other.name == "environment" and second.where == "WORLD_SIZE"
        if is_world_size and count == description.processes_per_host:
            continue  # WORLD_SIZE counts the processes of this one host
        if count > 1:
            number = f"{count} hosts"
        elif second.problems and other.name in _COUNTERS:
            number = "more than one"
        else:
            continue

        problem = (
            f"{row.name} says that the job has one host ({description.where}),"
            f" and {other.name} says {number} ({mark})"
        )
        advice = (
            f"unset the variables of the one that is wrong, or set {names.HOSTS_VARIABLE} and"
            f" {names.HOST_VARIABLE}"
        )
        if row.name == "kubeflow" and "PET_RDZV_ENDPOINT" in sources.variables:
            advice = "leave elasticPolicy out, or give it as many replicas as the job has pods"
        return (Problem(problem, f"{description.where}, {second.where}", advice),)
    return ()


def _count_of(description: Description) -> int:
    """Return the number of the job's hosts; 1 for a job of this one host, without a list."""
    return max(1, len(description.hosts.names))


def _is_mark(name: str, row: Platform) -> bool:
    """Return whether a variable, or what else a mark stands for, recognises the platform."""
    return any(fnmatchcase(name, mark) for mark in row.marks)


def _is_own(name: str, row: Platform) -> bool:
    """Return whether a variable begins like the platform's own.

    SLURM_NNODES is Slurm's, because Slurm's marks begin with SLURM.
    """
    if row.name in ("counted", "environment"):
        return False
    vendors = {mark.partition("_")[0] for mark in row.marks if "_" in mark}
    vendor, _, _ = name.lstrip("_").partition("_")
    return vendor in vendors


def visible_gpus(variables: Mapping[str, str], count: int | None = None) -> tuple[str, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES: numbers or UUIDs of GPUs, as ``("0", "3")``.

    None if the variable is not set; ``()`` if it hides every GPU. Source: CUDA programming guide,
    environment variables: devices after an entry that is not valid are not visible.

    Args:
        variables: The process's environment.
        count: GPUs of the container; None: not known.
    """
    value = variables.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    visible: list[str] = []
    for entry in map(str.strip, value.split(",")):
        is_number = entry.isdecimal() and len(entry) <= _GPU_DIGITS
        exists = is_number and (count is None or int(entry) < count)
        is_uuid = entry.startswith(("GPU-", "MIG-"))
        if not exists and not is_uuid:
            break
        visible.append(entry)
    return tuple(visible[:count])
