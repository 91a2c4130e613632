"""What is done on one host, as a value that prints itself.

What ``train --plan`` shows is what ``supervise`` runs.
"""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.checks import OFF, QUICK, Checks
from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, readable
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.job.job import Job, describe
from trainworks_launcher.job.network import Limits, Network
from trainworks_launcher.job.placement import Placement
from trainworks_launcher.plan.flight_recorder import recorder_variables


class Reason(NamedTuple):
    """Why a flag, a variable or a choice is as it is.

    A command line is made of such reasons (``words_of``), so that ``explain``
    can account for each of its words.

    Attributes:
        subject: A flag ("--mca pml"), the name of a variable, or a choice in words.
        why: One sentence.
        origin: Who decided.
        words: Words of the command line that it accounts for; ``()`` for a variable or a choice.
    """

    subject: str
    why: str
    origin: Origin = Origin.DEFAULT
    words: tuple[str, ...] = ()


def words_of(line: Sequence[Reason]) -> tuple[str, ...]:
    """Return the command line that a sequence of reasons accounts for."""
    return tuple(word for reason in line for word in reason.words)


class Control(NamedTuple):
    """The control channel of a job with several hosts, or of one whose platform starts several
    launchers on a host.

    Attributes:
        leader: The host that listens; the others join it.
        hosts: All hosts, the leader first.
        port: The leader's TCP port.
        minimum_hosts: The job goes on with this many hosts when others are
            lost; 0: it needs all of them.
        address: Name or address by which the leader is reached; ``""``: its name.
    """

    leader: str
    hosts: tuple[str, ...]
    port: int
    minimum_hosts: int = 0
    address: str = ""


class Shell(NamedTuple):
    """ssh to hosts without a launcher, which run sshd with keys that the platform has mounted.

    Attributes:
        ssh: Absolute path of the client.
    """

    ssh: str


class Auxiliary(NamedTuple):
    """A process beside the host's command: started before it, ended with the job.

    Attributes:
        name: What a person calls it.
        argv: Its command line.
        env: Variables set over those of the plan.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


class NodePlan(NamedTuple):
    """What one host does.

    Attributes:
        mode: A name of ``registry.MODES``.
        host: This host.
        role: ``alone``, ``leader`` or ``worker``.
        needs: Absolute paths of programs that must exist.
        argv: The command; ``()`` on a host whose processes another host starts.
        env: Variables set on top of the inherited environment, for the command and, in MPI jobs,
            for every rank of this host.
        cwd: Directory in which the command starts.
        code: What is fetched and unpacked before the start.
        requirements: Command line of the installation; ``()`` for none.
        platform: Name of the platform that started the host; ``""`` for none.
        member: This launcher's name in the control channel's hosts; ``""``: the host's.
        rank: Rank of the command, where the platform starts every rank; else -1.
        hidden: Beginnings of variables that the command does not see.
        hidden_from_ranks: Those that the ranks do not see either, except for
            what the command itself sets.
        left_out: Variables of the container's environment that no process of the job gets.
        processes: Processes of this host. With several, the first traceback is taken for the cause.
        ranks_by: What starts the ranks. ``mpirun`` or ``torchrun``: the command starts each through
            ``rank.py``. The launcher handles their output and signals, and the command's own report
            names the rank that failed first. ``spawn``: the command's children are the ranks, and
            they get the signals. ``""``: the command is the program itself.
        auxiliaries: Processes that run beside the command.
        control: The control channel; None for a job of one host.
        shell: ssh to hosts without a launcher; None where each host has one.
        limits: Bounded waits.
        checks: What is checked before the start; None for nothing.
        why: Reasons for flags, variables and choices.
        warnings: Lines to print before the start.
        restarts: How often all hosts start the job again after a failure.
    """

    mode: str
    host: str
    role: str
    needs: tuple[str, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    code: Code
    requirements: tuple[str, ...] = ()
    processes: int = 1
    ranks_by: str = ""
    auxiliaries: tuple[Auxiliary, ...] = ()
    control: Control | None = None
    shell: Shell | None = None
    limits: Limits = Limits()
    checks: Checks | None = None
    why: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()
    platform: str = ""
    member: str = ""
    rank: int = -1
    hidden: tuple[str, ...] = ()
    hidden_from_ranks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    restarts: int = 0

    def to_json(self, redactor: Redactor | None = None) -> str:
        """Return the plan as JSON text, the same bytes for the same plan.

        Args:
            redactor: Hides what is secret; None shows it.
        """
        plan = self if redactor is None else self.redacted(redactor)
        return readable(json.dumps(plan.document(), indent=2, ensure_ascii=False)) + "\n"

    def redacted(self, redactor: Redactor) -> NodePlan:
        """Return the plan with its secrets hidden: to be shown, not to be run."""
        auxiliaries = []
        for auxiliary in self.auxiliaries:
            argv = redactor.words(auxiliary.argv)
            env = redactor.variables(auxiliary.env)
            auxiliaries.append(auxiliary._replace(argv=argv, env=env))
        reasons = []
        for reason in self.why:
            why = redactor.text(reason.why)
            reasons.append(reason._replace(why=why, words=redactor.words(reason.words)))
        return self._replace(
            argv=redactor.words(self.argv),
            env=MappingProxyType(redactor.variables(self.env)),
            code=self.code._replace(fetch=redactor.words(self.code.fetch)),
            requirements=redactor.words(self.requirements),
            auxiliaries=tuple(auxiliaries),
            why=tuple(reasons),
            warnings=tuple(redactor.text(warning) for warning in self.warnings),
        )

    def document(self) -> dict[str, Json]:
        """Return the plan as a JSON object."""
        auxiliaries: list[Json] = []
        for row in self.auxiliaries:
            env: dict[str, Json] = dict(sorted(row.env.items()))
            auxiliaries.append({"name": row.name, "argv": list(row.argv), "env": env})
        reasons: list[Json] = []
        for reason in self.why:
            origin = reason.origin.word
            reasons.append({"subject": reason.subject, "origin": origin, "why": reason.why})
        control: Json = None
        if self.control is not None:
            control = {**self.control._asdict(), "hosts": list(self.control.hosts)}
        return {
            "platform": self.platform or None,
            "mode": self.mode,
            "host": self.host,
            "role": self.role,
            "needs": list(self.needs),
            "argv": list(self.argv),
            "env": dict(sorted(self.env.items())),
            "cwd": self.cwd,
            "code": {"directory": self.code.directory, "archive": self.code.archive},
            "fetch": list(self.code.fetch),
            "requirements": list(self.requirements),
            "processes": self.processes,
            "ranks_by": self.ranks_by,
            "member": self.member or self.host,
            "rank": self.rank if self.rank >= 0 else None,
            "hidden": list(self.hidden),
            "auxiliaries": auxiliaries,
            "control": control,
            "shell": None if self.shell is None else self.shell._asdict(),
            "restarts": self.restarts,
            "limits_seconds": self.limits._asdict(),
            "checks": QUICK if self.checks else OFF,
            "why": reasons,
            "warnings": list(self.warnings),
        }


def role_of(job: Job) -> str:
    """ "alone", "leader" or "worker"."""
    members = job.placement.members
    if len(members) == 1:
        return "alone"
    return "leader" if job.placement.member == members[0] else "worker"


def control_of(job: Job) -> Control | None:
    """Return the control channel of a job of several hosts, whatever its mode.

    None for a job of one host.
    """
    return _control(job.placement, job.network)


def _control(placement: Placement, network: Network) -> Control | None:
    members = placement.members
    leader = members[0]
    if len(members) == 1:
        return None
    address = placement.leader_address
    if address == leader:
        address = ""
    minimum = placement.elastic.minimum_hosts
    return Control(leader, members, network.control_port, minimum, address)


def plan_of_refusal(placement: Placement, network: Network, base_directory: str) -> NodePlan | None:
    """Plan a host that refuses the job: it only tells the other hosts.

    None for a job of one host.
    """
    control = _control(placement, network)
    if control is None:
        return None
    limits = network.limits._replace(join=min(network.limits.join, names.REFUSAL_LIMIT_SECONDS))
    return NodePlan(
        mode=placement.mode,
        host=placement.host,
        role="leader" if placement.member == control.leader else "worker",
        member=placement.member,
        needs=(),
        argv=(),
        env=MappingProxyType({}),
        cwd=base_directory,
        code=Code(base_directory),
        control=control,
        limits=limits,
    )


def first_lines(plan: NodePlan, job: Job) -> tuple[str, ...]:
    """Return what the job's log begins with: what is started, how the hosts
    talk to each other, and the warnings.
    """
    environment = job.environment
    platform = environment.platform
    lines = []
    if platform.platform not in ("", "sagemaker"):
        # A job that is taken for another platform's, and a platform that a person did not know of,
        # are seen at once.
        lines.append(f"platform {platform.platform}: {platform.why}")
    lines.append(describe(job))
    if environment.results.note:
        lines.append(environment.results.note)
    if len(job.placement.hosts) > 1:
        lines.append(f"between hosts: {_transport(plan)}")
    if environment.resume_from:
        lines.append(f"goes on from the checkpoint {environment.resume_from}")
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return tuple(lines)


def _transport(plan: NodePlan) -> str:
    """Return the transport between hosts, and why, such as ``EFA (EFA devices on this host: ...)``.

    The plan has a reason for EFA where it is used.
    """
    for reason in plan.why:
        if reason.subject == "EFA" and reason.why:
            return f"EFA ({reason.why})"
    return "TCP, because this host has no EFA"


_THREADS = "OMP_NUM_THREADS"


def _threads(job: Job) -> tuple[int, str]:
    """Return the threads of each rank of this host, and why.

    0 where OpenMP's own default, all CPUs, is right.

    Not where the platform starts the ranks and shares the CPUs out, and not for
    a program that may start ranks itself.
    """
    devices = job.environment.devices
    ranks = job.placement.processes_per_host
    if job.placement.mode == "ray":
        return 0, ""  # Ray sets it in each of its processes, by the CPUs that this one asked for
    if ranks == 1 and not (devices.cpus_limited and job.program.entry.in_python):
        return 0, ""
    is_known = devices.efa is not None
    if not is_known or job.environment.platform.tasks is not None:
        return 0, ""
    threads = max(1, devices.cpus // ranks)
    limited = ", by its limit of CPU time," if devices.cpus_limited else ""
    return threads, f"this host may use {devices.cpus} CPU(s){limited} for {ranks} rank(s)"


_INTERFACE_VARIABLES = {"NCCL_SOCKET_IFNAME": "NCCL", "GLOO_SOCKET_IFNAME": "gloo"}
"""Variable that names the interface of a library -> the library."""


def network_variables(job: Job) -> tuple[Mapping[str, str], tuple[Reason, ...]]:
    """Return variables for NCCL and gloo, and the fabric's.

    What the container already sets is kept.
    """
    network = job.network
    variables: dict[str, str] = dict(network.fabric.variables)
    reasons = []
    for subject, why in network.fabric.reasons:
        reasons.append(Reason(subject, why, Origin.FABRIC))
    if network.interface:
        for name, library in _INTERFACE_VARIABLES.items():
            if name not in job.inherited:
                variables[name] = network.interface
                why = f"{library} uses this interface: {network.interface_why}"
                reasons.append(Reason(name, why, Origin.PLATFORM))
    if "NCCL_DEBUG" not in job.inherited:
        variables["NCCL_DEBUG"] = "WARN"
        why = "warnings only; INFO prints hundreds of lines per process"
        reasons.append(Reason("NCCL_DEBUG", why))
    for name, why in job.environment.results.why.items():
        reasons.append(Reason(name, why, Origin.PLATFORM))
    threads, why = _threads(job)
    if threads and _THREADS not in job.inherited:
        variables[_THREADS] = str(threads)
        reasons.append(Reason(_THREADS, why))
    for name, value in recorder_variables(job).items():
        variables[name] = value
        why = "torch writes down each rank's last collectives when NCCL's time-out ends the job"
        reasons.append(Reason(name, why))
    return MappingProxyType(variables), tuple(reasons)
