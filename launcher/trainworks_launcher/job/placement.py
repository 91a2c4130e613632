"""Place a job: choose its mode, its hosts, and the number of processes on each host. Pure.

A helper of ``read_placement`` adds a problem to the reader and continues with the nearest value, so
that a refusal has all problems of the job.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from typing import Iterable, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import texts, without_brackets
from trainworks_launcher.contract.modes import MINIMUM_SOURCE, MODES, SWITCHES, Mode
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.contract.settings import Reader
from trainworks_launcher.environment.cluster_hosts import is_host_name
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.environment.manifest import Instance
from trainworks_launcher.environment.platforms import Description, Tasks
from trainworks_launcher.environment.resource_config import LOCAL, check_resource_config
from trainworks_launcher.job import model_parallel
from trainworks_launcher.job.elastic import MODE as ELASTIC
from trainworks_launcher.job.elastic import Elastic, read_elastic

MODEL_PARALLEL = "smdistributed.modelparallel"
"""The one mode that has no switch of its own."""

DATA_PARALLEL = "smdistributed.dataparallel"
"""A mode of mpirun. With torch_distributed, smddp is only a library of the ranks."""

_NOT_A_MODE = ("sagemaker_enable_cloudwatch_metrics", "sagemaker_toolkit_native_launcher_enabled")
"""Hyperparameters that end like the switch of a mode, and switch on no mode."""

_IPV6_MODES = ("none", ELASTIC)
"""Modes that take an IPv6 address as a host's name.

mpirun reads the text after a colon as a number of slots, TensorFlow as a port.
"""

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class Placement(NamedTuple):
    """The hosts and processes of a job, as one host sees them.

    Attributes:
        mode: A key of ``contract.modes.MODES``, such as ``torch_distributed``.
        hosts: All hosts of the job, in the platform's order.
        host: This host.
        distribution_hosts: The hosts that have ranks, the leader first.
        slots: Number of processes of each of ``distribution_hosts``, such as ``(8, 8)``.
        processes: Number of ranks of the job; at most the sum of ``slots``.
        processes_origin: The user or the platform, by whom the processes per host were chosen.
        processes_why: Reason for the processes per host, such as ``one per GPU``.
        instance_type: Instance type of this host, as SageMaker names it.
        mpi_options: The user's mpirun options, as words.
        mpi_options_where: The setting of ``mpi_options``, such as ``hyperparameter NAME``.
        elastic: Restarts, and hosts that may be lost.
        leader_address: Name or address by which this host reaches the leader.
        has_ssh_workers: Whether the other hosts have no launcher, and serve ssh with keys that the
            platform mounts, as in a job of the Kubernetes MPI operator.
        tasks: The task that this process is, where the platform starts every rank; else None.
        warnings: Lines to print before the start.
    """

    mode: str
    hosts: tuple[str, ...]
    host: str
    distribution_hosts: tuple[str, ...]
    slots: tuple[int, ...]
    processes: int
    processes_origin: Origin
    processes_why: str
    instance_type: str
    mpi_options: tuple[str, ...]
    mpi_options_where: str
    elastic: Elastic
    leader_address: str
    has_ssh_workers: bool = False
    tasks: Tasks | None = None
    warnings: tuple[str, ...] = ()

    @property
    def leader(self) -> str:
        """The host that has rank 0, starts mpirun, and listens on the control port.

        All three are on one host, also where the distribution is an instance group without the
        job's first host: mpirun needs keys that the listening host makes, and the model that is
        kept is the one that rank 0 writes.
        """
        return self.distribution_hosts[0]

    @property
    def members(self) -> tuple[str, ...]:
        """The launchers of the job, the leader's first: one per host, or one per task.

        A task is named by its rank, ``task 3``, because a task of Slurm cannot know the hosts of
        all ranks (srun --distribution).
        """
        if self.tasks is not None:
            return tuple(f"task {rank}" for rank in range(sum(self.tasks.counts)))
        if self.has_ssh_workers:
            return (self.host,)
        workers = [host for host in self.hosts if host != self.leader]
        return (self.leader, *workers)

    @property
    def member(self) -> str:
        """This launcher's name in ``members``."""
        if self.tasks is not None:
            return f"task {self.tasks.rank}"
        return self.host

    @property
    def has_ranks(self) -> bool:
        """Whether this host has ranks. A host without ranks runs the program once, by itself."""
        return self.host in self.distribution_hosts

    @property
    def host_rank(self) -> int:
        """Index of this host in ``distribution_hosts``; 0 is the leader.

        Raises ValueError for a host without ranks.
        """
        return self.distribution_hosts.index(self.host)

    @property
    def processes_per_host(self) -> int:
        """Processes of this host; 1 on a host without ranks."""
        if not self.has_ranks:
            return 1
        return self.slots[self.host_rank]


class _Slots(NamedTuple):
    """The number of processes on each host of the distribution.

    Attributes:
        counts: One number per host, in the order of the hosts, such as ``(8, 8)``.
        why: Reason for the numbers, such as ``one per GPU``.
    """

    counts: tuple[int, ...]
    why: str


def read_placement(
    environment: Environment, requested_host: str = ""
) -> tuple[Placement, list[Problem]]:
    """Choose the mode, the hosts and the processes of a job.

    Args:
        environment: The environment of the host.
        requested_host: The host that the job is made for, from option ``--host``; default: this
            host.

    Returns:
        The placement, and its problems. With problems the placement has the nearest possible
        values. Nothing is raised.
    """
    # A helper that refuses a value adds a problem to the reader, and the job is still placed.
    reader = Reader(environment.reserved, environment.variables)
    reader.problems += check_resource_config(environment.hosts.document)
    hosts = _read_hosts(environment, reader)
    host = _choose_host(environment, hosts, requested_host, reader)
    mode = _choose_mode(environment, reader)
    distribution_hosts = _choose_distribution_hosts(environment, mode, hosts, reader)
    reader.problems += _missing_programs(environment, mode)
    requested_processes = reader.count(names.PROCESSES_PER_HOST)
    slots = _count_slots(environment, mode, distribution_hosts, requested_processes, reader)
    processes = _count_processes(reader, mode, slots.counts)
    if mode.name == MODEL_PARALLEL:
        _check_model_parallel(environment, processes, reader)
    reader.warnings += _unknown_types(environment, hosts)
    _check_addresses(environment, mode, hosts, reader)
    elastic = read_elastic(reader, mode.name, len(distribution_hosts), len(hosts))
    _check_restarts(environment, mode, elastic, reader)
    platform = environment.platform
    leader = distribution_hosts[0]
    leader_address = platform.leader_address or leader
    if host == leader and environment.devices.own_route:
        # The leader's own name may resolve to another host on the leader itself, so the programs
        # of the leader take its address.
        leader_address = environment.devices.own_route
    origin = Origin.PLATFORM
    if requested_processes and not mode.one_per_host:
        origin = Origin.USER
    placement = Placement(
        mode=mode.name,
        hosts=hosts,
        host=host,
        distribution_hosts=distribution_hosts,
        slots=slots.counts,
        processes=processes,
        processes_origin=origin,
        processes_why=slots.why,
        instance_type=environment.hosts.instance_type_of(host),
        mpi_options=_mpi_options(environment, mode, reader),
        mpi_options_where=f"hyperparameter {mode.options}",
        leader_address=leader_address,
        has_ssh_workers=bool(platform.served),
        tasks=platform.tasks,
        elastic=elastic,
        warnings=tuple(reader.warnings),
    )
    return placement, reader.problems


def _check_model_parallel(environment: Environment, processes: int, reader: Reader) -> None:
    """Refuse parameters of model parallelism that the processes or the image's smp cannot have.

    The reader gets the problems, and a warning for each unknown parameter. Nothing is raised.
    """
    parameters, where = model_parallel.parameters(
        environment.hyperparameters, environment.variables
    )
    protected = environment.manifest.protected
    reader.problems += model_parallel.check_processes(parameters, where, processes)
    reader.problems += model_parallel.check_library(parameters, where, protected)
    reader.warnings += model_parallel.unknown(parameters)


def _check_addresses(
    environment: Environment, mode: Mode, hosts: Sequence[str], reader: Reader
) -> None:
    """Refuse IPv6 addresses as names of hosts in a mode that does not read IPv6 addresses.

    The reader gets the problem; nothing is raised.
    """
    has_ipv6 = any(":" in name for name in hosts)
    if not has_ipv6 or mode.name in _IPV6_MODES:
        return
    problem = f"hosts of a job of mode {mode.name} cannot be IPv6 addresses"
    where = f"{environment.platform.where}: hosts"
    reader.refuse(problem, where, "give them names, for example in /etc/hosts")


def _check_restarts(environment: Environment, mode: Mode, elastic: Elastic, reader: Reader) -> None:
    """Refuse restarts by torchrun where the names of the hosts do not resolve.

    The reader gets the problem; nothing is raised.
    """
    platform = environment.platform
    if not elastic.is_requested or mode.name != ELASTIC or platform.names_resolve:
        return
    problem = f"restarts need the hosts' names, and {platform.platform} does not say where they are"
    where = f"variable {names.MAX_RESTARTS_VARIABLE}"
    reader.refuse(problem, where, "leave restarts to the platform")


def _is_ipv6(name: str) -> bool:
    """Return whether a host's name is an IPv6 address without an interface, such as ``fd00::1``."""
    if ":" not in name or "%" in name:
        return False
    import ipaddress  # takes time, and few jobs have IPv6 addresses

    try:
        return bool(ipaddress.IPv6Address(name))
    except ValueError:
        return False


def _is_name_or_address(name: str) -> bool:
    """Return whether a text is a host's name or address, without a port or an interface."""
    if not is_host_name(name):
        return False
    return _HOST_NAME.fullmatch(name) is not None or _is_ipv6(name)


def _read_hosts(environment: Environment, reader: Reader) -> tuple[str, ...]:
    """Return all hosts of the job. Without a resource config the job is this host alone.

    The reader gets a problem for an empty list, a name that is no host name, and a name that is
    listed twice; the hosts are returned nevertheless.
    """
    if not environment.hosts.document:
        hosts: tuple[str, ...] = (environment.hostname,)
    else:
        hosts = environment.hosts.names
    where = environment.platform.where
    if not hosts:
        reader.refuse("'hosts' is missing or empty", where, "list every host of the job")
        hosts = (environment.hosts.current or environment.hostname,)
    malformed = [name for name in hosts if not _is_name_or_address(name)]
    if malformed:
        advice = "use letters, digits, . - or an address such as 10.0.0.1 or fd00::1"
        reader.refuse(f"{malformed[0]!r} is not a host name", f"{where}: hosts", advice)
    duplicates = [name for name, count in Counter(hosts).items() if count > 1]
    if duplicates:
        problem = f"{min(duplicates)!r} is listed more than once"
        reader.refuse(problem, f"{where}: hosts", "list each host once")
    return hosts


def _choose_host(
    environment: Environment, hosts: Sequence[str], requested: str, reader: Reader
) -> str:
    """Return the host that the job is made for: the requested one, else this host.

    For a host that is not of the job the reader gets a problem, and the first host is returned.
    """
    current = environment.hosts.current
    if not environment.hosts.document:
        current = environment.hostname
    host = without_brackets(requested) or current
    if not host and len(hosts) == 1:
        host = hosts[0]
    if host in hosts:
        return host
    where = f"{environment.platform.where}: current_host"
    if requested:
        where = "option --host"
    reader.refuse(f"{host!r} is not one of the job's hosts", where, nearest(host, hosts))
    return hosts[0]


def _choose_mode(environment: Environment, reader: Reader) -> Mode:
    """Return the mode that is switched on, else the platform's, else ``none``.

    Several modes, a switch of an unknown mode, and a mode that the platform or the image cannot run
    are problems, which the reader gets. The first mode is returned then.
    """
    reserved = environment.reserved
    switches = _switched_on(environment, reader)
    _check_switches(switches, reader)
    for name in reserved:
        is_switch = name.startswith(names.RESERVED_PREFIX) and name.endswith("_enabled")
        is_known = name in SWITCHES or name in _NOT_A_MODE
        if is_switch and not is_known and reserved.is_on(name):
            problem = "switches on a mode that this launcher does not know"
            reader.refuse(problem, f"hyperparameter {name}", nearest(name, tuple(SWITCHES)))
    platform = environment.platform
    default_mode = "none"
    # A mode of the command line replaces the platform's, also the mode none.
    if platform.mode and not environment.invocation.mode:
        default_mode = platform.mode
    mode = MODES[next(iter(switches), default_mode)]
    if platform.tasks is not None:
        mode = _mode_of_tasks(environment, mode, reader)
    else:
        _check_platform(platform, mode, reader)
    _check_version(environment, mode, reader)
    return mode


def _switched_on(environment: Environment, reader: Reader) -> Mapping[str, str]:
    """Return the modes that are switched on, each with its setting (mode -> the hyperparameter).

    The reader gets the problems of parameters of model parallelism. These parameters mean two
    different things: with mpi, the mode
    smdistributed.modelparallel (smp's first version); with torch_distributed, only a library of
    the ranks (smp's second version). smddp beside torch_distributed is such a library, too:
    torchrun starts the ranks.
    """
    reserved = environment.reserved
    switches = {mode: switch for switch, mode in SWITCHES.items() if reserved.is_on(switch)}
    if "torch_distributed" in switches:
        switches.pop(DATA_PARALLEL, None)
        return switches
    parameters, where = model_parallel.parameters(
        environment.hyperparameters, environment.variables
    )
    if parameters is None:
        return switches
    if not switches:
        advice = (
            f"use --mode mpi or {names.MPI_ENABLED} for smp's first version,"
            f" --mode torch_distributed or {names.TORCH_DISTRIBUTED_ENABLED} for its second,"
            " or leave the parameters out"
        )
        reader.refuse("no setting says how to start the model parallel processes", where, advice)
    reader.problems.extend(model_parallel.check(parameters, where))
    switches.pop("mpi", None)
    switches[MODEL_PARALLEL] = where
    return switches


def _check_switches(switches: Mapping[str, str], reader: Reader) -> None:
    """Refuse several modes: the reader gets the problem.

    switches: the modes that are switched on, each with its setting.
    """
    if len(switches) < 2:
        return
    modes = " and ".join(switches)
    advice = "keep one of them"
    if MODEL_PARALLEL in switches and switches.keys() & {DATA_PARALLEL, "pytorchddp"}:
        advice = (
            "smp is not supported together with smddp:"
            " keep one of them (smp has its own data parallelism)"
        )
    reader.refuse(f"{modes} are both switched on", ", ".join(switches.values()), advice)


def _check_platform(platform: Description, mode: Mode, reader: Reader) -> None:
    """Refuse a mode that needs launchers, ranks or names that the platform does not have.

    The reader gets the first problem; nothing is raised.
    """
    if platform.served and not mode.by_mpirun:
        problem = (
            f"{mode.name} needs a launcher on every host,"
            f" and {platform.platform} has one on this host only"
        )
        reader.refuse(problem, platform.where, "use mpi, or a job that starts train on every host")
    elif platform.ranks_elsewhere and mode.name != "none":
        problem = (
            f"{mode.name} starts the ranks itself, and {platform.ranks_elsewhere} says that another"
            " program has started this process as one of several"
        )
        advice = (
            "let that program start the script itself (mode none), or start train once on each"
            f" host without it, and set {names.HOSTS_VARIABLE} and {names.HOST_VARIABLE}"
        )
        reader.refuse(problem, platform.where, advice)
    elif mode.by_name and not platform.names_resolve:
        problem = (
            f"{mode.name} tells each host the others' names, and {platform.platform} does not say"
            " where they are"
        )
        reader.refuse(problem, platform.where, "use torch_distributed or mpi")


def _mode_of_tasks(environment: Environment, mode: Mode, reader: Reader) -> Mode:
    """Return the mode ``tasks``, for a platform that starts every rank.

    The reader gets a problem for a mode that starts ranks itself.
    """
    if mode.name not in ("none", "torch_distributed"):
        problem = (
            f"{mode.name} starts the ranks itself, and {environment.platform.platform} starts"
            " several on each host"
        )
        reader.refuse(problem, environment.platform.where, "let it start one task on each host")
    return MODES["tasks"]


def _check_version(environment: Environment, mode: Mode, reader: Reader) -> None:
    """Refuse a mode for which the image's framework is too old: the reader gets the problem.

    A framework without a known version is not refused.
    """
    component, minimum = mode.minimum
    installed = version_of(environment, component)
    if not installed or installed >= _numbers(minimum):
        return
    version = environment.manifest.components[component]
    problem = f"{mode.name} needs {component} {minimum} or later"
    advice = f"use an image with {component} {minimum} or later ({MINIMUM_SOURCE})"
    reader.refuse(problem, f"the image has {version}", advice)


def version_of(environment: Environment, component: str) -> tuple[int, ...]:
    """Return the numbers of the installed version of a component, such as ``(2, 4, 1)`` of torch.

    ``()`` for an unknown version.
    """
    return _numbers(environment.manifest.components.get(component, ""))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.4.1+cpu`` is ``(2, 4, 1)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        return ()
    return tuple(map(int, match.group().split(".")))


def _choose_distribution_hosts(
    environment: Environment, mode: Mode, hosts: Sequence[str], reader: Reader
) -> tuple[str, ...]:
    """Return the hosts that have ranks, the leader first; never empty.

    All hosts, or the hosts of the instance groups in the hyperparameter
    ``sagemaker_distribution_instance_groups``, in the order of the groups in the resource config
    (as sagemaker-training). For a platform with hosts that only serve ssh, these hosts.

    The reader gets a problem for a wrong group, and a warning where all of several groups take
    part.
    """
    groups = {group.name: group.hosts for group in environment.hosts.groups}
    group_names = _read_group_names(groups, reader)
    ssh_workers = environment.platform.served
    if ssh_workers:
        return ssh_workers
    if mode.name == "none":
        return tuple(hosts)
    if not group_names:
        if len(groups) > 1:
            reader.warnings.append(
                f"the job has {len(groups)} instance groups and"
                f" {names.DISTRIBUTION_INSTANCE_GROUPS} names none:"
                " all hosts take part in the distribution"
            )
        return tuple(hosts)
    job_hosts = frozenset(hosts)
    distribution_hosts: list[str] = []
    for name, members in groups.items():
        if name in group_names:
            distribution_hosts += [host for host in members if host in job_hosts]
    return tuple(distribution_hosts or hosts)


def _read_group_names(groups: Mapping[str, Sequence[str]], reader: Reader) -> tuple[str, ...]:
    """Return the instance groups of the distribution; ``()`` for all hosts.

    The reader gets a problem for an unknown group, and for a group without a host.

    Args:
        groups: Name of a group -> its hosts, from the resource config.
        reader: The reader of the placement.
    """
    where = f"hyperparameter {names.DISTRIBUTION_INSTANCE_GROUPS}"
    value = reader.reserved.get(names.DISTRIBUTION_INSTANCE_GROUPS)
    group_names = texts(value)
    if isinstance(value, str) and value:
        group_names = (value,)
    for name in group_names:
        if name not in groups:
            advice = f"{names.RESOURCE_CONFIG_FILE} has no instance groups"
            if groups:
                advice = nearest(name, tuple(groups))
            reader.refuse(f"instance group {name!r} does not exist", where, advice)
        elif not groups[name]:
            problem = f"the instance group {name!r} has no host"
            advice = "give the group at least one host"
            reader.refuse(problem, names.RESOURCE_CONFIG_FILE, advice)
    return group_names


def _missing_programs(environment: Environment, mode: Mode) -> list[Problem]:
    """Return a problem for each program of the mode that is not in the image, such as mpirun."""
    reason = f"the job asks for {mode.name}"
    problems = []
    has_ssh_workers = bool(environment.platform.served)
    for name in mode.programs_for(has_ssh_workers):
        if not environment.programs.get(name):
            problems.append(missing_program(environment, name, reason))
    return problems


def missing_program(environment: Environment, name: str, reason: str) -> Problem:
    """Return the problem of a job that needs a program, such as mpirun, without the program.

    reason: a clause about the need, such as ``the job asks for mpi``.
    """
    declared = environment.manifest.programs.get(name)
    where = f"image {environment.manifest.name!r}, PATH"
    if declared:
        where = f"image {environment.manifest.name!r}, which declares it at {declared}"
    advice = f"use an image that has {name}, or install it"
    return Problem(f"{name} is not installed, and {reason}", where, advice)


def _count_slots(
    environment: Environment,
    mode: Mode,
    hosts: Sequence[str],
    requested: int | None,
    reader: Reader,
) -> _Slots:
    """Count the processes of each host of the distribution.

    The first of these that is known: the requested number, the platform's, one per GPU, one per
    Neuron core, one. Hosts of one instance type get the same number, so that every host of the job
    comes to the same result. The reader gets the problems and the warnings.

    Args:
        environment: The environment of the host.
        mode: The mode of the job.
        hosts: The hosts of the distribution.
        requested: Processes per host that the user asks for; None for the default.
        reader: The reader of the placement.
    """
    platform = environment.platform
    if platform.tasks is not None:
        return _Slots(platform.tasks.counts, f"{platform.platform} starts every rank as a task")
    if mode.one_per_host:
        per_host: int | None = 1
    else:
        per_host = requested or platform.processes_per_host or None
    if mode.needs_count and per_host is None:
        advice = (
            "set processes_per_host, or --processes-per-host on the command line,"
            " normally the number of GPUs of one host"
        )
        where = f"hyperparameter {names.PROCESSES_PER_HOST}"
        reader.refuse(f"{mode.name} needs the processes per host", where, advice)

    type_of_host = environment.hosts.instance_types(hosts)
    count_of_type: dict[str, int] = {}
    for host in hosts:
        instance_type = type_of_host[host]
        if instance_type not in count_of_type:
            count = _count_on_type(environment, mode, instance_type, per_host, reader)
            count_of_type[instance_type] = count

    if mode.one_per_host:
        why = f"{mode.name} has one process per host"
    elif requested and environment.invocation.processes_per_host:
        why = "option --processes-per-host"
    elif requested:
        why = f"hyperparameter {names.PROCESSES_PER_HOST}"
    elif per_host:
        why = platform.processes_why
    else:
        why = _why_default_count(environment, type_of_host[hosts[0]])
    return _Slots(tuple(count_of_type[type_of_host[host]] for host in hosts), why)


def _count_on_type(
    environment: Environment, mode: Mode, instance_type: str, per_host: int | None, reader: Reader
) -> int:
    """Count the processes of a host of an instance type.

    The reader gets a problem for more processes than accelerators, and for a mode or an image that
    cannot use these; the number is returned nevertheless.

    Args:
        environment: The environment of the host.
        mode: The mode of the job.
        instance_type: The instance type, as SageMaker names it.
        per_host: Processes per host, from the user, the platform or the mode; None for the default.
        reader: The reader of the placement.
    """
    gpus, neuron_cores = accelerators(environment, instance_type)
    if not mode.one_per_host:
        reader.warnings += _warn_of_differences(environment, instance_type)
    if neuron_cores:
        _check_neuron(environment, mode, instance_type, reader)
    if per_host is None:
        return gpus or neuron_cores or 1
    if gpus and per_host > gpus:
        _refuse_processes(per_host, gpus, "GPU", instance_type, reader)
    elif neuron_cores and per_host > neuron_cores:
        _refuse_processes(per_host, neuron_cores, "Neuron core", instance_type, reader)
    return per_host


def _check_neuron(environment: Environment, mode: Mode, instance_type: str, reader: Reader) -> None:
    """Refuse a mode or an image that cannot use the Neuron cores of an instance type.

    The reader gets the problems; nothing is raised.
    """
    where = f"instance type {instance_type}"
    if mode.name == ELASTIC and _lacks_neuron(environment):
        problem = f"{instance_type} has Neuron cores, and the image has no Neuron"
        advice = "use an image for Neuron, or an instance type with GPUs or CPUs alone"
        reader.refuse(problem, where, advice)
    if not mode.trainium:
        reader.refuse(f"{mode.name} does not run on Trainium", where, "use torch_distributed")


def _refuse_processes(
    per_host: int, count: int, accelerator: str, instance_type: str, reader: Reader
) -> None:
    """Refuse more processes per host than a host has accelerators: the reader gets the problem.

    accelerator: ``GPU`` or ``Neuron core``. count: how many of them a host has.
    """
    of_type = ""
    if instance_type != LOCAL:
        of_type = f" of {instance_type}"
    problem = f"{per_host} processes per host on {count} {accelerator}(s){of_type}"
    where = f"hyperparameter {names.PROCESSES_PER_HOST}"
    reader.refuse(problem, where, f"give at most {count}: one process per {accelerator}")


def _why_default_count(environment: Environment, instance_type: str) -> str:
    """Return the reason for the default number of processes, such as ``one per GPU``."""
    gpus, neuron_cores = accelerators(environment, instance_type)
    if gpus:
        return "one per GPU"
    if neuron_cores:
        return "one per Neuron core"
    return "one, because the host has no accelerator"


def _lacks_neuron(environment: Environment) -> bool:
    """Return whether the manifest of the image lists components, and none of Neuron.

    An image without a manifest may have Neuron.
    """
    manifest = environment.manifest
    has_neuron = any("neuron" in name for name in manifest.components)
    return bool(manifest.document) and not has_neuron


def accelerators(environment: Environment, instance_type: str) -> tuple[int, int]:
    """Return (GPUs, Neuron cores) of a host of an instance type.

    This host's devices decide for its own type: a container may see two of eight GPUs. The image's
    instance table is the fallback for another type, and for a host without visible devices, such as
    a laptop that plans a job.
    """
    if _sees_gpus(environment, instance_type):
        return environment.devices.gpus, 0
    row = environment.manifest.instances.get(instance_type, Instance())
    return row.gpus, row.neuron_cores


def _sees_gpus(environment: Environment, instance_type: str) -> bool:
    """Return whether this host is of the instance type, and its number of GPUs is certain.

    CUDA_VISIBLE_DEVICES makes the number certain, too, because the variable may hide every GPU.
    """
    if not is_type_of_this_host(environment, instance_type):
        return False
    devices = environment.devices
    return devices.gpus > 0 or devices.visible_gpus is not None


def _warn_of_differences(environment: Environment, instance_type: str) -> list[str]:
    """Return a warning for each difference between this host's devices and the instance table."""
    devices = environment.devices
    is_own_type = is_type_of_this_host(environment, instance_type)
    if not is_own_type or _sees_gpus(environment, instance_type):
        return []
    row = environment.manifest.instances.get(instance_type, Instance())
    expected = ""
    if row.gpus:
        expected = f"{row.gpus} GPU(s)"
    elif row.neuron_cores and not devices.neuron_devices:
        expected = f"{row.neuron_cores} Neuron cores"
    warnings: list[str] = []
    if expected:
        warnings.append(
            f"{instance_type} has {expected} by the image's instance table,"
            " but no such device was found on this host"
        )
    if devices.neuron_devices and not row.neuron_cores:
        warnings.append(
            f"there are {devices.neuron_devices} Neuron device(s), and the instance table does not"
            f" say how many cores {instance_type} has: set {names.PROCESSES_PER_HOST}"
        )
    return warnings


def _unknown_types(environment: Environment, hosts: Sequence[str]) -> list[str]:
    """Return a warning for each instance type of the job that the image's table does not have."""
    manifest = environment.manifest
    instance_types = dict.fromkeys(environment.hosts.instance_types(hosts).values())
    warnings = []
    for instance_type in instance_types:
        if manifest.lacks(instance_type):
            warnings.append(unknown_type(instance_type, manifest.instances))
    return warnings


def unknown_type(instance_type: str, known: Iterable[str]) -> str:
    """Return the warning for an instance type that is newer than the instance table, or misspelt.

    known: the types of the table.
    """
    return (
        f"the instance type {instance_type} is not in the instance table"
        f" ({nearest(instance_type, known)}): its GPUs,"
        " Neuron cores and EFA devices are counted on the host itself; where that is not possible,"
        " none are assumed"
    )


def is_type_of_this_host(environment: Environment, instance_type: str) -> bool:
    """Return whether the host on which the environment was read has this instance type."""
    hosts = environment.hosts
    return hosts.instance_type_of(hosts.current) == instance_type


def _count_processes(reader: Reader, mode: Mode, slots: Sequence[int]) -> int:
    """Return the number of ranks of the job: all slots, or fewer at the user's wish.

    slots: processes of each host of the distribution. Only mode mpi can have fewer ranks. The
    reader gets a problem for more ranks than slots, and the user's number is returned.
    """
    if mode.options != names.MPI_OPTIONS:
        return sum(slots)
    requested = reader.count(names.MPI_PROCESSES)
    if requested is None:
        return sum(slots)
    if requested > sum(slots):
        reader.refuse(
            f"{requested} processes do not fit on {len(slots)} host(s) with {max(slots)} each",
            f"hyperparameter {names.MPI_PROCESSES}",
            f"give at most {sum(slots)}, or raise {names.PROCESSES_PER_HOST}",
        )
    return requested


def _mpi_options(environment: Environment, mode: Mode, reader: Reader) -> tuple[str, ...]:
    """Return the user's mpirun options as words, split as a shell splits words; ``()`` for none.

    The reader gets a problem for a value that is not a text or has an open quote (then ``()``), and
    for contradictions between the options (mpirun/flags.py).
    """
    where = f"hyperparameter {mode.options}"
    value = reader.reserved.get(mode.options)
    if not mode.options or value is None or value == "":
        return ()
    if not isinstance(value, str):
        reader.refuse(f"{value!r} is not a text", where, "give mpirun's options as one text")
        return ()
    try:
        words = tuple(shlex.split(value))
    except ValueError as error:
        reader.refuse(f"cannot be split into words: {error}: {value!r}", where, "close every quote")
        return ()
    # Imported here, because most jobs have no mpirun options.
    from trainworks_launcher.mpirun.dialects import dialect_of
    from trainworks_launcher.mpirun.flags import parse_user_options

    dialect = dialect_of(environment.manifest.components.get(names.OPEN_MPI, ""))
    reader.problems += parse_user_options(words, dialect, where)[1]
    return words
