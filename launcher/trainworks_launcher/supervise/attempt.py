"""One attempt to run the job on this host: the state that the supervisor and its parts share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.supervise.attribution.failure import Verdict
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome
from trainworks_launcher.supervise.phase import Phase
from trainworks_launcher.supervise.processes import processes
from trainworks_launcher.supervise.processes.command import HostCommand
from trainworks_launcher.supervise.processes.guard import Guard
from trainworks_launcher.supervise.processes.processes import Child

if TYPE_CHECKING:
    from trainworks_launcher.contract.errors import RefusalError
    from trainworks_launcher.contract.json_values import Json
    from trainworks_launcher.environment.environment import Environment
    from trainworks_launcher.plan.plan import NodePlan
    from trainworks_launcher.supervise.control import Role
    from trainworks_launcher.supervise.outcome.evidence import Suspect
    from trainworks_launcher.supervise.part import Part
    from trainworks_launcher.supervise.processes.job_directory import JobDirectory, NoJobDirectory
    from trainworks_launcher.supervise.processes.output import Output
    from trainworks_launcher.supervise.restart import AttemptHistory

MessageHandler = Callable[[str, "Mapping[str, Json]"], None]
"""Takes a message of another host: the host's name, and the fields."""

STARTERS = ("mpirun", "torchrun")
"""What starts each rank through rank.py, so that it reports to the launcher."""


class Command(NamedTuple):
    """A command to start.

    Attributes:
        argv: Its command line.
        cwd: The directory in which it starts.
        env: Its environment.
        status: Exit status of the job if it cannot be started.
        prefix: What each line of its output begins with; None: the output is copied as it is.
    """

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    status: int = names.EXIT_PREPARATION
    prefix: bytes | None = None


class Attempt:
    """The state of one attempt. Every method runs in the loop's thread.

    Attributes:
        plan: What this host does. Another plan replaces it once the code is on this host.
        environment: What was read on this host.
        history: What this host knows of all attempts of the job.
        runtime: The job's directory, and the environment of its processes.
        output: Copies the output of processes, and writes the log.
        loop: Waits for everything at once.
        role: This host's side of the control connection.
        handlers: Takes a message of another host, by the kind of the message.
        parts: The optional parts of this attempt.
        phase: How far the attempt is.
        stop_signal: The stop signal that came first; 0: the job was not stopped.
        outcome: The job's outcome; None as long as it is not known.
        running: The command and the ranks of this host.
        when_ended: Called with the return code of the command.
        family: Takes the status of the job's orphans, and ends what is left of the job.
        awaits_checkpoint: Whether the program waits until its checkpoint is found.
        verdict: Gathers what is known of a failure.
        redactor: Hides the secrets of the job.
        guardian: Ends the job's processes if the launcher is killed.
    """

    role: Role

    def __init__(
        self,
        plan: NodePlan,
        environment: Environment,
        history: AttemptHistory,
        runtime: JobDirectory | NoJobDirectory,
        output: Output,
    ) -> None:
        """Make the parts that every attempt has; start nothing. The supervisor sets the role.

        Args:
            plan: The plan of this host.
            environment: What was read on this host.
            history: The earlier attempts of the job.
            runtime: The job's directory.
            output: Copies the output of processes, and writes the log.
        """
        self.plan = plan
        self.environment = environment
        self.history = history
        self.runtime = runtime
        self.output = output
        self.loop = Loop()
        self.family = processes.Orphans()
        self.guardian = Guard()
        self.redactor = Redactor(environment.variables, plan.env, environment.hyperparameters)
        self.running = HostCommand(plan.ranks_by)
        self.verdict = Verdict(plan, environment.output, self.redactor, runtime.path)
        self.handlers: dict[str, MessageHandler] = {}
        self.parts: list[Part] = []
        self.phase = Phase.JOINING
        self.stop_signal = 0
        self.outcome: Outcome | None = None
        self.when_ended: Callable[[int], None] = lambda _: None
        self.awaits_checkpoint = False
        has_several_ranks = plan.control is not None or plan.processes > 1
        is_off = environment.variables.get(names.LOG_PREFIX_VARIABLE, "").strip() == "off"
        self._has_prefix = has_several_ranks and not is_off

    @property
    def is_over(self) -> bool:
        """Whether the job is being stopped, or its outcome is known: nothing new begins."""
        return bool(self.stop_signal) or self.phase >= Phase.ENDING

    @property
    def may_start(self) -> bool:
        """Whether processes of the program may start now."""
        return self.phase is Phase.RUNNING and not self.stop_signal

    def log(self, message: str) -> None:
        """Write one line of the launcher, without secrets; never blocks."""
        self.output.log(self.redactor.text(message))

    def prefix_of(self, rank: int) -> bytes:
        """Return the prefix of a rank's lines: ``[algo-1 rank 3] ``; empty if there is none."""
        if not self._has_prefix:
            return b""
        return f"[{self.plan.host} rank {rank}] ".encode()

    # --- what the other hosts are told ------------------------------------------------------------
    def report(self, outcome: Outcome) -> None:
        """Report this host's end to the role, which decides the job's outcome."""
        self.role.ended(outcome)

    def refuse(self, refusal: RefusalError) -> None:
        """Report a refusal as this host's failure."""
        self.report(Outcome(FAILED, refusal.status, self.plan.host, str(refusal)))

    def suspect(self, suspect: Suspect) -> None:
        """Send the leader the evidence about a rank of this host.

        A worker keeps the evidence too, because the leader may be lost.
        """
        if self.plan.role == "worker":
            self.verdict.add(suspect)
        self.role.suspect(suspect)

    def tell(self, kind: str, **fields: Json) -> None:
        """Send a message: to the leader, or as the leader to all hosts."""
        self.role.tell(kind, "", **fields)

    def told(self, host: str, kind: str, message: Mapping[str, Json]) -> None:
        """Give a message of another host to the handler of its kind; ignore an unknown kind."""
        handler = self.handlers.get(kind)
        if handler is not None:
            handler(host, message)

    # --- processes --------------------------------------------------------------------------------
    def environment_of_program(self) -> Mapping[str, str]:
        """Return the environment of the job's command: that of the job, without hidden variables.

        mpirun gets TMPDIR and SHELL of its own; its ranks keep the user's (rank.py).
        """
        hidden = self.plan.hidden
        visible = {
            name: value for name, value in self.runtime.env.items() if not name.startswith(hidden)
        }
        if self.plan.ranks_by != "mpirun":
            return visible
        # TMPDIR: files that a killed mpirun leaves in /tmp make the next one fail if process ids
        # repeat, as they do in containers. The runtime directory is removed with the job.
        # SHELL: mpirun writes the command of its daemons for the user's shell, and sh runs it.
        return {**visible, "SHELL": "/bin/sh", "TMPDIR": str(self.runtime.path)}

    def own_pids(self) -> tuple[int, ...]:
        """Return the children of this process whose status is read by their own part."""
        pids = [*self.guardian.pids]
        if self.running.command is not None:
            pids.append(self.running.command.pid)
        for part in self.parts:
            pids += part.pids
        return tuple(pids)

    def start_child(self, command: Command) -> Child:
        """Start a process of the job beside its command, and report it to the guard.

        Raises:
            OSError: The process cannot be started.
        """
        child = Child(command.argv, command.env, command.cwd, self.output, command.prefix)
        self.guardian.tell(child.pid)
        return child

    def start_command(self, command: Command, when_ended: Callable[[int], None]) -> None:
        """Start the command that this host waits for, and report it to the guard.

        If it cannot be started, that is reported as this host's failure, with ``command.status``,
        and nothing is raised. Sets ``running.command`` and ``when_ended``.

        Args:
            command: The command.
            when_ended: Called with its return code, negative after a signal.
        """
        self.when_ended = when_ended
        argv, cwd = command.argv, command.cwd
        try:
            child = Child(argv, command.env, cwd, self.output, command.prefix)
            self.running.command = child
            self.guardian.tell(child.pid)
        except OSError as error:
            reason = processes.why_not_started(argv[0], cwd, error)
            text = f"cannot start {argv[0]} in {cwd}: {reason}"
            self.report(Outcome(FAILED, command.status, self.plan.host, text))

    def clean_up_shared_memory(self, until: float = 0.0) -> None:
        """Remove the files that dead ranks have left in /dev/shm; log what was removed.

        Args:
            until: Start of the ranks that run now, in seconds since 1970; 0 if none runs.
        """
        line = self.history.clean_up_shared_memory(until)
        if line:
            self.log(line)
