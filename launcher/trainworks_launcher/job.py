"""From the environment to a validated job, or to one refusal with every problem in it. Pure.

A ``Job`` is everything a mode needs to plan a host: the program and its arguments, the hosts, the counts, the ports and
limits, and the variables the script is given. It is made for one host; ``make_job(environment, host)`` makes it for
another one, with what is known there.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from types import MappingProxyType
from typing import Mapping

from trainworks_launcher import cluster, fabric, names
from trainworks_launcher import entry as entries
from trainworks_launcher.environment import Environment
from trainworks_launcher.errors import Problem, RefusalError, nearest
from trainworks_launcher.exported import check_exported, exported_variables, shared_variables
from trainworks_launcher.hyperparameters import split_reserved, to_arguments, truth
from trainworks_launcher.values import Json, mapping, text, texts

MODES_BUILT: Mapping[str, str] = MappingProxyType(
    {names.MPI_ENABLED: "mpi", names.TORCH_DISTRIBUTED_ENABLED: "torch_distributed"}
)
"""Switch -> mode. The registry in ``modes`` holds the same names (a test compares them)."""

MODES_NOT_BUILT: Mapping[str, str] = MappingProxyType(
    {
        "sagemaker_distributed_dataparallel_enabled": "smdistributed.dataparallel",
        "sagemaker_pytorch_ddp_enabled": "pytorchddp",
        "sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla",
        "sagemaker_parameter_server_enabled": "parameter_server",
        "sagemaker_multi_worker_mirrored_strategy_enabled": "multi_worker_mirrored_strategy",
    }
)
"""Switches of modes that are known and refused, because ignoring one would train on one process without a word."""

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Limits:
    """Bounded waits of a job, all in seconds: see the constants of the same names in ``names``."""

    stop_grace: float = names.STOP_GRACE_SECONDS
    join: float = names.JOIN_LIMIT_SECONDS
    prepare: float = names.PREPARE_LIMIT_SECONDS
    heartbeat: float = names.HEARTBEAT_LIMIT_SECONDS


@dataclass(frozen=True)
class Job:
    """A validated job as seen from one host.

    mode: "none", "mpi" or "torch_distributed". arguments: of the script. hosts: in the platform's order, the first is
    the leader. processes: MPI ranks in all. processes_origin, processes_why: who said how many there are per host (an
    origin as ``plan`` has it), and how. interface: the network interface to use, "" if none is known, interface_why
    says where it comes from. variables: what the script gets besides the inherited environment. inherited: the
    container's environment (a value in it is the user's). warnings: lines to print before the start.
    """

    environment: Environment
    mode: str
    entry: entries.EntryPoint
    code: entries.Code
    arguments: tuple[str, ...]
    hosts: tuple[str, ...]
    host: str
    processes_per_host: int
    processes: int
    processes_origin: str
    processes_why: str
    custom_mpi_options: tuple[str, ...]
    interface: str
    interface_why: str
    fabric: fabric.Fabric
    control_port: int
    master_port: int
    limits: Limits
    variables: Mapping[str, str]
    inherited: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def leader(self) -> str:
        """The host that starts mpirun, listens on the control port and has rank 0."""
        return self.hosts[0]

    @property
    def host_rank(self) -> int:
        """Index of this host in ``hosts``; 0 is the leader."""
        return self.hosts.index(self.host)


class _Reader:
    """Reads single settings and collects what is wrong with them."""

    def __init__(self, reserved: Mapping[str, Json], variables: Mapping[str, str], problems: list[Problem]) -> None:
        self._reserved = reserved
        self._variables = variables
        self._problems = problems

    def count(self, name: str) -> int | None:
        """A hyperparameter that is a whole number of at least 1; None if absent, empty or wrong (then a problem)."""
        value = self._reserved.get(name)
        if value is None or value == "":
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            advice = "give a whole number of at least 1, or leave it out"
            self._problems.append(Problem(f"{value!r} is not a count", f"hyperparameter {name}", advice))
            return None
        return value

    def port(self, name: str, default: int) -> int:
        """A TCP port from a variable."""
        value = self._variables.get(name, "").strip()
        if not value:
            return default
        if not value.isdecimal() or not 1 <= int(value) <= 65535:
            self._problems.append(Problem(f"{value!r} is not a TCP port", f"variable {name}", "use 1024 to 65535"))
            return default
        return int(value)

    def seconds(self, name: str, default: float) -> float:
        """A number of seconds, more than 0, from a variable."""
        value = self._variables.get(name, "").strip()
        if not value:
            return default
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 < number < 1e7:
            advice = f"give seconds as a number, the default is {default:g}"
            self._problems.append(Problem(f"{value!r} is not a number of seconds", f"variable {name}", advice))
            return default
        return number


def make_job(environment: Environment, host: str = "") -> Job:
    """Validate everything and make the job of ``host`` (default: this host).

    Raises RefusalError with all problems; nothing has been started or changed then.
    """
    problems: list[Problem] = list(environment.problems)
    warnings: list[str] = []
    user, reserved = split_reserved(environment.hyperparameters)
    problems += cluster.check_resource_config(environment.resource_config)
    problems += check_exported(environment, user, reserved)
    warnings += shared_variables(user)
    reader = _Reader(reserved, environment.variables, problems)
    hosts, current = _hosts(environment, host, problems)
    mode = _mode(environment, reserved, problems)
    _check_groups(environment, reserved, mode, problems)
    code_entry = _entry_point(environment, reserved, problems)
    per_host, processes = _processes(environment, reader, mode, len(hosts), problems)
    processes_origin, processes_why = _processes_reason(environment, reserved, per_host)
    interface, interface_why = _interface(environment, warnings)
    instance_type = cluster.instance_type_of(environment.resource_config, current)
    fabric_of_host = fabric.choose_fabric(
        environment.manifest,
        _efa_devices(environment, instance_type),
        instance_type,
        len(hosts),
        environment.variables,
    )
    warnings.extend(fabric_of_host.warnings)
    master_port = reader.port(names.MASTER_PORT_VARIABLE, names.MASTER_PORT)
    control_port = reader.port(names.CONTROL_PORT_VARIABLE, names.CONTROL_PORT)
    if master_port == control_port:
        where = f"variables {names.MASTER_PORT_VARIABLE} and {names.CONTROL_PORT_VARIABLE}"
        problems.append(Problem(f"both are port {master_port}", where, "give them different ports"))
    limits = Limits(
        stop_grace=reader.seconds(names.STOP_GRACE_VARIABLE, names.STOP_GRACE_SECONDS),
        join=reader.seconds(names.JOIN_LIMIT_VARIABLE, names.JOIN_LIMIT_SECONDS),
        prepare=reader.seconds(names.PREPARE_LIMIT_VARIABLE, names.PREPARE_LIMIT_SECONDS),
        heartbeat=reader.seconds(names.HEARTBEAT_LIMIT_VARIABLE, names.HEARTBEAT_LIMIT_SECONDS),
    )
    options = _custom_options(environment, reserved, mode, problems)
    if problems:
        raise RefusalError(problems)
    exported = exported_variables(
        environment,
        mode=mode,
        user=user,
        reserved=reserved,
        entry=code_entry,
        hosts=hosts,
        host=current,
        interface=interface,
        instance_type=instance_type,
        master_port=master_port,
    )
    return Job(
        environment=environment,
        mode=mode,
        entry=code_entry,
        code=environment.code,
        arguments=to_arguments(user),
        hosts=hosts,
        host=current,
        processes_per_host=per_host,
        processes=processes,
        processes_origin=processes_origin,
        processes_why=processes_why,
        custom_mpi_options=options,
        interface=interface,
        interface_why=interface_why,
        fabric=fabric_of_host,
        control_port=control_port,
        master_port=master_port,
        limits=limits,
        variables=exported,
        inherited=environment.variables,
        warnings=tuple(warnings),
    )


def _hosts(environment: Environment, asked: str, problems: list[Problem]) -> tuple[tuple[str, ...], str]:
    """(hosts, the host this job is made for). Without a resource config the job is one host: this one."""
    where = names.RESOURCE_CONFIG_FILE
    config = environment.resource_config
    hosts = texts(config.get("hosts"))
    current = text(config.get("current_host"))
    if not config:
        hosts, current = (environment.hostname,), environment.hostname
    elif not hosts:
        problems.append(Problem("'hosts' is missing or empty", where, "list every host of the job"))
        hosts = (current or environment.hostname,)
    malformed = [name for name in hosts if not _HOST.fullmatch(name)]
    if malformed:
        problems.append(Problem(f"{malformed[0]!r} is not a host name", f"{where}: hosts", "use letters, digits, . -"))
    doubles = sorted({name for name in hosts if hosts.count(name) > 1}) if len(set(hosts)) != len(hosts) else []
    if doubles:
        problems.append(Problem(f"{doubles[0]!r} is listed more than once", f"{where}: hosts", "list each host once"))
    wanted = asked or current
    if not wanted and len(hosts) == 1:
        wanted = hosts[0]
    if wanted not in hosts:
        source = "option --host" if asked else f"{where}: current_host"
        problems.append(Problem(f"{wanted!r} is not one of the job's hosts", source, nearest(wanted, hosts)))
        wanted = hosts[0]
    return hosts, wanted


def _mode(environment: Environment, reserved: Mapping[str, Json], problems: list[Problem]) -> str:
    """The one mode that is switched on; a problem if there are several, or if it is not built."""
    asked = [(switch, mode) for switch, mode in MODES_BUILT.items() if truth(reserved.get(switch))]
    for switch, mode in MODES_NOT_BUILT.items():
        if truth(reserved.get(switch)):
            asked.append((switch, mode))
            problems.append(_not_built(mode, f"hyperparameter {switch}"))
    parallel = environment.hyperparameters.get(names.MODEL_PARALLEL_PARAMETERS)
    variable = environment.variables.get(names.MODEL_PARALLEL_VARIABLE, "").strip()
    if parallel not in (None, "", {}, "{}") or variable not in ("", "{}"):
        where = f"hyperparameter {names.MODEL_PARALLEL_PARAMETERS}" if parallel else names.MODEL_PARALLEL_VARIABLE
        problems.append(_not_built("smdistributed.modelparallel", where))
        # Model parallelism comes with mpi by its nature; that is one mode and not two.
        asked = [pair for pair in asked if pair[1] != "mpi"] + [(where, "smdistributed.modelparallel")]
    if len(asked) > 1:
        both = " and ".join(mode for _, mode in asked)
        switches = ", ".join(switch for switch, _ in asked)
        problems.append(Problem(f"{both} are both switched on", switches, "keep one of them"))
    unknown = [
        name
        for name in reserved
        if name.startswith(names.RESERVED_PREFIX) and name.endswith("_enabled") and truth(reserved.get(name))
        if name not in MODES_BUILT and name not in MODES_NOT_BUILT
        if name not in ("sagemaker_enable_cloudwatch_metrics", "sagemaker_toolkit_native_launcher_enabled")
    ]
    for name in unknown:
        advice = nearest(name, (*MODES_BUILT, *MODES_NOT_BUILT))
        problems.append(
            Problem("switches on a mode that this launcher does not know", f"hyperparameter {name}", advice)
        )
    return asked[0][1] if asked else "none"


def _not_built(mode: str, where: str) -> Problem:
    """The refusal of a mode that is known and not there yet."""
    advice = "built are: none, mpi, torch_distributed; choose one of them, or use an image whose launcher has this mode"
    return Problem(f"the mode {mode} is not built into this launcher yet", where, advice)


def _check_groups(environment: Environment, reserved: Mapping[str, Json], mode: str, problems: list[Problem]) -> None:
    """Refuse a distribution over a part of the hosts: starting it on all of them would be a different job."""
    groups = environment.resource_config.get("instance_groups")
    named = [text(mapping(group).get("instance_group_name")) for group in groups] if isinstance(groups, list) else []
    asked = texts(reserved.get(names.DISTRIBUTION_INSTANCE_GROUPS))
    where = f"hyperparameter {names.DISTRIBUTION_INSTANCE_GROUPS}"
    problems.extend(
        Problem(f"there is no instance group {group!r}", where, nearest(group, named))
        for group in asked
        if group not in named
    )
    if mode != "none" and len(named) > 1 and asked and set(asked) != set(named):
        advice = "list every group, or start one job per group"
        problems.append(Problem("a distribution over some of the instance groups is not built yet", where, advice))


def _entry_point(environment: Environment, reserved: Mapping[str, Json], problems: list[Problem]) -> entries.EntryPoint:
    """The entry point, checked against the code that is there."""
    where = f"{names.PROGRAM_VARIABLE} or hyperparameter {names.PROGRAM}"
    code = environment.code
    program = entries.program_name(environment.variables, reserved)
    if "://" in code.directory:
        scheme = code.directory.split("://", 1)[0]
        advice = f"mount the code at {environment.base_directory}/{names.CODE_DIRECTORY} or pass a local tar.gz"
        problems.append(
            Problem(f"code from {scheme}:// is not fetched yet by this launcher: {code.directory}", "code", advice)
        )
    elif not code.entries and not environment.problems:
        advice = "put the training script there"
        problems.append(Problem("there is no code", code.archive or code.directory, advice))
    if not program:
        scripts = [name for name in code.entries if name.endswith(".py") and "/" not in name]
        advice = f"set it to one of: {', '.join(scripts[:8])}" if scripts else "set it to the name of the script"
        problems.append(Problem("no entry point is given", where, advice))
        return entries.EntryPoint("script", "")
    try:
        point = entries.parse_entry_point(program)
    except ValueError as error:
        problems.append(Problem(f"the entry point {error}", where, "give a path below the code directory"))
        return entries.EntryPoint("script", "")
    if point.kind != "module" and code.entries and point.name not in code.entries:
        problems.append(
            Problem(
                f"there is no file {point.name!r} in {code.archive or code.directory}",
                where,
                nearest(point.name, [name for name in code.entries if "/" not in name] or code.entries),
            )
        )
    elif point.kind == "command" and code.entries and point.name not in code.executable:
        advice = "make it executable (chmod +x), or name it .py or .sh"
        problems.append(Problem(f"the entry point {point.name!r} is not executable", where, advice))
    if point.kind != "command" and "python" not in environment.programs and point.kind != "shell":
        problems.append(Problem("there is no Python in this image", "program python", "install python3"))
    return point


def _processes(
    environment: Environment, reader: _Reader, mode: str, hosts: int, problems: list[Problem]
) -> tuple[int, int]:
    """(processes per host, processes in all)."""
    devices = environment.devices
    instance = environment.manifest.instances.get(text(environment.resource_config.get("current_instance_type")))
    neuron_cores = instance.neuron_cores if instance and devices.neuron_devices else 0
    asked = reader.count(names.PROCESSES_PER_HOST)
    per_host = asked or devices.gpus or neuron_cores or 1
    if mode != "none" and asked and devices.gpus and asked > devices.gpus:
        problems.append(
            Problem(
                f"{asked} processes per host on {devices.gpus} GPU(s)",
                f"hyperparameter {names.PROCESSES_PER_HOST}",
                f"give at most {devices.gpus}: one process per GPU",
            )
        )
    total = reader.count(names.MPI_PROCESSES) if mode == "mpi" else None
    if total and total > per_host * hosts:
        problems.append(
            Problem(
                f"{total} processes do not fit on {hosts} host(s) with {per_host} each",
                f"hyperparameter {names.MPI_PROCESSES}",
                f"give at most {per_host * hosts}, or raise {names.PROCESSES_PER_HOST}",
            )
        )
    return per_host, total or per_host * hosts


def _processes_reason(environment: Environment, reserved: Mapping[str, Json], per_host: int) -> tuple[str, str]:
    """(origin, reason) of the processes per host."""
    if reserved.get(names.PROCESSES_PER_HOST) not in (None, ""):
        return "user", f"hyperparameter {names.PROCESSES_PER_HOST}"
    if environment.devices.gpus:
        return "platform", "one per GPU"
    return "platform", "one per Neuron core" if per_host > 1 else "one, for there is no accelerator"


def _interface(environment: Environment, warnings: list[str]) -> tuple[str, str]:
    """(network interface, why it). The given one if it exists, else the one that routes to the leader, and said."""
    given = text(environment.resource_config.get("network_interface_name"))
    devices = environment.devices
    if not given:
        return "", ""
    if given in devices.interfaces or not devices.interfaces:
        return given, "network_interface_name of the platform"
    if not devices.reaching:
        warnings.append(
            f"the network interface {given!r} does not exist here ({', '.join(devices.interfaces)} do), and none routes"
            " to the leader: the programs will choose one themselves"
        )
        return "", ""
    warnings.append(
        f"the network interface {given!r} does not exist here; using {devices.reaching!r}, which routes to the leader"
    )
    return devices.reaching, f"routes to the leader; the platform's {given!r} does not exist here"


def _efa_devices(environment: Environment, instance_type: str) -> tuple[str, ...] | None:
    """EFA devices of the host planned for: this host's, if it is of the same type; None if they cannot be known."""
    here = cluster.instance_type_of(environment.resource_config, text(environment.resource_config.get("current_host")))
    return environment.devices.efa if instance_type == here else None


def _custom_options(
    environment: Environment, reserved: Mapping[str, Json], mode: str, problems: list[Problem]
) -> tuple[str, ...]:
    """The user's mpirun options as words, by shell quoting rules; checked by ``flags`` when they are merged."""
    where = f"hyperparameter {names.MPI_OPTIONS}"
    value = reserved.get(names.MPI_OPTIONS)
    if mode != "mpi" or value is None or value == "":
        return ()
    if not isinstance(value, str):
        problems.append(Problem(f"{value!r} is not a text", where, "give mpirun's options as one text"))
        return ()
    try:
        words = tuple(shlex.split(value))
    except ValueError as error:
        problems.append(Problem(f"cannot be split into words: {error}: {value!r}", where, "close every quote"))
        return ()
    from trainworks_launcher.dialects import dialect_of
    from trainworks_launcher.flags import parse_user_options

    dialect = dialect_of(environment.manifest.components.get(names.OPEN_MPI, ""))
    _, found = parse_user_options(words, dialect, where)
    problems.extend(found)
    return words


def describe(job: Job) -> dict[str, Json]:
    """The facts of a job that a person wants to see first, for ``train --plan`` and the log."""
    return {
        "mode": job.mode,
        "host": job.host,
        "hosts": list(job.hosts),
        "leader": job.leader,
        "processes": job.processes,
        "processes_per_host": job.processes_per_host,
        "entry_point": job.entry.name,
        "entry_kind": job.entry.kind,
    }
