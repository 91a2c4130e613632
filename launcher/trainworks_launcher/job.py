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
from typing import Mapping, Sequence

from trainworks_launcher import cluster, fabric, names, placement, provision
from trainworks_launcher import entry as entries
from trainworks_launcher.arguments import check_sizes, choose_style, to_arguments
from trainworks_launcher.elastic import Elastic, read_elastic
from trainworks_launcher.elsewhere import environment_of
from trainworks_launcher.environment import Environment
from trainworks_launcher.errors import Problem, RefusalError, nearest
from trainworks_launcher.exported import check_exported, exported_variables, warn_exported
from trainworks_launcher.hyperparameters import split_reserved
from trainworks_launcher.registry import Mode
from trainworks_launcher.values import Json, compact, text, texts

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

    mode: a name of ``registry.MODES``. requirements: argv that installs what the code needs, () for nothing.
    arguments: of the script. hosts: all of them, in the platform's order.
    distribution_hosts: those that take part in the distribution, its leader first; slots: the processes of each of
    them. processes: of the distribution in all. processes_origin, processes_why: who said how many there are per host
    (an origin as ``plan`` has it), and how. instance_type: of this host. custom_mpi_options: the user's words,
    custom_mpi_where: the name of the setting they are from. interface: the network interface to use, "" if none is
    known, interface_why says where it comes from. elastic: restarts, and hosts that may be lost. variables: what the
    script gets besides the inherited environment. inherited: the container's environment (a value in it is the user's).
    warnings: lines to print before the start.
    """

    environment: Environment
    mode: str
    entry: entries.EntryPoint
    code: entries.Code
    requirements: tuple[str, ...]
    arguments: tuple[str, ...]
    hosts: tuple[str, ...]
    host: str
    distribution_hosts: tuple[str, ...]
    slots: tuple[int, ...]
    processes: int
    processes_origin: str
    processes_why: str
    instance_type: str
    custom_mpi_options: tuple[str, ...]
    custom_mpi_where: str
    interface: str
    interface_why: str
    fabric: fabric.Fabric
    control_port: int
    master_port: int
    limits: Limits
    elastic: Elastic
    variables: Mapping[str, str]
    inherited: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def membership(self) -> Membership:
        """Where the host belongs."""
        return Membership(
            self.mode,
            self.hosts,
            self.host,
            self.leader,
            self.control_port,
            self.elastic.minimum_hosts,
            self.limits,
        )

    @property
    def leader(self) -> str:
        """The host that has rank 0, starts mpirun, and listens on the control port: first of the distribution.

        One host for all three, also where a group's distribution does not begin with the job's first host: mpirun needs
        the keys that the listening host made, and the model that is kept is rank 0's.
        """
        return self.distribution_hosts[0]

    @property
    def takes_part(self) -> bool:
        """Whether this host is one of the distribution's; another one runs the program by itself."""
        return self.host in self.distribution_hosts

    @property
    def host_rank(self) -> int:
        """Index of this host in ``distribution_hosts``; 0 is the leader. Raises ValueError if it takes no part."""
        return self.distribution_hosts.index(self.host)

    @property
    def processes_per_host(self) -> int:
        """Processes of this host; 1 if it takes no part in the distribution."""
        return self.slots[self.host_rank] if self.takes_part else 1


@dataclass(frozen=True)
class Membership:
    """Where a host belongs, also if it refuses the job: what it takes to tell the others. Fields as in ``Job``."""

    mode: str
    hosts: tuple[str, ...]
    host: str
    leader: str
    control_port: int
    minimum_hosts: int
    limits: Limits


class JobRefusedError(RefusalError):
    """A refusal by a host that knows which job it belongs to."""

    def __init__(self, problems: Sequence[Problem], membership: Membership) -> None:
        """Keep both."""
        super().__init__(problems)
        self.membership = membership


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

    def word(self, name: str, words: tuple[str, ...]) -> str:
        """One of a few words from a variable; the first is the default."""
        value = self._variables.get(name, "").strip()
        if value and value not in words:
            self._problems.append(Problem(f"{value!r} is not understood", f"variable {name}", nearest(value, words)))
        return value if value in words else words[0]

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
    environment = environment_of(environment, host)
    problems: list[Problem] = list(environment.problems)
    warnings: list[str] = []
    user, reserved = split_reserved(environment.hyperparameters)
    problems += cluster.check_resource_config(environment.resource_config)
    style = choose_style(environment.variables, reserved, problems)
    problems += check_exported(environment, user, reserved, style)
    problems += check_sizes(user, style)
    warnings += warn_exported(user, reserved)
    reader = _Reader(reserved, environment.variables, problems)
    hosts, current = _hosts(environment, host, problems)
    mode = placement.choose_mode(environment, reserved, problems)
    part = placement.hosts_of(environment, reserved, mode, hosts, problems, warnings)
    placement.check_programs(environment, mode, len(part), problems)
    program = entries.program_name(environment.variables, reserved)
    trainer = environment.drivers
    warnings += trainer.notes
    if trainer.command:
        code_entry = entries.EntryPoint("line", trainer.command)
    else:
        code_entry = entries.choose_entry_point(program, environment.code, environment.programs, problems)
    code = provision.with_fetch(environment, reserved, problems)
    requirements = provision.installation(environment, code, code_entry, problems)
    warnings += code.notes
    asked = reader.count(names.PROCESSES_PER_HOST)
    slots, processes_why = placement.slots(environment, mode, part, asked, problems, warnings)
    warnings += placement.unknown_types(environment, hosts)
    processes = _processes(reader, mode, slots, problems)
    interface, interface_why = _interface(environment, warnings)
    instance_type = cluster.instance_type_of(environment.resource_config, current)
    here = placement.is_type_of_this_host(environment, instance_type)
    fabric_of_host = fabric.choose_fabric(
        environment.manifest,
        environment.devices.efa if here else None,
        instance_type,
        len(part),
        environment.variables,
    )
    warnings.extend(fabric_of_host.warnings)
    master_port = reader.port(names.MASTER_PORT_VARIABLE, names.MASTER_PORT)
    reader.word(names.LOG_PREFIX_VARIABLE, ("on", "off"))
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
    elastic = read_elastic(reserved, environment.variables, mode.name, len(part), len(hosts), problems)
    _check_secret(environment.job_secret, problems)
    if problems:
        leader = part[0] if part else hosts[0]
        minimum = elastic.minimum_hosts
        raise JobRefusedError(problems, Membership(mode.name, hosts, current, leader, control_port, minimum, limits))
    arguments = (*trainer.arguments, *to_arguments(user, style))
    exported = exported_variables(
        environment,
        mode=mode.name,
        user=user,
        reserved=reserved,
        entry=code_entry,
        hosts=hosts,
        host=current,
        distribution_hosts=part,
        interface=interface,
        instance_type=instance_type,
        master_port=master_port,
        arguments=arguments,
    )
    if trainer.distributed:
        exported = MappingProxyType({**exported, names.DISTRIBUTED_CONFIG_VARIABLE: compact(dict(trainer.distributed))})
    return Job(
        environment=environment,
        mode=mode.name,
        entry=code_entry,
        code=code,
        requirements=requirements,
        arguments=arguments,
        hosts=hosts,
        host=current,
        distribution_hosts=part,
        slots=slots,
        processes=processes,
        processes_origin="user" if asked and not mode.one_per_host else "platform",
        processes_why=processes_why,
        instance_type=instance_type,
        custom_mpi_options=options,
        custom_mpi_where=f"hyperparameter {mode.options}",
        interface=interface,
        interface_why=interface_why,
        fabric=fabric_of_host,
        control_port=control_port,
        master_port=master_port,
        limits=limits,
        elastic=elastic,
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


def _check_secret(secret: str, problems: list[Problem]) -> None:
    """Refuse a secret that can be guessed."""
    if secret and len(secret) < names.JOB_SECRET_MINIMUM:
        what = f"a secret of {len(secret)} characters can be guessed"
        advice = f"make one of at least {names.JOB_SECRET_MINIMUM}, for example with: openssl rand -hex 32"
        problems.append(Problem(what, f"variable {names.JOB_SECRET_VARIABLE}", advice))


def _processes(reader: _Reader, mode: Mode, slots: Sequence[int], problems: list[Problem]) -> int:
    """Processes of the distribution in all: its slots, or fewer where mpirun is asked for fewer."""
    total = reader.count(names.MPI_PROCESSES) if mode.options == names.MPI_OPTIONS else None
    if total and total > sum(slots):
        problems.append(
            Problem(
                f"{total} processes do not fit on {len(slots)} host(s) with {max(slots)} each",
                f"hyperparameter {names.MPI_PROCESSES}",
                f"give at most {sum(slots)}, or raise {names.PROCESSES_PER_HOST}",
            )
        )
    return total or sum(slots)


def _interface(environment: Environment, warnings: list[str]) -> tuple[str, str]:
    """(network interface, why it). The given one if it exists, else the one that routes to the leader, and said.

    Several may be given, with commas, as NCCL, gloo and Open MPI take them.
    """
    given = text(environment.resource_config.get("network_interface_name"))
    devices = environment.devices
    if not given:
        return "", ""
    present = [name for name in given.split(",") if name in devices.interfaces]
    if present == given.split(",") or not devices.interfaces:
        return given, "network_interface_name of the platform"
    if present:
        warnings.append(f"of the network interfaces {given!r} only {', '.join(present)} exist(s) here: using that")
        return ",".join(present), f"what exists of the platform's {given!r}"
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


def _custom_options(
    environment: Environment, reserved: Mapping[str, Json], mode: Mode, problems: list[Problem]
) -> tuple[str, ...]:
    """The user's mpirun options as words, by shell quoting rules; checked by ``flags`` when they are merged."""
    where = f"hyperparameter {mode.options}"
    value = reserved.get(mode.options)
    if not mode.options or value is None or value == "":
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


def describe(job: Job) -> str:
    """One line for the log: the mode, this host's place in it, the processes, the program."""
    hosts, part = len(job.hosts), len(job.distribution_hosts)
    place = f"{job.host_rank + 1} of {part}" if job.takes_part else f"takes no part in it, {part} do"
    if part < hosts:
        place += f", {hosts} in the job"
    count = job.processes_per_host
    total = f" of {job.processes}" if job.takes_part and job.processes > count else ""
    return f"mode {job.mode}, host {job.host} ({place}), {count}{total} process(es) here, {job.entry.name}"
