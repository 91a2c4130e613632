"""Hold the plan of one host: the command line, the environment, and the reason for each part.

``train --plan`` prints the plan, and supervise/ runs the same plan.
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
    """The reason for a flag, a variable or a choice of the launcher.

    ``words_of`` makes a command line from reasons, so that ``train --plan`` has a reason for each
    word of the command line.

    Attributes:
        subject: A flag such as ``--mca pml``, the name of a variable, or a choice such as
            ``mode none``.
        why: One sentence.
        origin: The user, the platform, the image or a default.
        words: Words of the command line, such as ``("--nnodes=2",)``; ``()`` for a variable or a
            choice.
    """

    subject: str
    why: str
    origin: Origin = Origin.DEFAULT
    words: tuple[str, ...] = ()


def words_of(line: Sequence[Reason]) -> tuple[str, ...]:
    """Return the command line of a sequence of reasons."""
    words: list[str] = []
    for reason in line:
        words += reason.words
    return tuple(words)


class Control(NamedTuple):
    """The control channel between the launchers of a job.

    Attributes:
        leader: The launcher that listens; the others connect to the leader.
        hosts: All launchers, the leader first: names of hosts, or ``task 0``, ``task 1``, ...
        port: The leader's TCP port.
        minimum_hosts: Number of hosts with which the job continues after the loss of others;
            0: the job ends with the loss of a host.
        address: Name or address of the leader; ``""``: the name in ``leader``.
    """

    leader: str
    hosts: tuple[str, ...]
    port: int
    minimum_hosts: int = 0
    address: str = ""


class Shell(NamedTuple):
    """The ssh client for hosts without a launcher, where the platform runs sshd and mounts keys.

    Attributes:
        ssh: Absolute path of the client.
    """

    ssh: str


class Auxiliary(NamedTuple):
    """A process beside the host's command, started before the command and ended with the job.

    Attributes:
        name: Its name in a message, such as ``Ray head``.
        argv: Its command line.
        env: Its variables besides those of the plan.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


class NodePlan(NamedTuple):
    """The plan of one host.

    Attributes:
        mode: A key of ``contract.modes.MODES``, such as ``torch_distributed``.
        host: This host.
        role: ``alone``, ``leader`` or ``worker``.
        needs: Absolute paths of programs that must exist.
        argv: The command; ``()`` on a host where mpirun of another host starts the ranks.
        env: Variables of the command, and in MPI jobs of every rank of this host, besides the
            inherited environment.
        cwd: Directory in which the command starts.
        code: The user's code, with the command line that fetches remote code.
        requirements: Command line of the installation; ``()`` for none.
        platform: Name of the platform that started the host, such as ``slurm``; ``""`` for none.
        member: This launcher's name in ``Control.hosts``; ``""``: the host's name.
        rank: Rank of the command, where the platform starts every rank; else -1.
        hidden: Beginnings of names of variables that the command does not get.
        hidden_from_ranks: Beginnings of names of variables that the ranks do not get either, unless
            the command sets the variable.
        left_out: Variables of the container's environment that no process of the job gets.
        processes: Processes of this host. With several, the first traceback is taken as the cause
            of a failure.
        ranks_by: The program that starts the ranks. ``mpirun`` or ``torchrun``: each rank starts
            through programs/rank.py, the launcher handles the output and the signals of the ranks,
            and the report of mpirun or torchrun names the rank that failed first. ``spawn``: the
            children of the command are the ranks, and get the signals. ``""``: the command is the
            user's program.
        auxiliaries: Processes that run beside the command.
        control: The control channel; None for a job of one host.
        shell: The ssh client for hosts without a launcher; None where each host has a launcher.
        limits: Time limits.
        checks: Checks of the host before the start; None for none.
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
            redactor: Hides the secrets of the job; None shows the secrets.
        """
        plan = self
        if redactor is not None:
            plan = self.redacted(redactor)
        return readable(json.dumps(plan.document(), indent=2, ensure_ascii=False)) + "\n"

    def redacted(self, redactor: Redactor) -> NodePlan:
        """Return a copy for people, with hidden secrets. The copy cannot be run."""
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
        """Return the plan as a JSON object: the keys that ``train --plan`` prints.

        null stands for no platform, no rank, no control channel and no ssh client. Secrets are in
        it as they are.
        """
        auxiliaries: list[Json] = []
        for auxiliary in self.auxiliaries:
            env: dict[str, Json] = dict(sorted(auxiliary.env.items()))
            argv: list[Json] = list(auxiliary.argv)
            auxiliaries.append({"name": auxiliary.name, "argv": argv, "env": env})
        reasons: list[Json] = []
        for reason in self.why:
            origin = reason.origin.word
            reasons.append({"subject": reason.subject, "origin": origin, "why": reason.why})
        control: Json = None
        if self.control is not None:
            control = {**self.control._asdict(), "hosts": list(self.control.hosts)}
        rank: Json = None
        # -1: the platform does not start every rank.
        if self.rank >= 0:
            rank = self.rank
        shell: Json = None
        if self.shell is not None:
            shell = self.shell._asdict()
        checks = OFF
        if self.checks:
            checks = QUICK
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
            "rank": rank,
            "hidden": list(self.hidden),
            "auxiliaries": auxiliaries,
            "control": control,
            "shell": shell,
            "restarts": self.restarts,
            "limits_seconds": self.limits._asdict(),
            "checks": checks,
            "why": reasons,
            "warnings": list(self.warnings),
        }


def role_of(job: Job) -> str:
    """Return the role of this launcher: ``alone``, ``leader`` or ``worker``."""
    members = job.placement.members
    if len(members) == 1:
        return "alone"
    if job.placement.member == members[0]:
        return "leader"
    return "worker"


def control_of(job: Job) -> Control | None:
    """Return the control channel of a job; None for a job of one launcher."""
    return _control(job.placement, job.network)


def _control(placement: Placement, network: Network) -> Control | None:
    """Return the control channel between all launchers; None for a job of one launcher."""
    members = placement.members  # the leader first
    leader = members[0]
    if len(members) == 1:
        return None
    # "" in a plan: the leader is reached by its name.
    address = placement.leader_address
    if address == leader:
        address = ""
    minimum = placement.elastic.minimum_hosts
    return Control(leader, members, network.control_port, minimum, address)


def plan_of_refusal(placement: Placement, network: Network, base_directory: str) -> NodePlan | None:
    """Plan a host that refuses the job and only sends the refusal to the other hosts.

    The plan has no command, no variables and no code to fetch. None for a job of one launcher,
    which has no other host to tell.
    """
    control = _control(placement, network)
    if control is None:
        return None
    role = "worker"
    if placement.member == control.leader:
        role = "leader"
    # A host that runs nothing waits for the others only for a short time.
    limits = network.limits._replace(join=min(network.limits.join, names.REFUSAL_LIMIT_SECONDS))
    return NodePlan(
        mode=placement.mode,
        host=placement.host,
        role=role,
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
    """Return the first lines of the job's log: mode, program, transport and warnings."""
    environment = job.environment
    platform = environment.platform
    lines = []
    if platform.platform not in ("", "sagemaker"):
        # A platform's variables may be left in an environment by mistake: the line shows that the
        # launcher uses them.
        lines.append(f"platform {platform.platform}: {platform.why}")
    lines.append(describe(job))
    if environment.results.note:
        lines.append(environment.results.note)
    if len(job.placement.hosts) > 1:
        lines.append(f"between hosts: {_transport(plan)}")
    if environment.resume_from:
        lines.append(f"continues from the checkpoint {environment.resume_from}")
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return tuple(lines)


def _transport(plan: NodePlan) -> str:
    """Return the transport between hosts, such as ``EFA (EFA devices on this host: rdmap0s6)``.

    A plan with EFA has a reason with the subject ``EFA``.
    """
    for reason in plan.why:
        if reason.subject == "EFA" and reason.why:
            return f"EFA ({reason.why})"
    return "TCP, because this host has no EFA"


_THREADS_VARIABLE = "OMP_NUM_THREADS"


class _OpenMp(NamedTuple):
    """The OpenMP threads of each rank.

    Attributes:
        threads: Number of threads; 0: OpenMP's default, one thread per CPU.
        why: Reason for the number.
    """

    threads: int
    why: str


_OPENMP_DEFAULT = _OpenMp(0, "")


def _openmp_of_rank(job: Job) -> _OpenMp:
    """Divide the CPUs of this host among its ranks: each gets at least one thread.

    ``_OPENMP_DEFAULT``, which sets nothing, in most jobs of one rank, for Ray, where the CPUs of
    the host are not known, and where the platform starts the ranks and divides the CPUs itself.
    """
    devices = job.environment.devices
    ranks = job.placement.processes_per_host
    if job.placement.mode == "ray":
        # Ray sets OMP_NUM_THREADS in each of its workers, from the CPUs that the worker asks for.
        return _OPENMP_DEFAULT
    # OpenMP counts the CPUs itself, but not a limit of CPU time. A program that is not Python's may
    # start ranks itself.
    is_limited_python = devices.cpus_limited and job.program.entry.in_python
    if ranks == 1 and not is_limited_python:
        return _OPENMP_DEFAULT
    # The EFA devices are None in a plan for a host of another type, whose CPUs are not known then.
    is_known = devices.efa is not None
    if not is_known or job.environment.platform.tasks is not None:
        return _OPENMP_DEFAULT
    limit = ""
    if devices.cpus_limited:
        limit = ", by its limit of CPU time,"
    why = f"this host may use {devices.cpus} CPU(s){limit} for {ranks} rank(s)"
    return _OpenMp(max(1, devices.cpus // ranks), why)


_INTERFACE_VARIABLES = {"NCCL_SOCKET_IFNAME": "NCCL", "GLOO_SOCKET_IFNAME": "gloo"}
"""Variable for the network interface of a library -> the library."""


def network_variables(job: Job) -> tuple[Mapping[str, str], tuple[Reason, ...]]:
    """Return (variables, reasons) for NCCL, gloo, the fabric, OpenMP and torch's flight recorder.

    A variable that the container sets (``job.inherited``) is the user's choice, and is not among
    the variables. The reasons also tell of variables for results, which others set.
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
    openmp = _openmp_of_rank(job)
    if openmp.threads and _THREADS_VARIABLE not in job.inherited:
        variables[_THREADS_VARIABLE] = str(openmp.threads)
        reasons.append(Reason(_THREADS_VARIABLE, openmp.why))
    for name, value in recorder_variables(job).items():
        variables[name] = value
        why = "torch writes down each rank's last collectives when NCCL's time-out ends the job"
        reasons.append(Reason(name, why))
    return MappingProxyType(variables), tuple(reasons)
