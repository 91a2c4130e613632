"""The platforms: who started this host, and what it says about the job's hosts. Pure.

A platform's file has ``describe(given) -> Description``: from environment variables (and files that
they name) to the launcher's one description of a job's hosts, the resource config. What follows is
the same on every platform. Where a scheduler does not say enough, its jobs are refused with what to
set; they never start as one job for each host. To add one, write ``platforms/NAME.py``, or a few
words in ``platforms/simple.py``, and add its row to PLATFORMS; ``common.Reader`` there reads
variables and collects what is missing. A file is loaded only when one of its marks is present.
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


class Platform(NamedTuple):
    """One platform.

    Attributes:
        name: Name of its file, as ``train --plan`` shows it.
        marks: Variables; one that is set, even if it is empty, says that this platform started the
            host. A star stands for any text, RESOURCE_CONFIG_FILE for that file, HYPERPOD_AGENT for
            that program, A_KIND for what ``cluster_hosts`` recognises.
        ends_jobs: Whether it sends KILL itself, some time after its stop signal.
        starts: Variable with the number of starts, ``""`` if the platform has none.
        first_start: What it says at the first one.
        job: Variables that together name the job, equal on all of its hosts, another for each
            attempt; ``()`` if there are none.
        in_rows: The file ``simple`` describes it; else a file of its name, which says where its
            variables are documented.
    """

    name: str
    marks: tuple[str, ...]
    ends_jobs: bool = True
    starts: str = ""
    first_start: int = 0
    job: tuple[str, ...] = ()
    in_rows: bool = False

    def restarts(self, variables: Mapping[str, str]) -> int:
        """Return how often the platform started the job again, as far as it says."""
        value = variables.get(self.starts, "")
        return max(0, int(value[-9:]) - self.first_start) if value.isdecimal() else 0


HYPERPOD_AGENT = "hyperpodrun"
"""Program of the command line that is told its ranks by the HyperPod training operator."""

A_KIND = "(a count with an index, or a list of hosts)"
"""Mark of a scheduler that is recognised by the kind of its variables."""

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

Where several are recognised the first one counts: what a person said, the platform's file, then the
schedulers, each before those that it is built on, and at the end those that do not say the hosts by
themselves.
"""


_OTHER_MARKS = MappingProxyType(
    {
        names.RESOURCE_CONFIG_FILE: "there is a resource config",
        HYPERPOD_AGENT: f"the program is {HYPERPOD_AGENT}",
    }
)
"""Mark that is no variable -> how it says the platform."""

_HIDES_NOTHING: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class Given(NamedTuple):
    """What a platform is read from.

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
        """Variables that say, by their kind, that this process is one of several."""
        return cluster_hosts.pairs(self.variables)

    @property
    def lists(self) -> tuple[cluster_hosts.Listed, ...]:
        """Variables that name, by their kind, several hosts."""
        return cluster_hosts.lists(self.variables, self.read)


class Tasks(NamedTuple):
    """This process where the platform itself starts every rank.

    Attributes:
        rank: Rank of this process in the job.
        local_rank: Rank of this process on its host.
        counts: Ranks of each host, in the order of the hosts.
    """

    rank: int
    local_rank: int
    counts: tuple[int, ...]


class Description(NamedTuple):
    """What a platform says about the job's hosts.

    Attributes:
        platform: Name of the platform; ``""`` if none is recognised, and the job is this one host.
        why: How it was recognised, for a person; from a platform's file, what it had to assume.
        resource_config: The job's hosts, in the form of RESOURCE_CONFIG_FILE: ``hosts``, the leader
            first, and ``current_host``; empty for a job of this one host.
        where: What a message about the hosts names as their source.
        leader_address: Name or address by which the hosts reach the leader;
            ``""``: the leader's name.
        names_resolve: Whether the hosts are called by names or addresses that lead to them.
        served: Hosts on which no launcher runs: they serve ssh, with keys that the platform mounts.
            Only mpirun can start ranks there.
        gpus: GPUs of the host that this process is given, by CUDA_VISIBLE_DEVICES, else by the
            platform; None: all.
        processes_per_host: Processes on each host that the platform asks for; 0: it does not say.
        processes_why: Where ``processes_per_host`` comes from.
        mode: Name of the mode of a job that asks for none; ``""``: none.
        tasks: Set where the platform starts every rank; None where it starts each host once.
        control_port: Default of the control channel's port; 0: the launcher's own.
        master_port: Default of the port of rank 0's store; 0: the launcher's own.
        ends_jobs: As ``Platform.ends_jobs``.
        restarts: How often the platform started the job again.
        hidden: ``mpirun`` or ``torchrun`` -> beginnings of variables that it must not see, because
            it would take them for its own settings. Ranks that mpirun starts do see them, from
            their own host, but for those of ``ranks``.
        kept: Variables of the rendezvous that the launcher leaves as they are.
        ranks_elsewhere: Why this process is one of several that another program
            has started; ``""``: it is not.
        job_id: The scheduler's name of the job, for the directory of its
            results; ``""`` if there is none.
        warnings: Lines to print before the start.
        problems: What is missing or wrong.
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
    """Return what names the job on a platform, the same on all of its hosts.

    ``()`` if nothing does.
    """
    return tuple(variables.get(name, "") for name in PLATFORMS[platform].job) if platform else ()


NONE = Description()
"""No platform: ``docker run`` by hand, a laptop."""


def recognise(given: Given) -> tuple[tuple[Platform, str], ...]:
    """Return each platform that is recognised with the mark that says so, the
    one that counts first.
    """
    recognised = []
    for row in PLATFORMS.values():
        for mark in row.marks:
            present = _present(mark, given)
            if present:
                recognised.append((row, present[0]))
                break
    return tuple(recognised)


def _present(mark: str, given: Given) -> tuple[str, ...]:
    """Return the variables that a mark stands for and that are set, even if they are empty."""
    if mark == A_KIND:
        pairs = [pair.names[0] for pair in given.pairs]
        lists = [listed.name for listed in given.lists]
        return (*pairs, *lists)
    if "*" in mark:
        return tuple(name for name in sorted(given.variables) if fnmatchcase(name, mark))
    if mark == names.RESOURCE_CONFIG_FILE:
        is_present = bool(given.resource_config)
    elif mark == HYPERPOD_AGENT:
        is_present = given.program == mark
    else:
        is_present = mark in given.variables
    return (mark,) if is_present else ()


def describe(given: Given) -> Description:
    """Return what the platform says that started this host.

    Never raises: ``problems`` has what is wrong.
    """
    recognised = recognise(given)
    description = _described(given, recognised) if recognised else NONE
    visible = visible_gpus(given.variables)  # the nearest word on every platform
    if visible is None:
        return description
    return description._replace(gpus=len(visible))


def _described(given: Given, found: Sequence[tuple[Platform, str]]) -> Description:
    (row, mark), *others = found
    empty = "" if given.variables.get(mark, mark) else ", but empty"
    why = _OTHER_MARKS.get(mark, f"{mark} is set{empty}")
    for other, also in others:
        why += f"; {also} would mean {other.name}, which comes later in the order"
    made = _read(given, row)
    why += "" if made.why == NONE.why else f"; {made.why}"
    if not made.problems:
        made = made._replace(
            problems=_check_addresses(given, made) or _check_counts(given, row, made, others)
        )
    restarts = row.restarts(given.variables)
    return made._replace(platform=row.name, why=why, ends_jobs=row.ends_jobs, restarts=restarts)


def _read(given: Given, row: Platform) -> Description:
    module = import_module(f"{__name__}.{'simple' if row.in_rows else row.name}")
    read: Callable[[Given], Description] = module.ROWS[row.name] if row.in_rows else module.describe
    return read(given)


def _check_addresses(given: Given, made: Description) -> tuple[Problem, ...]:
    """Return what is wrong with the leader's address of a job with several
    hosts, whoever has set it.
    """
    from trainworks_launcher.environment.platforms import (
        common,  # a recognised platform has loaded it
    )

    count = _count_of(made)
    if count < 2:
        return ()
    kept = (
        without_brackets(given.variables.get("MASTER_ADDR", ""))
        if "MASTER_ADDR" in made.kept
        else ""
    )
    for address, where in ((made.leader_address, made.where), (kept, "MASTER_ADDR")):
        what = common.why_no_leader(address, count) if address else ""
        if what:
            return (
                Problem(
                    what, f"variable {where}", "give the name or address of the first host alone"
                ),
            )
    return ()


_DECIDES_ALONE = ("hosts", "sagemaker", "hyperpod", "mpirun", "ranks")
"""Platforms whose word is not compared: a person's, the platform's own file, and a program that has
started each process itself.
"""

_COUNTERS = ("counted", "flux", "lsf", "oar", "pbs", "several")
"""Platforms that refuse exactly where a job has several hosts."""


def _check_counts(
    given: Given, row: Platform, made: Description, others: Sequence[tuple[Platform, str]]
) -> tuple[Problem, ...]:
    """Return a problem where the platform that counts says one host, and another one that is
    recognised says more.
    """
    alone = (
        _count_of(made) == 1 and made.tasks is None and not made.ranks_elsewhere and not made.served
    )
    if not alone or row.name in _DECIDES_ALONE:
        return ()
    for other, mark in others:
        if other.name == "several" and _is_own(mark, row):
            continue
        said = _read(given, other)
        count = _count_of(said)
        if (
            other.name == "environment"
            and said.where == "WORLD_SIZE"
            and count == made.processes_per_host
        ):
            continue  # it counts the processes of this one host
        more = count > 1 or (bool(said.problems) and other.name in _COUNTERS)
        if not more:
            continue
        told = f"{count} hosts" if count > 1 else "more than one"
        problem = (
            f"{row.name} says that the job has one host ({made.where}),"
            f" and {other.name} {told} ({mark})"
        )
        advice = (
            f"unset the variables of the one that is wrong, or set {names.HOSTS_VARIABLE} and"
            f" {names.HOST_VARIABLE}"
        )
        if row.name == "kubeflow" and "PET_RDZV_ENDPOINT" in given.variables:
            advice = "leave elasticPolicy out, or give it as many replicas as the job has pods"
        return (Problem(problem, f"{made.where}, {said.where}", advice),)
    return ()


def _count_of(made: Description) -> int:
    return max(1, len(made.hosts.names))


def _is_own(name: str, row: Platform) -> bool:
    """Return whether a variable is one more of a platform's own: SLURM_NNODES beside
    SLURM_STEP_NUM_NODES.
    """
    vendors = {mark.partition("_")[0] for mark in row.marks if "_" in mark}
    return (
        row.name not in ("counted", "environment") and name.lstrip("_").partition("_")[0] in vendors
    )


def visible_gpus(variables: Mapping[str, str], count: int | None = None) -> tuple[str, ...] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, as it calls them: by number or by UUID.

    None if it is not set.

    Source: CUDA programming guide, environment variables: devices after an
    entry that is not valid are not visible.

    Args:
        variables: The process's environment.
        count: GPUs of the container; None: not known.
    """
    value = variables.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    found: list[str] = []
    for entry in map(str.strip, value.split(",")):
        exists = entry.isdecimal() and len(entry) < 10 and (count is None or int(entry) < count)
        if not exists and not entry.startswith(("GPU-", "MIG-")):
            break
        found.append(entry)
    return tuple(found[:count])
