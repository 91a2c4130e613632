"""What is done on one host, as a value that prints itself. What ``train --plan`` shows is what ``supervise`` runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Mapping, Sequence

from trainworks_launcher import names
from trainworks_launcher.entry import Code
from trainworks_launcher.job import Job, Limits, Membership, describe
from trainworks_launcher.masking import Masker
from trainworks_launcher.values import Json, readable


@dataclass(frozen=True)
class Reason:
    """Why a flag, a variable or a choice is as it is.

    subject: what it is about: a flag ("--mca pml"), the name of a variable, or a choice in words. why: one sentence.
    origin: who decided, one of ORIGINS. words: the words of argv that it accounts for; () for a variable or a choice. A
    command line is made of such reasons (``words_of``), so that ``explain`` can account for each of its words.
    """

    subject: str
    why: str
    origin: str = "default"
    words: tuple[str, ...] = ()


ORIGINS = ("default", "platform", "image", "fabric", "user")
"""Who decided: this launcher; the platform's files; the image (its manifest, its programs, its environment); what the
host's network fabric needs; the job (hyperparameters, code)."""


def words_of(line: Sequence[Reason]) -> tuple[str, ...]:
    """The command line that a sequence of reasons accounts for."""
    return tuple(word for reason in line for word in reason.words)


@dataclass(frozen=True)
class Control:
    """The control channel of a job with several hosts: the first host listens on ``port``, the others join.

    minimum_hosts: with so many the job goes on when others are lost; 0: it needs all of them.
    """

    leader: str
    hosts: tuple[str, ...]
    port: int
    minimum_hosts: int = 0


@dataclass(frozen=True)
class Shell:
    """ssh between the hosts of one job, with keys made for it: paths of the three programs."""

    ssh: str
    sshd: str
    ssh_keygen: str


@dataclass(frozen=True)
class Auxiliary:
    """A process beside the host's command: started before it, ended with the job. name: for sentences. argv: its
    command line. env: variables set over those of the plan."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class NodePlan:
    """What one host does.

    mode, host: as in the job. role: "alone", "leader" or "worker". needs: programs that have to exist, absolute paths.
    argv: the command, () on a host whose processes another host starts. env: variables set on top of the inherited
    environment, for the command and (in MPI jobs) for every rank on this host. cwd: where it starts. code: what is
    fetched and unpacked there before. requirements: argv of the installation, () for none. processes: of this host, so
    that a failure text can tell one process's traceback from many. ranks_by: "mpirun" or "torchrun" where the command
    starts ranks, each through rank.py: their output and signals are the launcher's business then, and what the command
    itself prints at its end says which rank failed first; "spawn" where the command's own children are the ranks and
    get the signals; "" where the command is the program itself. auxiliaries: what runs beside the command. control,
    shell: None for a job of one host. why: reasons.
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
    limits: Limits = field(default_factory=Limits)
    why: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_json(self, masker: Masker | None = None) -> str:
        """The plan as JSON text, the same bytes for the same plan. masker: hides what is secret; None shows it."""
        plan = self if masker is None else self.masked(masker)
        return readable(json.dumps(plan.document(), indent=2, ensure_ascii=False)) + "\n"

    def masked(self, masker: Masker) -> NodePlan:
        """The plan with its secrets hidden: to be shown, not to be run."""
        return replace(
            self,
            argv=masker.words(self.argv),
            env=MappingProxyType(masker.variables(self.env)),
            code=replace(self.code, fetch=masker.words(self.code.fetch)),
            requirements=masker.words(self.requirements),
            auxiliaries=tuple(
                replace(beside, argv=masker.words(beside.argv), env=masker.variables(beside.env))
                for beside in self.auxiliaries
            ),
            why=tuple(
                replace(reason, why=masker.text(reason.why), words=masker.words(reason.words)) for reason in self.why
            ),
            warnings=tuple(masker.text(warning) for warning in self.warnings),
        )

    def document(self) -> dict[str, Json]:
        """The plan as a JSON object."""
        return {
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
            "auxiliaries": [
                {"name": row.name, "argv": list(row.argv), "env": dict(sorted(row.env.items()))}
                for row in self.auxiliaries
            ],
            "control": {**asdict(self.control), "hosts": list(self.control.hosts)} if self.control else None,
            "shell": asdict(self.shell) if self.shell else None,
            "limits_seconds": asdict(self.limits),
            "why": [{"subject": reason.subject, "origin": reason.origin, "why": reason.why} for reason in self.why],
            "warnings": list(self.warnings),
        }


def role_of(job: Job) -> str:
    """ "alone", "leader" or "worker"."""
    if len(job.hosts) == 1:
        return "alone"
    return "leader" if job.host == job.leader else "worker"


def control_of(job: Job) -> Control | None:
    """Every job with more than one host has a control channel of all its hosts, whatever its mode; leader first."""
    return _control(job.membership)


def _control(membership: Membership) -> Control | None:
    leader = membership.leader
    others = tuple(host for host in membership.hosts if host != leader)
    if not others:
        return None
    return Control(leader, (leader, *others), membership.control_port, membership.minimum_hosts)


def plan_of_refusal(membership: Membership, base_directory: str) -> NodePlan | None:
    """What a host does that refuses the job: nothing but tell the others. None where there are none."""
    control = _control(membership)
    if control is None:
        return None
    limits = replace(membership.limits, join=min(membership.limits.join, names.REFUSAL_LIMIT_SECONDS))
    return NodePlan(
        mode=membership.mode,
        host=membership.host,
        role="leader" if membership.host == control.leader else "worker",
        needs=(),
        argv=(),
        env=MappingProxyType({}),
        cwd=base_directory,
        code=Code(base_directory),
        control=control,
        limits=limits,
    )


def first_lines(plan: NodePlan, job: Job) -> tuple[str, ...]:
    """What the job's log begins with: what is started, how the hosts talk to each other, and the warnings."""
    lines = [describe(job)]
    if len(job.hosts) > 1:
        fabric = next((reason.why for reason in plan.why if reason.subject == "EFA"), "")
        lines.append(f"between hosts: EFA, for {fabric}" if fabric else "between hosts: TCP, for there is no EFA here")
    return (*lines, *(f"warning: {warning}" for warning in plan.warnings))


def network_variables(job: Job) -> tuple[Mapping[str, str], tuple[Reason, ...]]:
    """Variables for NCCL and gloo, and the fabric's; what the container already sets is kept."""
    variables: dict[str, str] = dict(job.fabric.variables)
    why = [Reason(subject, text, "fabric") for subject, text in job.fabric.reasons]
    if job.interface:
        for name, library in (("NCCL_SOCKET_IFNAME", "NCCL"), ("GLOO_SOCKET_IFNAME", "gloo")):
            if name not in job.inherited:
                variables[name] = job.interface
                why.append(Reason(name, f"{library} is to use this interface: {job.interface_why}", "platform"))
    if "NCCL_DEBUG" not in job.inherited:
        variables["NCCL_DEBUG"] = "WARN"
        why.append(Reason("NCCL_DEBUG", "warnings only; INFO prints hundreds of lines per process"))
    return MappingProxyType(variables), tuple(why)
