"""Runs one host's plan with real processes, and ends it truthfully.

One thread waits for everything at once: signals, children, the control channel, deadlines. The
order of a job is prepare (unpack, install) on every host at once, then all start together, then all
end together with one outcome.

PID 1 duties: orphans are reaped, stop signals are handed on. A stop signal goes to the ranks
themselves, which have all the time that the platform leaves (``shutdown``). What we start is in a
session of its own and is ended with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.inspection import LOOK_SECONDS, Inspection, run_in_time
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.contract.stop_signals import PASSED_ON, STOP_SIGNALS, handled
from trainworks_launcher.environment import directories
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.plan.plan import Auxiliary, NodePlan
from trainworks_launcher.supervise import control, hooks, shutdown
from trainworks_launcher.supervise.attribution import inquiry, outcome_files
from trainworks_launcher.supervise.attribution.failure import (
    DAEMON_SECONDS,
    Verdict,
    last_words,
    name_of_program,
)
from trainworks_launcher.supervise.control import HOLD, NO_MORE_TIME
from trainworks_launcher.supervise.event_loop import READ, Loop
from trainworks_launcher.supervise.hang import activation
from trainworks_launcher.supervise.hang.activation import HangActivation
from trainworks_launcher.supervise.outcome.evidence import Kind, Suspect
from trainworks_launcher.supervise.outcome.outcome import (
    FAILED,
    STOPPED,
    SUCCEEDED,
    Outcome,
    describe_status,
    shorten,
)
from trainworks_launcher.supervise.phase import Phase
from trainworks_launcher.supervise.preparation.run import Preparation
from trainworks_launcher.supervise.processes import output, processes
from trainworks_launcher.supervise.processes.command import HostCommand
from trainworks_launcher.supervise.processes.guard import Guard
from trainworks_launcher.supervise.processes.job_directory import JobDirectory, NoJobDirectory
from trainworks_launcher.supervise.processes.processes import Child
from trainworks_launcher.supervise.processes.sidecars import Sidecars
from trainworks_launcher.supervise.restart import KIND, Tries
from trainworks_launcher.supervise.shutdown import Stopping
from trainworks_launcher.supervise.signal_forwarding import PassingOn

if TYPE_CHECKING:
    from trainworks_launcher.supervise.attribution.crash_loop import CrashLoop
    from trainworks_launcher.supervise.attribution.stuck_starter import StuckStarter
    from trainworks_launcher.supervise.control.data_path import DataPath
    from trainworks_launcher.supervise.job_summary import JobSummary
    from trainworks_launcher.supervise.processes.attempts import Attempts
    from trainworks_launcher.supervise.processes.mpirun_agents import Agents, Daemons
    from trainworks_launcher.supervise.processes.ranks import Rank

_STARTERS = ("mpirun", "torchrun")  # each rank through rank.py
_INDEPENDENT = ("none", "tasks")  # modes whose programs need not talk to each other
# Modes that cannot start without the leader's MASTER_PORT.
_STORE_MODES = (
    "torch_distributed",
    "ray",
)
_DRAIN_SECONDS = 0.7
_REMIND_SECONDS = 10.0
_LOG_SECONDS = 0.05  # between looks into the log of torchrun
_LOG_LIMIT_SECONDS = 1.0  # until it has to be there


def run_plan(
    plan: NodePlan,
    environment: Environment,
    refusal: Outcome | None = None,
    stopped: Sequence[int] = (),
) -> int:
    """Run the plan to the job's end. Writes output/failure or output/success, and log lines.

    Args:
        plan: What this host does.
        environment: What was read on this host.
        refusal: Set if this host cannot take part. It then joins the other hosts only to tell them.
        stopped: Signals that came before; read once this run has its own handlers. Those between
            two tries are added.

    Returns:
        The exit status.
    """
    tries = Tries(plan, environment.variables.get(names.HEARTBEAT_FILE_VARIABLE, "").strip())
    while True:
        outcome = _try(plan, environment, refusal, stopped, tries)
        if outcome is None or not outcome.again:
            return outcome.status if outcome is not None else names.EXIT_LAUNCHER


def _try(
    plan: NodePlan,
    environment: Environment,
    refusal: Outcome | None,
    stopped: Sequence[int],
    tries: Tries,
) -> Outcome | None:
    """Run the plan once, as ``run_plan``. Returns the outcome; None if none is known."""
    runtime: JobDirectory | NoJobDirectory = NoJobDirectory()
    written: output.Output = output.SynchronousOutput()
    made: tuple[str, ...] = ()
    try:
        inherited = {
            name: value
            for name, value in environment.variables.items()
            if name not in plan.left_out
        }
        own_ranks = bool(plan.ranks_by) and plan.shell is None
        runtime = JobDirectory(
            inherited, {**plan.env, **hooks.variables(plan, environment)}, own_ranks
        )
        made = () if refusal is not None else _make_places(environment, tries)
        written = output.Output()
    except RefusalError as refused:
        runtime.remove()
        directories.take_back(made)
        output.log(str(refused))
        runtime, made = NoJobDirectory(), ()
        refusal = refusal or Outcome(FAILED, refused.status, plan.host, str(refused))
        limits = plan.limits._replace(join=min(plan.limits.join, names.REFUSAL_LIMIT_SECONDS))
        plan = plan._replace(argv=(), ranks_by="", auxiliaries=(), shell=None, limits=limits)
    return _Supervisor(plan, environment, refusal, runtime, written, made, tries).run(stopped)


def _make_places(environment: Environment, tries: Tries) -> tuple[str, ...]:
    """Make the directories of the job.

    They are there already for another try, whose file system may be dead.

    Raises RefusalError if the first try cannot have them.
    """
    if not tries.restarts:
        return directories.make(environment.places, environment.home)
    return run_in_time(lambda: directories.make(environment.places, environment.home), ())


class _Supervisor:
    """The state of one run. Every method runs in the loop's thread."""

    def __init__(
        self,
        plan: NodePlan,
        environment: Environment,
        refusal: Outcome | None,
        runtime: JobDirectory | NoJobDirectory,
        written: output.Output,
        made: Sequence[str],
        tries: Tries,
    ) -> None:
        """made: directories of the job that were made for it, and go again if
        nothing is started.
        """
        self._plan = plan
        self._refusal = refusal
        self._phase = Phase.JOINING
        self._environment = environment
        self._base = environment.output
        self._made = made
        self._tries = tries
        # A refusal leaves nothing behind where nobody looks for its report.
        self._reports = self._base if refusal is None else environment.refusals
        self._loop = Loop()
        self._runtime = runtime
        self._orphans = processes.Orphans()
        self._guardian = Guard()
        self._output = written
        self._redactor = Redactor(environment.variables, plan.env, environment.hyperparameters)
        several = plan.control is not None or plan.processes > 1
        prefixed = (
            several and environment.variables.get(names.LOG_PREFIX_VARIABLE, "").strip() != "off"
        )
        self._prefix = f"[{plan.host} rank %d] " if prefixed else ""
        self._running = HostCommand(plan.ranks_by)
        self._verdict = Verdict(plan, self._base, self._redactor, self._runtime.path)
        self._reported: Outcome | None = None
        self._reported_code = 0
        self._noted_by: set[int] = set()
        self._when_ended: Callable[[int], None] = lambda _: None
        self._auxiliaries = Sidecars(plan.auxiliaries, self._start_auxiliary)
        told = runtime.env
        self._lookout = HangActivation(
            self._loop, plan, environment, told, self._report, self._log, self._redactor.text
        )
        self._inquiry = inquiry.Inquiry(
            self._loop,
            look=self._look_for_records,
            tell=lambda fields: self._tell(inquiry.KIND, **fields),
            is_certain=self._verdict.is_certain,
        )
        self._heard: dict[str, Callable[[str, Mapping[str, Json]], None]] = {
            activation.MESSAGE: self._lookout.receive,
            inquiry.KIND: self._inquiry.heard,
        }
        self._rounds: Attempts | None = None
        self._overdue: StuckStarter | None = None
        self._account: JobSummary | None = None
        self._giving_up: CrashLoop | None = None
        self._role: control.Role | None = None
        self._agents: Agents | None = None
        self._daemons: Daemons | None = None
        self._data_path: DataPath | None = None
        self._is_prepared = False
        self._is_copy = False
        self._is_waiting = False
        self._writes = threading.Lock()
        self._is_looking = False
        self._asked: list[tuple[str, Mapping[str, Json]]] = []
        self._outcome: Outcome | None = None
        self._stopping = Stopping(
            self._loop,
            plan,
            self._running,
            self._verdict,
            self._runtime.path,
            shutdown.Events(
                phase=lambda: self._phase,
                report=self._report,
                begun=self._stop_begun,
                saving=lambda outcome: self._write_outcome(outcome, LOOK_SECONDS),
                tell=self._tell,
                abandoned=self._abandoned,
                log=self._log,
            ),
        )
        self._heard[HOLD] = self._told_to_hold
        self._heard[NO_MORE_TIME] = self._told_of_no_more_time
        self._passing_on = PassingOn(
            self._loop, plan, self._running, lambda: self._phase, self._log
        )
        self._preparation = Preparation(
            plan,
            environment,
            self._running,
            self._stopping,
            self._verdict,
            self._redactor,
            phase=lambda: self._phase,
            start=self._start,
            report=self._report,
            done=self._prepared,
            log=self._log,
        )

    # --- the run itself ---------------------------------------------------------------------------
    def run(self, stopped: Sequence[int]) -> Outcome | None:
        """Everything, in order, and cleaned up whatever happens."""
        if not self._tries.restarts:  # before another try nothing was written
            outcome_files.clear(self._base)
        receiver, sender = os.pipe()
        os.set_blocking(receiver, False)
        os.set_blocking(sender, False)
        # First of all: a signal between the two, of which only the handler here hears, would be
        # lost. The handlers do nothing: the descriptor carries the signal into the loop.
        kept_descriptor = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        kept_handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (*handled(), signal.SIGCHLD)
        }
        try:
            self._loop.watch(receiver, READ, lambda _: self._signals(receiver))
            came = self._tries.new_signals(stopped)
            # A job that is stopped already starts nothing.
            self._stopping.signal = next((number for number in came if number in STOP_SIGNALS), 0)
            self._guard(self._begin)
            self._came(came)
            self._loop.run()
        except Exception:  # noqa: BLE001  (the outermost frame: a defect of ours must not end a job without a word)
            import traceback  # only a defect of ours needs it

            self._broken(traceback.format_exc())
        finally:
            self._clean_up()
            for number, handler in kept_handlers.items():
                signal.signal(number, handler)
            with contextlib.suppress(BlockingIOError):
                # What came too late for this try is for the next one.
                self._tries.keep_signals(os.read(receiver, 4096))
            signal.set_wakeup_fd(kept_descriptor)
            os.close(receiver)
            os.close(sender)
        return self._outcome

    def _log(self, message: str) -> None:
        """One line of ours, without secrets; never blocks."""
        self._output.log(self._redactor.text(message))

    def _broken(self, trace: str) -> None:
        """A defect of the launcher: an outcome of its own kind, with the
        traceback for the report.
        """
        self._log(trace)
        self._phase = max(self._phase, Phase.ENDING)
        told, cause = ("the launcher itself failed; please report this",), trace.splitlines()[-1]
        host = self._plan.host
        self._outcome = Outcome(
            FAILED, names.EXIT_LAUNCHER, host, cause, notes=told, message=shorten(trace)
        )
        self._write_outcome(self._outcome)

    def _write_outcome(self, outcome: Outcome, seconds: float = names.KILL_LIMIT_SECONDS) -> None:
        """Write the files that say how the job ended, or how far that is known.

        The directory may be on a file system that never answers: nothing waits
        for it longer than so many seconds.
        """

        def write() -> None:
            with self._writes:  # one that was slow must not come after a later one
                outcome_files.write(
                    self._reports,
                    outcome,
                    self._redactor,
                    self._plan.mode,
                    self._environment.manifest,
                )

        try:
            look = Inspection(write)
        except RuntimeError:  # no further thread may be started
            write()
            return
        if not look.wait(seconds):
            self._log(f"cannot write below {self._reports}: the file system does not answer")
        if look.errors:
            raise look.errors[0]

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something that may be refused.

        A refusal is this host's failure, and with it the job's.
        """
        try:
            action()
        except RefusalError as refusal:
            self._report(Outcome(FAILED, refusal.status, self._plan.host, str(refusal)))

    def _clean_up_shared_memory(self, until: float = 0.0) -> None:
        line = self._tries.clean_up_shared_memory(until)
        if line:
            self._log(line)

    def _begin(self) -> None:
        self._tries.note_shared_memory()
        if self._tries.restarts:
            self._clean_up_shared_memory()
        for name in self._runtime.by_file:
            self._log(
                f"{name} is too long for the kernel:"
                f" {name}{names.FILE_SUFFIX} names a file with its value"
            )
        if self._refusal is None:
            try:
                self._guardian.start(
                    self._environment.launcher_python,
                    self._environment.launcher_directory,
                    self._runtime.path,
                )
            except OSError as error:
                self._log(
                    "nothing ends this job's processes if the"
                    f" launcher is killed: no guard: {error}"
                )
        self._heard[KIND] = self._told_of_tries
        if self._plan.ranks_by in _STARTERS:
            # Its sockets cost a plain script too much.
            from trainworks_launcher.supervise.attribution.stuck_starter import StuckStarter
            from trainworks_launcher.supervise.processes.ranks import Ranks

            ranks = Ranks(
                self._loop,
                self._runtime.path,
                self._output,
                self._prefix_of,
                self._rank_started,
                self._rank_ended,
            )
            self._running.ranks = self._verdict.ranks = self._lookout.ranks = ranks
            self._overdue = StuckStarter(
                self._loop, self._plan, self._running, self._verdict, self._starter_is_overdue
            )
            if self._plan.ranks_by == "torchrun":  # mpirun starts no rank again
                self._count_rounds()
        self._role = self._make_role()
        plan = self._plan
        if plan.control is not None and (
            plan.ranks_by == "mpirun" or (not plan.ranks_by and plan.rank < 0)
        ):
            self._serve_mpirun(self._role)
        self._role.begin()

    def _make_role(self) -> control.Role:
        plan = self._plan
        events = control.Events(
            welcome=lambda: self._guard(self._welcome),
            go=self._go,
            stop=self._stopping.from_other_host,
            restart=self._restart_ranks,
            suspect=self._suspect,
            inquire=self._inquire,
            judge=self._judge,
            finish=self._finish,
            left=self._left,
            told=self._told,
            log=self._log,
        )
        if plan.control is None:
            return control.Alone(events)
        # Only a job of several hosts needs it.
        from trainworks_launcher.supervise.control.identity import identity_of

        job = identity_of(self._environment, plan.control, plan.mode)
        secret = self._environment.job_secret
        if plan.role == "leader":
            from trainworks_launcher.supervise.control.leader import Leader

            starts = plan.ranks_by if plan.ranks_by in _STARTERS else name_of_program(plan)
            return Leader(self._loop, plan.control, plan.limits, job, secret, events, starts)
        from trainworks_launcher.supervise.control.worker import Worker

        self._log(f"joining {plan.control.leader} on port {plan.control.port}")
        return Worker(
            self._loop, plan.control, plan.limits, job, plan.member or plan.host, secret, events
        )

    def _told(self, host: str, kind: str, message: Mapping[str, Json]) -> None:
        """Another host told something that is not about the start and the end:
        to the part that knows the kind.
        """
        hear = self._heard.get(kind)
        if hear is not None:
            hear(host, message)

    def _serve_mpirun(self, role: control.Role) -> None:
        """mpirun on the leader starts its daemons on the other hosts through the launchers.

        It is ours, or one that the program of the leader calls. Only ours has
        ranks that report to the launchers.
        """
        # Only mpirun on several hosts needs it.
        from trainworks_launcher.supervise.processes import mpirun_agents

        ours, ranks = self._plan.ranks_by == "mpirun", self._running.ranks
        leads = bool(self._plan.argv) if ours else self._plan.role == "leader"
        if self._refusal is None and (leads or not ours):
            self._agents = mpirun_agents.Agents(
                self._loop,
                self._runtime.path,
                lambda: role.others() if self._running.is_active else {},
                role.tell,
                wait=not ours,
                copied=None if leads else self._wait_as_copy,
            )
        if leads and self._agents is not None:
            self._heard[mpirun_agents.LOST] = self._lost_daemon
            self._heard[mpirun_agents.ENDED] = self._agents.ended
        else:
            self._daemons = mpirun_agents.Daemons(
                self._start_daemon,
                has_ranks=lambda: ranks is not None and bool(ranks.all),
                may_start_ranks=lambda: self._orphans.has_others(self._own_pids()),
                tell=role.tell,
            )
            self._heard[mpirun_agents.START] = self._asked_for_daemon

    def _wait_as_copy(self) -> None:
        """mpirun of this host's program asks for other hosts, as the first
        host's does: that one starts the ranks.

        The program waits in its mpirun until the job ends, and ends as the first host's does.
        """
        if self._is_copy or self._phase is not Phase.RUNNING or self._stopping.signal:
            return
        self._is_copy = True
        leader = self._plan.control.leader if self._plan.control is not None else ""
        self._log(
            f"mpirun starts its ranks from host {leader} alone:"
            " the program here waits, and ends as it does there"
        )
        self._report(Outcome(SUCCEEDED, 0, self._plan.host))

    def _asked_for_daemon(self, host: str, message: Mapping[str, Json]) -> None:
        """mpirun on the leader asks for a daemon, perhaps before this host
        knows where the ranks go on.
        """
        if self._is_looking:
            self._asked.append((host, message))
        elif self._daemons is not None:
            self._daemons.start(host, message)

    def _start_daemon(self, argv: Sequence[str]) -> Child | None:
        """Start what mpirun on the leader asks for, while the ranks run or start."""
        if self._phase is not Phase.RUNNING or self._stopping.signal:
            return None
        child = Child(
            argv, self._environment_of(self._plan.argv), self._plan.cwd, self._output, b""
        )
        self._guardian.tell(child.pid)
        return child

    def _lost_daemon(self, host: str, message: Mapping[str, Json]) -> None:
        """A daemon ended before it had a rank.

        It may be mpirun that has failed, and ends: then that is the cause.
        """
        from trainworks_launcher.contract.json_values import number
        from trainworks_launcher.supervise.control.messages import words

        cause = f"mpirun's daemon on host {host} ended before it had started a rank"
        cause = f"{cause}: {describe_status(number(message.get('status')))}"
        lost = Outcome(
            FAILED, names.EXIT_HOSTS, host, cause, message=words(message.get("text")).strip()
        )

        def report() -> None:
            if self._running.is_active and not self._stopping.signal:
                self._report(lost)

        if message.get("certain") is True:
            report()
        else:
            self._loop.after(DAEMON_SECONDS, report)

    # --- preparation ------------------------------------------------------------------------------
    def _welcome(self) -> None:
        """The control channel stands: prepare this host, while the others prepare theirs."""
        again = self._phase > Phase.JOINING
        self._phase = max(self._phase, Phase.PREPARING)
        if self._refusal is not None:
            self._report(self._refusal)
            return
        self._compare_clocks()
        self._try_data_path()
        if self._plan.restarts:
            self._tell(KIND, **self._tries.fields())
        if not self._preparation.check():
            return
        if self._tries.prepared is not None and not again:
            self._prepared(self._tries.prepared)
        elif not again:
            # Else the leader started anew: what is prepared, or is being prepared, stays.
            self._preparation.begin()

    def _compare_clocks(self) -> None:
        """Ask the leader for the time, where hosts are checked."""
        if self._plan.checks is None or self._plan.control is None or self._role is None:
            return
        from trainworks_launcher.supervise.control.clock_offset import KIND, ClockComparison

        clocks = ClockComparison(
            self._role, self._plan.host, self._plan.role == "leader", self._log
        )
        self._heard[KIND] = clocks.receive
        clocks.ask()

    def _prepared(self, plan: NodePlan) -> None:
        """This host is prepared, for a plan that knows the code: say so."""
        self._plan = self._tries.prepared = plan
        if plan.shell is not None:
            # The other hosts run sshd, with keys that the platform has mounted.
            from trainworks_launcher.supervise.ssh import mounted_keys

            program = f"{self._environment.launcher_directory}/programs/connect.py"
            connect = (self._environment.launcher_python, "-I", program, f"{plan.limits.join:g}")
            mounted_keys.write_client_files(
                self._runtime.path, plan.shell.ssh, mounted_keys.required(), connect
            )
        self._is_prepared = True
        self._maybe_ready()

    def _maybe_ready(self) -> None:
        """This host is ready once it is prepared, and has tried the way to the other hosts."""
        tried = self._data_path is None or self._data_path.over
        if not self._is_prepared or not tried or self._role is None or self._is_waiting:
            return
        pause = self._tries.pause if self._plan.role != "worker" else 0.0
        if not pause:
            self._role.ready()
            return
        # The leader is not ready, so no host starts; all have joined, and a
        # stop signal reaches them at once.
        self._is_waiting, self._tries.pause = True, 0.0
        self._log(f"the last try got no step further: the next one starts in {pause:g} s")
        self._loop.after(pause, self._role.ready)

    def _try_data_path(self) -> None:
        """Try the ways that the ranks will take to the other hosts, while this host is prepared."""
        plan, role = self._plan, self._role
        if plan.control is None or plan.shell is not None or role is None:
            return
        from trainworks_launcher.supervise.control import data_path

        if self._data_path is None:
            variables = {**self._environment.variables, **plan.env}
            port = variables.get(names.MASTER_PORT_VARIABLE, "")
            needs_path = plan.mode not in _INDEPENDENT
            own = data_path.LocalHost(
                host=plan.member or plan.host,
                place=data_path.place_of(variables, self._environment.devices),
                store=(
                    data_path.Store(int(port), plan.mode in _STORE_MODES)
                    if port.isdecimal()
                    else None
                ),
                needs_path=needs_path,
                may_lose_hosts=plan.control.minimum_hosts > 0,
            )
            events = data_path.Events(
                done=self._maybe_ready,
                warn=lambda sentence: self._log(f"warning: {sentence}"),
                fail=lambda cause: self._report(
                    Outcome(FAILED, names.EXIT_HOSTS, plan.host, cause)
                ),
            )
            self._data_path = data_path.DataPath(self._loop, own, plan.control.hosts, role, events)
            self._heard[data_path.KIND] = self._data_path.receive
        self._data_path.begin()

    # --- running ----------------------------------------------------------------------------------
    def _go(self) -> None:
        """Start the command.

        A host without one, whose daemons may still fail, waits for the job's outcome.
        """
        if self._phase >= Phase.ENDING or self._stopping.signal:
            return
        self._phase = Phase.RUNNING
        if self._data_path is not None:
            self._data_path.close()  # the ranks' store has the port from now on
        self._verdict.started_at = time.time()
        if self._tries.restarts:
            self._look_for_checkpoint()
        else:
            self._start_program()

    def _look_for_checkpoint(self) -> None:
        """Look where this try goes on.

        A slow file system must not let it begin anew: it waits, the loop goes on.
        """
        self._is_looking = True
        directory = self._plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "")
        text = (
            f"the newest checkpoint in {directory} cannot be found: the file system does not answer"
        )

        def remind() -> None:
            if self._is_looking:
                self._log(f"{text}; this host waits for it")

        def found(checkpoint: tuple[str, float] | None) -> None:
            if not self._is_looking:
                return
            self._is_looking = False
            if checkpoint is None:
                self._report(Outcome(FAILED, names.EXIT_PREPARATION, self._plan.host, text))
                return
            changed, said = self._tries.go_on(*checkpoint)
            self._runtime.change(changed)
            self._log(said)
            self._start_program()

        self._loop.after(_REMIND_SECONDS, remind)
        self._loop.look(self._tries.find, self._plan.limits.prepare, found)

    def _stop_begun(self) -> None:
        """The job is being stopped.

        If this host was looking for its checkpoint, nothing of it runs yet.
        """
        self._lookout.end()
        if self._is_looking:
            self._is_looking = False
            stopped = Outcome(
                STOPPED, 0, self._plan.host, "stopped before the program was started again"
            )
            self._loop.after(
                0.0, lambda: self._report(stopped._replace(status=128 + self._stopping.signal))
            )

    def _start_program(self) -> None:
        """Everything is known: start the command of this host."""
        if self._phase is not Phase.RUNNING or self._stopping.signal:
            return
        if self._plan.ranks_by in _STARTERS:
            self._runtime.write_rank_environment(self._plan.cwd, self._plan.hidden_from_ranks)
        asked, self._asked = self._asked, []
        for host, message in asked:
            self._asked_for_daemon(host, message)
        if self._role is not None:
            self._lookout.begin(self._role)
        self._loop.after(0.0, self._begin_account)
        try:
            self._auxiliaries.start()
        except OSError as error:
            text = f"cannot start the process beside the program: {error}"
            self._report(Outcome(FAILED, names.EXIT_PREPARATION, self._plan.host, text))
            return
        if not self._plan.argv:
            self._report(Outcome(SUCCEEDED, 0, self._plan.host))
            return
        self._start(self._plan.argv, self._plan.cwd, self._command_ended, names.EXIT_PREPARATION)

    def _begin_account(self) -> None:
        """What the job takes is noted from now on."""
        if self._environment.variables.get(names.SUMMARY_VARIABLE, "").strip() == "off":
            return
        # The program has the first milliseconds.
        from trainworks_launcher.supervise import job_summary

        member = self._plan.member or self._plan.host
        hosts = self._plan.control.hosts if self._plan.control is not None else (member,)
        self._account = job_summary.JobSummary(self._loop, member, hosts, self._log)
        self._heard[job_summary.MESSAGE] = self._account.receive
        devices, launcher = self._environment.devices, self._environment.launcher_directory
        program = (self._environment.launcher_python, "-I", f"{launcher}/programs/gpu_use.py")
        if devices.gpus > 0 and devices.visible_gpus != ():
            self._account.watch_gpus(program, devices.visible_gpus or ())

    def _start(
        self, argv: Sequence[str], cwd: str, when_ended: Callable[[int], None], status: int
    ) -> None:
        self._when_ended = when_ended
        try:
            raw = (
                self._running.ranks is None and not self._plan.auxiliaries
            ) or argv != self._plan.argv
            prefix = None if raw else b""
            if self._plan.rank >= 0 and argv == self._plan.argv:
                prefix = self._prefix_of(self._plan.rank)
            command = Child(argv, self._environment_of(argv), cwd, self._output, prefix)
            self._running.command = self._lookout.command = command
            self._guardian.tell(command.pid)
        except OSError as error:
            text = (
                f"cannot start {argv[0]} in {cwd}: {processes.why_not_started(argv[0], cwd, error)}"
            )
            self._report(Outcome(FAILED, status, self._plan.host, text))

    def _start_auxiliary(self, row: Auxiliary) -> Child:
        self._log(f"starting the {row.name}")
        prefix = f"[{row.name}] ".encode()
        child = Child(
            row.argv, {**self._runtime.env, **row.env}, self._plan.cwd, self._output, prefix
        )
        self._guardian.tell(child.pid)
        return child

    def _environment_of(self, argv: Sequence[str]) -> Mapping[str, str]:
        """Return the environment of a command.

        mpirun's own files go to the runtime directory and are removed with it. What a killed job
        leaves in /tmp makes the next one fail if process ids repeat, as they do in containers. The
        ranks keep the user's TMPDIR (rank.py).
        """
        if argv != self._plan.argv:
            return self._runtime.env
        hidden = self._plan.hidden
        seen = {
            name: value for name, value in self._runtime.env.items() if not name.startswith(hidden)
        }
        if self._plan.ranks_by != "mpirun":
            return seen
        # mpirun writes the command of its daemons in the words of this shell
        # where the user has none: sh runs it.
        return {**seen, "SHELL": "/bin/sh", "TMPDIR": str(self._runtime.path)}

    def _command_ended(self, code: int) -> None:
        if self._is_copy and self._phase < Phase.ENDING:
            return  # the first host's copy decides
        if self._stopping.signal:
            if code == 0:
                text = "stopped by a signal; the program ended with status 0"
                self._report_well(Outcome(STOPPED, 0, self._plan.host, text))
            else:
                self._report_failure(code)
            return
        if code == 0 and not self._verdict.lost_daemon(self._running.tail):
            died_of = self._verdict.unheard(self._running.pid)
            if died_of:
                advice = "in a shell, `set -o pipefail` lets a pipe fail with any part of it"
                self._log(
                    f"warning: the status is 0, and the last Python died of {died_of}; {advice}"
                )
            self._report_well(Outcome(SUCCEEDED, 0, self._plan.host, ""))
            return
        seconds = self._verdict.seconds_for_daemon(self._of_command(code))
        if seconds:
            self._loop.after(seconds, lambda: self._report_failure(code))
        else:
            self._report_failure(code)

    def _report_well(self, outcome: Outcome) -> None:
        """Report an end with status 0."""
        self._report(outcome)
        if self._phase < Phase.ENDING:
            self._log("this host has finished; it waits for the others")

    def _of_command(self, code: int) -> Outcome:
        """Return the end of the command, by what is known of its ranks now."""
        name, running = name_of_program(self._plan), self._running
        return self._verdict.of_command(
            name, code, running.tail, self._stopping.signal, running.pid
        )

    def _report_failure(self, code: int) -> None:
        """The command did not end with status 0."""
        if self._phase >= Phase.ENDING:
            return
        self._reported = outcome = self._of_command(code)
        self._reported_code = code
        if (
            self._running.ranks is None
            and self._plan.control is not None
            and not self._stopping.signal
        ):
            running = self._running
            self._tell_of(self._verdict.of_program(outcome, code, running.tail, running.pid))
        self._report(outcome)

    def _starter_is_overdue(self, why: str) -> None:
        """It outlives its ranks: what the hosts have seen of them is the
        outcome, and with that it is ended.
        """
        self._log(why)
        self._report(self._verdict.of_ranks(self._running.tail))

    # --- ranks ------------------------------------------------------------------------------------
    def _prefix_of(self, rank: int) -> bytes:
        """Return what the lines of a rank start with."""
        return (self._prefix % rank).encode() if self._prefix else b""

    def _count_rounds(self) -> None:
        """Torchrun may start the ranks again; the leader decides when that leads nowhere."""
        from trainworks_launcher.supervise.attribution import crash_loop
        from trainworks_launcher.supervise.processes.attempts import Attempts

        given, plan = self._environment.variables, self._plan
        heartbeat = given.get(names.HEARTBEAT_FILE_VARIABLE, "").strip()
        checkpoints = plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "")
        self._rounds = Attempts(checkpoints, str(Path(plan.cwd, heartbeat)) if heartbeat else "")
        if given.get(names.GIVE_UP_VARIABLE, "").strip() != "off":
            self._giving_up = crash_loop.CrashLoop(
                plan.member or plan.host,
                leads=plan.role != "worker",
                tell=lambda rounds: self._tell(crash_loop.MESSAGE, rounds=rounds),
                end=self._report,
                log=self._log,
                known=self._verdict.first,
            )
            self._heard[crash_loop.MESSAGE] = self._giving_up.told

    def _tell(self, kind: str, **fields: Json) -> None:
        if self._role is not None:
            self._role.tell(kind, "", **fields)

    def _rank_started(self, rank: Rank) -> None:
        """A rank that comes after a stop signal or the job's end: torchrun tries again, or mpirun
        was still starting. Both are told to give up.
        """
        now = time.time()
        self._rank_moved()
        further = self._rounds.started(rank) if self._rounds is not None else None
        if further is not None:
            failure = self._verdict.forget()
            self._clean_up_shared_memory(until=now)
            if (
                self._giving_up is not None
                and self._phase < Phase.ENDING
                and not self._stopping.signal
            ):
                self._giving_up.judged(further, failure)
        if self._stopping.signal or self._phase >= Phase.ENDING:
            processes.send(rank.pid, signal.SIGTERM)
            if self._running.command is not None:
                self._running.command.signal(signal.SIGTERM)

    def _rank_moved(self) -> None:
        if self._overdue is not None:
            self._overdue.moved(self._rounds.restarts if self._rounds is not None else 0)

    def _rank_ended(self, rank: Rank) -> None:
        """The end of a rank was seen, mostly before the command that started it
        says anything: tell the leader.
        """
        ranks = self._running.ranks
        if self._stopping.signal:
            self._stopping.rank_ended(rank)
        if (
            self._stopping.signal
            or self._phase >= Phase.ENDING
            or ranks is None
            or self._role is None
        ):
            return
        ranks.take()
        self._tell_of(self._verdict.of_rank(rank))
        self._rank_moved()
        if (
            rank.status is None
            and self._plan.ranks_by == "torchrun"
            and self._running.command is not None
        ):
            self._ask_torchrun(rank, self._running.command.tail)

    def _tell_of(self, suspect: Suspect) -> None:
        """Tell the leader what is known of a rank of this host, and keep it:
        the leader may be lost.
        """
        if self._plan.role == "worker":
            self._verdict.add(suspect)
        if self._role is not None:
            self._role.suspect(suspect)

    def _inquire(self, outcome: Outcome, then: Callable[[], None]) -> None:
        """Some host has failed: ask all of them what their ranks have noted,
        where ranks have run.
        """
        if self._phase is not Phase.RUNNING or not outcome.place or self._role is None:
            then()
        else:
            self._inquiry.begin(self._role.others(), then)

    def _look_for_records(self) -> int:
        """Tell of what ranks have noted that still run.

        Return how many may still note something.
        """
        if self._phase is not Phase.RUNNING or self._stopping.signal:
            return 0
        ranks, running = self._running.ranks, self._running
        if ranks is not None:
            ranks.take_ends()
            ranks.take()
            alive = [rank for rank in ranks.all if rank.is_running()]
            suspects = [(rank.pid, self._verdict.of_running(rank)) for rank in alive]
        elif running.is_active and not self._is_copy:
            suspects = [(running.pid, self._verdict.of_running_program(running.tail, running.pid))]
        else:
            return 0
        return sum(self._tell_of_running(pid, suspect) for pid, suspect in suspects)

    def _tell_of_running(self, pid: int, suspect: Suspect | None) -> bool:
        """Tell once of a process that runs and has noted something.

        Return whether it may still note more.
        """
        if suspect is None:
            return True
        if pid not in self._noted_by:
            self._noted_by.add(pid)
            self._tell_of(suspect)
        return suspect.kind is Kind.LEFT  # its status is not known before its end

    def _ask_torchrun(self, rank: Rank, tail: output.Tail) -> None:
        """Torchrun took the status of a rank before this launcher saw it: it
        logs it, long before it ends itself.
        """
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.starter_reports import torchrun_status

        rank.status = torchrun_status(tail.read(), rank.pid)
        if rank.status is not None:
            self._rank_ended(rank)
        elif self._phase < Phase.ENDING and time.monotonic() < rank.ended_at + _LOG_LIMIT_SECONDS:
            self._loop.after(_LOG_SECONDS, lambda: self._ask_torchrun(rank, tail))

    def _told_to_hold(self, _: str, __: Mapping[str, Json]) -> None:
        """A rank of another host has ended badly in a stop."""
        if self._plan.role == "leader":
            self._tell(HOLD)
        self._stopping.hold()

    def _told_of_no_more_time(self, _: str, message: Mapping[str, Json]) -> None:
        """A person, or the loss of the host that was stopped, ends the wait for the ranks."""
        of_all = message.get("all") is True
        if self._plan.role == "leader":
            self._tell(NO_MORE_TIME, all=of_all)
        self._stopping.no_more_time(of_all=of_all)

    def _suspect(self, suspect: Suspect) -> None:
        """Some host says that a rank of it has ended."""
        self._verdict.add(suspect)
        self._rank_moved()
        self._inquiry.moved()

    def _told_of_tries(self, host: str, message: Mapping[str, Json]) -> None:
        """Another host knows of tries of this job.

        The leader answers before it lets anything start.
        """
        new = self._tries.learn(message)
        if self._plan.role == "leader" and self._role is not None:
            self._role.tell(KIND, "" if new else host, **self._tries.fields())

    def _judge(self, outcome: Outcome) -> Outcome:
        """The last word on the end of a try, and with it whether there is another one."""
        if outcome is self._reported and not self._stopping.signal:
            # Judge again, with messages that came from other hosts since.
            outcome = self._of_command(self._reported_code)
        judged = self._verdict.judge(outcome)
        where = self._redactor.text(self._lookout.rendezvous_state)
        if where and judged.kind != SUCCEEDED:
            self._log(where)
            judged = judged._replace(notes=(*judged.notes, where))
        return (
            judged
            if self._stopping.signal
            else self._tries.judge(judged, started=self._phase >= Phase.RUNNING)
        )

    def _report(self, outcome: Outcome) -> None:
        """This host's end, to the role that decides the job's."""
        if self._role is not None:
            self._role.ended(outcome)
        else:
            self._finish(outcome)

    # --- signals ----------------------------------------------------------------------------------
    def _signals(self, receiver: int) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(receiver, 4096)
            if signal.SIGCHLD in numbers:
                self._reap()
            self._came(numbers)

    def _came(self, numbers: Sequence[int]) -> None:
        """Signals to this container: stops, and those that are for the ranks."""
        for number in STOP_SIGNALS:
            if number in numbers:
                if self._role is not None:
                    self._role.name_missing()
                self._stopping.from_platform(number)
                if self._role is not None:
                    self._role.stopping()
        for number in sorted(PASSED_ON.intersection(numbers)):
            self._passing_on.came(number)

    def _reap(self) -> None:
        """Note our own child's end.

        As PID 1, also take the status of every orphan that became ours.
        """
        command = self._running.command
        ended = command is not None and command.has_just_ended()
        for (
            row,
            child,
        ) in self._auxiliaries.failures():  # the programs that it served would wait for it for ever
            self._report(self._verdict.of_command(f"the {row.name}", child.returncode, child.tail))
        if self._daemons is not None:
            self._daemons.reap()
        orphans = self._orphans.reap(self._own_pids())
        if self._daemons is not None:
            self._daemons.orphans_ended(orphans)
        if command is not None and ended:
            command.drain()
            if self._running.ranks is not None:
                self._running.ranks.take_ends()
                self._running.ranks.drain(_DRAIN_SECONDS)
            self._guard(lambda: self._when_ended(command.returncode))
            self._leave_if_over()

    def _own_pids(self) -> tuple[int, ...]:
        """Return the children of this process whose status is taken elsewhere."""
        command = self._running.command
        own = [child.pid for child in (command,) if child is not None]
        own += self._account.pids if self._account is not None else ()
        own += self._guardian.pids
        own += self._daemons.pids if self._daemons is not None else ()
        return (*own, *self._auxiliaries.pids)

    def _restart_ranks(self) -> None:
        """Another host is lost and the job goes on: end the ranks of this host.

        They may wait for the lost ones until their own time-outs. torchrun starts new ones, in a
        group without that host.
        """
        if self._phase < Phase.ENDING and not self._stopping.signal:
            if self._rounds is not None:
                self._rounds.excuse()
            if self._giving_up is not None:
                self._giving_up.begin_anew()
            self._running.send_to_ranks(signal.SIGKILL)

    # --- the end ----------------------------------------------------------------------------------
    def _finish(self, outcome: Outcome) -> None:
        """The job's outcome is known: end what still runs, then leave together with the others."""
        if self._phase >= Phase.ENDING:
            return
        # A host that refuses, and reaches no other host, still has its own reason.
        self._outcome = (
            self._refusal if self._refusal is not None and self._phase is Phase.JOINING else outcome
        )
        if not self._outcome.again:
            self._outcome = self._tries.of_job(self._outcome)
        self._phase = Phase.ENDING
        asked = self._daemons is not None and self._daemons.were_requested
        if self._is_copy and not asked and self._outcome.kind == SUCCEEDED:
            self._log(
                "warning: mpirun was called on this host alone, not on the first one: it has"
                " started nothing"
            )
        self._lookout.end()
        command = self._running.command
        if command is not None and command.running and self._stopping.leaves_time:
            # The leader is lost while this host's own platform stops it: its
            # ranks save all the same.
            self._outcome = self._stopping.instead_of(self._outcome)
        elif command is not None and command.running:
            self._running.send(signal.SIGTERM)
            if self._plan.ranks_by:
                command.signal(signal.SIGTERM)
            self._loop.after(names.FAILURE_GRACE_SECONDS, self._stopping.kill)
        self._leave_if_over()

    def _abandoned(self) -> None:
        """What cannot be ended here must not meet ranks of another try."""
        if self._outcome is not None:
            self._outcome = self._outcome._replace(again=False)
        self._leave_if_over()

    def _leave_if_over(self) -> None:
        """Leave, once, when the outcome is known and the command has ended."""
        if self._phase is not Phase.ENDING or self._running.is_active:
            return
        self._phase = Phase.LEAVING
        self._auxiliaries.end()
        if self._outcome is not None and not self._outcome.again:
            self._write_outcome(self._outcome)
        if self._account is not None:
            self._tell_figures(self._account)
        if self._role is not None:
            self._role.leave()
        else:
            self._loop.stop()

    def _tell_figures(self, account: JobSummary) -> None:
        """Nothing runs here any more: tell the leader what this host took."""
        from trainworks_launcher.supervise.job_summary import MESSAGE

        if self._running.ranks is None:
            tails = [self._running.tail]
        else:
            tails = [rank.tail for rank in self._running.ranks.all]
        restarts = self._tries.restarts
        if self._rounds is not None:
            restarts += self._rounds.restarts
        fields = account.close(tails, restarts, self._lookout.idle)
        self._tell(MESSAGE, **fields)

    def _left(self) -> None:
        """Every host knows the outcome: the leader has the figures of all of them."""
        again = self._outcome is not None and self._outcome.again
        if self._account is not None and self._plan.role != "worker" and not again:
            self._account.write()
        self._loop.stop()

    def _clean_up(self) -> None:
        """End every process and remove every file that the run made."""
        command = self._running.command
        if command is not None and command.running:
            command.kill()
        self._auxiliaries.end()
        self._running.send_to_ranks(signal.SIGKILL)
        if self._agents is not None:
            self._agents.close()
        if self._daemons is not None:
            self._daemons.end()
        if self._data_path is not None:
            self._data_path.close()
        if self._role is not None:
            self._role.close()
        outcome = self._outcome or Outcome(
            FAILED, names.EXIT_LAUNCHER, self._plan.host, "no outcome is known"
        )
        limit = names.KILL_LIMIT_SECONDS if outcome.again else processes.REAP_SECONDS
        left = self._orphans.end(self._guardian.pids, limit)
        self._guardian.end()
        if self._running.ranks is not None:
            self._running.ranks.close()
        self._loop.close()
        self._runtime.remove()
        if not self._verdict.started_at:
            directories.take_back(self._made)
        if outcome.again and left:
            self._log(
                f"not starting again: processes {', '.join(map(str, left))} do not end after KILL"
            )
            self._outcome = outcome = self._tries.of_job(outcome._replace(again=False))
        if self._verdict.full:
            self._log(self._verdict.full)
        self._log(
            self._tries.count(outcome, self._verdict.started_at)
            if outcome.again
            else last_words(outcome)
        )
        self._output.close()
