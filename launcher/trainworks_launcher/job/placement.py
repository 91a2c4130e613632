"""Where a job runs: the mode, the hosts that take part, and the processes of each. Pure.

The helpers of ``read_placement`` tell its reader what is wrong and go on with the nearest value, so
that all problems of a job are reported together.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from typing import Iterable, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import texts, without_brackets
from trainworks_launcher.contract.modes import MINIMUM_SOURCE, MODES, SWITCHES, Mode
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.contract.settings import Reader
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
"""A mode of mpirun, or only a library where torchrun is asked for as well."""

_NOT_A_MODE = ("sagemaker_enable_cloudwatch_metrics", "sagemaker_toolkit_native_launcher_enabled")


_IPV6_MODES = ("none", ELASTIC)
"""Modes that find a host by its address. mpirun and TensorFlow take what stands
behind a colon for something else.
"""

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class Placement(NamedTuple):
    """Where a job runs, as seen from one host.

    Attributes:
        mode: A name of ``registry.MODES``.
        hosts: All hosts of the job, in the platform's order.
        host: This host.
        distribution_hosts: Hosts that take part in the distribution, its leader first.
        slots: Processes of each of ``distribution_hosts``.
        processes: Processes of the distribution in all.
        processes_origin: Who decided on the number of processes per host.
        processes_why: How that number was found.
        instance_type: Instance type of this host.
        mpi_options: The user's own mpirun options.
        mpi_options_where: The setting that ``mpi_options`` come from.
        elastic: Restarts, and hosts that may be lost.
        leader_address: Name or address by which this host reaches the leader.
        served: Whether no launcher runs on the other hosts, which serve ssh
            with keys that the platform mounts.
        tasks: Where the platform starts every rank: which of them this process is; else None.
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
    served: bool = False
    tasks: Tasks | None = None
    warnings: tuple[str, ...] = ()

    @property
    def leader(self) -> str:
        """The host that has rank 0, starts mpirun, and listens on the control
        port: first of the distribution.

        One host for all three, also where a group's distribution does not begin with the job's
        first host: mpirun needs the keys that the listening host made, and the model that is kept
        is rank 0's.
        """
        return self.distribution_hosts[0]

    @property
    def members(self) -> tuple[str, ...]:
        """The launchers of the job, the leader's first: one per host, or one per task.

        A task has no host in its name: which host has which rank is not known
        everywhere (srun, --distribution).
        """
        if self.tasks is not None:
            return tuple(f"task {rank}" for rank in range(sum(self.tasks.counts)))
        if self.served:
            return (self.host,)
        return (self.leader, *(host for host in self.hosts if host != self.leader))

    @property
    def member(self) -> str:
        """This launcher's name in ``members``."""
        return self.host if self.tasks is None else f"task {self.tasks.rank}"

    @property
    def takes_part(self) -> bool:
        """Whether this host is one of the distribution's.

        Another host runs the program by itself.
        """
        return self.host in self.distribution_hosts

    @property
    def host_rank(self) -> int:
        """Index of this host in ``distribution_hosts``; 0 is the leader.

        Raises ValueError if it takes no part.
        """
        return self.distribution_hosts.index(self.host)

    @property
    def processes_per_host(self) -> int:
        """Processes of this host; 1 if it takes no part in the distribution."""
        return self.slots[self.host_rank] if self.takes_part else 1


def read_placement(environment: Environment, asked: str = "") -> tuple[Placement, list[Problem]]:
    """Read where the job runs.

    Args:
        environment: The environment of the host.
        asked: The host that a person asked for; default: this host.

    Returns:
        The placement, and everything that is wrong with it.
    """
    reader = Reader(environment.reserved, environment.variables)
    reader.problems += check_resource_config(environment.hosts.document)
    hosts, host = _hosts(environment, asked, reader)
    mode = _choose_mode(environment, reader)
    part = _hosts_of(environment, mode, hosts, reader)
    reader.problems += _missing_programs(environment, mode)
    per_host = reader.count(names.PROCESSES_PER_HOST)
    counts, why = _slots(environment, mode, part, per_host, reader)
    processes = _processes(reader, mode, counts)
    if mode.name == MODEL_PARALLEL:
        _check_model_parallel(environment, processes, reader)
    reader.warnings += _unknown_types(environment, hosts)
    _check_addresses(environment, mode, hosts, reader)
    elastic = read_elastic(reader, mode.name, len(part), len(hosts))
    _check_restarts(environment, mode, elastic, reader)
    platform = environment.platform
    leader = part[0]
    leader_address = platform.leader_address or leader
    if host == leader and environment.devices.own_route:
        # The leader's name may lead elsewhere on the leader itself: there its programs take its
        # address.
        leader_address = environment.devices.own_route
    origin = Origin.PLATFORM
    if per_host and not mode.one_per_host:
        origin = Origin.USER
    placement = Placement(
        mode=mode.name,
        hosts=hosts,
        host=host,
        distribution_hosts=part,
        slots=counts,
        processes=processes,
        processes_origin=origin,
        processes_why=why,
        instance_type=environment.hosts.instance_type_of(host),
        mpi_options=_mpi_options(environment, mode, reader),
        mpi_options_where=f"hyperparameter {mode.options}",
        leader_address=leader_address,
        served=bool(platform.served),
        tasks=platform.tasks,
        elastic=elastic,
        warnings=tuple(reader.warnings),
    )
    return placement, reader.problems


def _check_model_parallel(environment: Environment, processes: int, reader: Reader) -> None:
    """Refuse parameters of model parallelism that do not fit the processes or the library."""
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
    """Refuse hosts with IPv6 addresses for names, where a mode cannot take them."""
    if mode.name in _IPV6_MODES or not any(":" in name for name in hosts):
        return
    problem = f"hosts of a job of mode {mode.name} cannot be IPv6 addresses"
    where = f"{environment.platform.where}: hosts"
    reader.refuse(problem, where, "give them names, for example in /etc/hosts")


def _check_restarts(environment: Environment, mode: Mode, elastic: Elastic, reader: Reader) -> None:
    """Refuse restarts by torchrun where the hosts have no names that lead to them."""
    platform = environment.platform
    if elastic.asked and mode.name == ELASTIC and not platform.names_resolve:
        problem = (
            f"restarts need the hosts' names, and {platform.platform} does not say where they are"
        )
        where = f"variable {names.MAX_RESTARTS_VARIABLE}"
        reader.refuse(problem, where, "leave restarts to the platform")


def _is_ipv6(name: str) -> bool:
    """Return whether a host's name is an IPv6 address, without an interface."""
    if ":" not in name or "%" in name:
        return False
    import ipaddress  # hosts mostly have names

    try:
        return bool(ipaddress.IPv6Address(name))
    except ValueError:
        return False


def _hosts(environment: Environment, asked: str, reader: Reader) -> tuple[tuple[str, ...], str]:
    """Return (hosts, the host this job is made for).

    Without a resource config the job is one host: this one.
    """
    where = environment.platform.where
    hosts, current = environment.hosts.names, environment.hosts.current
    if not environment.hosts.document:
        hosts, current = (environment.hostname,), environment.hostname
    elif not hosts:
        reader.refuse("'hosts' is missing or empty", where, "list every host of the job")
        hosts = (current or environment.hostname,)
    malformed = [name for name in hosts if not _HOST.fullmatch(name) and not _is_ipv6(name)]
    if malformed:
        advice = "use letters, digits, . - or an address such as 10.0.0.1 or fd00::1"
        reader.refuse(f"{malformed[0]!r} is not a host name", f"{where}: hosts", advice)
    doubles = [name for name, count in Counter(hosts).items() if count > 1]
    if doubles:
        problem = f"{min(doubles)!r} is listed more than once"
        reader.refuse(problem, f"{where}: hosts", "list each host once")
    wanted = without_brackets(asked) or current
    if not wanted and len(hosts) == 1:
        wanted = hosts[0]
    if wanted not in hosts:
        source = "option --host" if asked else f"{where}: current_host"
        reader.refuse(f"{wanted!r} is not one of the job's hosts", source, nearest(wanted, hosts))
        wanted = hosts[0]
    return hosts, wanted


def _choose_mode(environment: Environment, reader: Reader) -> Mode:
    """Return the one mode that is switched on.

    A problem if there are several, or one that is not known.

    Parameters of model parallelism make two different things: with mpi they are smp's first
    version, a mode of its own; with torch_distributed they are its second, which is only a library
    that reads them. smddp beside torch_distributed
    is a library too: torchrun starts the processes.
    """
    reserved = environment.reserved
    asked = {mode: switch for switch, mode in SWITCHES.items() if reserved.is_on(switch)}
    parameters, where = model_parallel.parameters(
        environment.hyperparameters, environment.variables
    )
    if parameters is not None and "torch_distributed" not in asked:
        if not asked:
            advice = (
                f"set {names.MPI_ENABLED} for smp's first version,"
                f" {names.TORCH_DISTRIBUTED_ENABLED} for its second, or leave"
                f" {names.MODEL_PARALLEL_PARAMETERS} out"
            )
            reader.refuse(
                "no setting says how to start the model parallel processes", where, advice
            )
        reader.problems.extend(model_parallel.check(parameters, where))
        asked.pop("mpi", None)
        asked[MODEL_PARALLEL] = where
    if "torch_distributed" in asked:
        asked.pop(DATA_PARALLEL, None)
    if len(asked) > 1:
        both = " and ".join(asked)
        advice = "keep one of them"
        if MODEL_PARALLEL in asked and asked.keys() & {DATA_PARALLEL, "pytorchddp"}:
            advice = (
                "smp is not supported together with smddp:"
                " keep one of them (smp has its own data parallelism)"
            )
        reader.refuse(f"{both} are both switched on", ", ".join(asked.values()), advice)
    for name in reserved:
        is_switch = name.startswith(names.RESERVED_PREFIX) and name.endswith("_enabled")
        is_known = name in SWITCHES or name in _NOT_A_MODE
        if is_switch and not is_known and reserved.is_on(name):
            problem = "switches on a mode that this launcher does not know"
            reader.refuse(problem, f"hyperparameter {name}", nearest(name, tuple(SWITCHES)))
    platform = environment.platform
    usual = "none"
    if platform.mode and not environment.invocation.mode:
        usual = platform.mode
    mode = MODES[next(iter(asked), usual)]
    if platform.tasks is not None:
        mode = _mode_of_tasks(environment, mode, reader)
    else:
        _check_platform(platform, mode, reader)
    _check_version(environment, mode, reader)
    return mode


def _check_platform(platform: Description, mode: Mode, reader: Reader) -> None:
    """Refuse a mode that needs more than the platform gives."""
    if platform.served and not mode.by_mpirun:
        what = (
            f"{mode.name} needs a launcher on every host,"
            f" and {platform.platform} has one on this host only"
        )
        reader.refuse(what, platform.where, "use mpi, or a job that starts train on every host")
    elif platform.ranks_elsewhere and mode.name != "none":
        what = (
            f"{mode.name} starts the ranks itself, and {platform.ranks_elsewhere} says that another"
            " program has started this process as one of several"
        )
        advice = (
            "let that program start the script itself (mode none), or start train once on each"
            f" host without it, and set {names.HOSTS_VARIABLE} and {names.HOST_VARIABLE}"
        )
        reader.refuse(what, platform.where, advice)
    elif mode.by_name and not platform.names_resolve:
        what = (
            f"{mode.name} tells each host the others' names, and {platform.platform} does not say"
            " where they are"
        )
        reader.refuse(what, platform.where, "use torch_distributed or mpi")


def _mode_of_tasks(environment: Environment, mode: Mode, reader: Reader) -> Mode:
    """Return the mode of a job whose platform starts every rank.

    A problem if the mode would start them, too.
    """
    if mode.name not in ("none", "torch_distributed"):
        problem = (
            f"{mode.name} starts the ranks itself, and {environment.platform.platform} starts"
            " several on each host"
        )
        reader.refuse(problem, environment.platform.where, "let it start one task on each host")
    return MODES["tasks"]


def _check_version(environment: Environment, mode: Mode, reader: Reader) -> None:
    """Refuse a mode that the image's framework is too old for; an unknown version is not judged."""
    component, lowest = mode.minimum
    installed = version_of(environment, component)
    if installed and installed < _numbers(lowest):
        has = environment.manifest.components[component]
        advice = f"use an image with {component} {lowest} or later ({MINIMUM_SOURCE})"
        reader.refuse(
            f"{mode.name} needs {component} {lowest} or later", f"the image has {has}", advice
        )


def version_of(environment: Environment, component: str) -> tuple[int, ...]:
    """Return the leading numbers of the installed version of a component, for comparison.

    () if it is not known.
    """
    return _numbers(environment.manifest.components.get(component, ""))


def _numbers(version: str) -> tuple[int, ...]:
    """ "2.4.1+cpu" -> (2, 4, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(word) for word in match.group().split(".")) if match else ()


def _hosts_of(
    environment: Environment, mode: Mode, hosts: Sequence[str], reader: Reader
) -> tuple[str, ...]:
    """Return the hosts that take part in the distribution: all, or those of the
    named groups, in the groups' order.

    The first of them is its leader (as sagemaker-training). Never empty: a named group that does
    not exist or has no host is refused.
    """
    where = f"hyperparameter {names.DISTRIBUTION_INSTANCE_GROUPS}"
    groups = {group.name: group.hosts for group in environment.hosts.groups}
    value = reader.reserved.get(names.DISTRIBUTION_INSTANCE_GROUPS)
    asked = texts(value)
    if isinstance(value, str) and value:
        asked = (value,)
    for name in asked:
        if name not in groups:
            advice = f"{names.RESOURCE_CONFIG_FILE} has no instance groups"
            if groups:
                advice = nearest(name, tuple(groups))
            reader.refuse(f"instance group {name!r} does not exist", where, advice)
        elif not groups[name]:
            advice = "give the group at least one host"
            reader.refuse(
                f"the instance group {name!r} has no host", names.RESOURCE_CONFIG_FILE, advice
            )
    served = environment.platform.served
    if mode.name == "none" or served:
        return served or tuple(hosts)
    if not asked:
        if len(groups) > 1:
            reader.warnings.append(
                f"the job has {len(groups)} instance groups and"
                f" {names.DISTRIBUTION_INSTANCE_GROUPS} names none:"
                " all hosts take part in the distribution"
            )
        return tuple(hosts)
    known = frozenset(hosts)
    part: list[str] = []
    for name, members in groups.items():
        if name in asked:
            part += [host for host in members if host in known]
    return tuple(part or hosts)


def _missing_programs(environment: Environment, mode: Mode) -> list[Problem]:
    """Refuse a mode whose programs are not in the image, every one by name."""
    reason = f"the job asks for {mode.name}"
    wanted = mode.programs_for(bool(environment.platform.served))
    missing = [name for name in wanted if not environment.programs.get(name)]
    return [missing_program(environment, name, reason) for name in missing]


def missing_program(environment: Environment, name: str, reason: str) -> Problem:
    """Return the refusal of a job that needs a program that is not there."""
    declared = environment.manifest.programs.get(name)
    place = f"image {environment.manifest.name!r}, PATH"
    if declared:
        place = f"image {environment.manifest.name!r}, which declares it at {declared}"
    advice = f"use an image that has {name}, or install it"
    return Problem(f"{name} is not installed, and {reason}", place, advice)


def _slots(
    environment: Environment, mode: Mode, hosts: Sequence[str], asked: int | None, reader: Reader
) -> tuple[tuple[int, ...], str]:
    """Return (processes of each of the distribution's hosts, how their number was found).

    Asked for, else one per GPU, else one per Neuron core, else one. Hosts of one instance type get
    the same number, so every host of the job comes to the same result, whichever host it is made
    on.
    """
    platform = environment.platform
    if platform.tasks is not None:
        return platform.tasks.counts, f"{platform.platform} starts every rank as a task"
    given = asked
    if mode.one_per_host:
        asked = 1
    elif not asked:
        asked = platform.processes_per_host or None
    if mode.needs_count and asked is None:
        advice = "set processes_per_host, normally the number of GPUs of one host"
        where = f"hyperparameter {names.PROCESSES_PER_HOST}"
        reader.refuse(f"{mode.name} needs the processes per host", where, advice)
    type_of = environment.hosts.instance_types(hosts)
    counts: dict[str, int] = {}
    why = ""
    for kind in dict.fromkeys(type_of[host] for host in hosts):
        gpus, neuron_cores = accelerators(environment, kind)
        if not mode.one_per_host:
            reader.warnings += _uncounted(environment, kind)
        if neuron_cores:
            _check_neuron(environment, mode, kind, reader)
        if asked and gpus and asked > gpus:
            _refuse_processes(asked, gpus, "GPU", kind, reader)
        elif asked and neuron_cores and asked > neuron_cores:
            _refuse_processes(asked, neuron_cores, "Neuron core", kind, reader)
        counts[kind] = asked or gpus or neuron_cores or 1
        if not why:
            why = _default_count(gpus, neuron_cores)
    if mode.one_per_host:
        why = f"{mode.name} has one process per host"
    elif given and environment.invocation.processes_per_host:
        why = "option --processes-per-host"
    elif given:
        why = f"hyperparameter {names.PROCESSES_PER_HOST}"
    elif asked:
        why = platform.processes_why
    return tuple(counts[type_of[host]] for host in hosts), why


def _check_neuron(environment: Environment, mode: Mode, kind: str, reader: Reader) -> None:
    """Refuse a mode or an image that cannot use the Neuron cores of an instance type."""
    where = f"instance type {kind}"
    if mode.name == ELASTIC and _lacks_neuron(environment):
        advice = "use an image for Neuron, or an instance type with GPUs or CPUs alone"
        reader.refuse(f"{kind} has Neuron cores, and the image has no Neuron", where, advice)
    if not mode.trainium:
        reader.refuse(f"{mode.name} does not run on Trainium", where, "use torch_distributed")


def _refuse_processes(asked: int, count: int, noun: str, kind: str, reader: Reader) -> None:
    """Refuse more processes per host than a host has accelerators. noun: ``GPU``."""
    of_type = f" of {kind}" if kind != LOCAL else ""
    problem = f"{asked} processes per host on {count} {noun}(s){of_type}"
    where = f"hyperparameter {names.PROCESSES_PER_HOST}"
    reader.refuse(problem, where, f"give at most {count}: one process per {noun}")


def _default_count(gpus: int, neuron_cores: int) -> str:
    """Return how the number of processes is found where nobody asks for one."""
    if gpus:
        return "one per GPU"
    if neuron_cores:
        return "one per Neuron core"
    return "one, because the host has no accelerator"


def _lacks_neuron(environment: Environment) -> bool:
    """Return whether an image whose parts are known has none of Neuron's.

    A foreign image's are not known.
    """
    components = environment.manifest.components
    return bool(environment.manifest.document) and not any("neuron" in name for name in components)


def accelerators(environment: Environment, kind: str) -> tuple[int, int]:
    """Return (GPUs, Neuron cores) of a host of an instance type.

    This host's devices decide for its own type: a container may have been given two of eight GPUs.
    Where none is seen (another type, or a plan made on a laptop) the image's instance table is the
    fallback, with a warning.
    """
    if _sees_gpus(environment, kind):
        return environment.devices.gpus, 0
    row = environment.manifest.instances.get(kind, Instance())
    return row.gpus, row.neuron_cores


def _sees_gpus(environment: Environment, kind: str) -> bool:
    """Return whether this host is of the type and was given GPUs, or none of those that it has."""
    devices = environment.devices
    return is_type_of_this_host(environment, kind) and (
        bool(devices.gpus) or devices.visible_gpus is not None
    )


def _uncounted(environment: Environment, kind: str) -> list[str]:
    """Return warnings if the instance table and this host's devices do not say the same."""
    devices = environment.devices
    if _sees_gpus(environment, kind) or not is_type_of_this_host(environment, kind):
        return []
    row = environment.manifest.instances.get(kind, Instance())
    found: list[str] = []
    if row.gpus or (row.neuron_cores and not devices.neuron_devices):
        accelerator = f"{row.gpus} GPU(s)" if row.gpus else f"{row.neuron_cores} Neuron cores"
        found.append(
            f"{kind} has {accelerator} by the image's instance table,"
            " but no such device was found on this host"
        )
    if devices.neuron_devices and not row.neuron_cores:
        found.append(
            f"there are {devices.neuron_devices} Neuron device(s), and the instance table does not"
            f" say how many cores {kind} has: set {names.PROCESSES_PER_HOST}"
        )
    return found


def _unknown_types(environment: Environment, hosts: Sequence[str]) -> list[str]:
    """Return a warning for each instance type of the job that the image's table does not have."""
    manifest = environment.manifest
    kinds = dict.fromkeys(environment.hosts.instance_types(hosts).values())
    return [unknown_type(kind, manifest.instances) for kind in kinds if manifest.lacks(kind)]


def unknown_type(kind: str, known: Iterable[str]) -> str:
    """Return the warning for a type that is newer than the table, or misspelt:
    nothing is refused for it.
    """
    return (
        f"the instance type {kind} is not in the instance table ({nearest(kind, known)}): its GPUs,"
        " Neuron cores and EFA devices are counted on the host itself; where that is not possible,"
        " none are assumed"
    )


def is_type_of_this_host(environment: Environment, kind: str) -> bool:
    """Return whether hosts of an instance type are like the one that the
    environment was read on.
    """
    hosts = environment.hosts
    return hosts.instance_type_of(hosts.current) == kind


def _processes(reader: Reader, mode: Mode, counts: Sequence[int]) -> int:
    """Return processes of the distribution in all: its slots, or fewer where
    mpirun is asked for fewer.
    """
    total = reader.count(names.MPI_PROCESSES) if mode.options == names.MPI_OPTIONS else None
    if total and total > sum(counts):
        reader.refuse(
            f"{total} processes do not fit on {len(counts)} host(s) with {max(counts)} each",
            f"hyperparameter {names.MPI_PROCESSES}",
            f"give at most {sum(counts)}, or raise {names.PROCESSES_PER_HOST}",
        )
    return total or sum(counts)


def _mpi_options(environment: Environment, mode: Mode, reader: Reader) -> tuple[str, ...]:
    """Return the user's mpirun options as words, by shell quoting rules.

    Checked by ``flags`` when they are merged.
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
    # Only jobs with options of their own need them.
    from trainworks_launcher.mpirun.dialects import dialect_of
    from trainworks_launcher.mpirun.flags import parse_user_options

    dialect = dialect_of(environment.manifest.components.get(names.OPEN_MPI, ""))
    reader.problems += parse_user_options(words, dialect, where)[1]
    return words
