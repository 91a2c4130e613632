"""Runs one host's plan with real processes, and ends it truthfully.

One thread waits for everything at once: signals, children, the control connection, deadlines. The
order of a job is prepare (unpack, install) on every host at once, then all start together, then all
end together with one outcome.

PID 1 duties: orphans are reaped, stop signals are handed on. A stop signal goes to the ranks
themselves, which have all the time that the platform leaves (``shutdown``). What we start is in a
session of its own and is ended with it.

``Supervisor`` is what every job needs. The rest are parts, which it tells what happens (``part``).
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Callable, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.inspection import LOOK_SECONDS, run_in_time
from trainworks_launcher.contract.stop_signals import PASSED_ON, STOP_SIGNALS
from trainworks_launcher.environment import directories
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.plan.plan import Control, NodePlan
from trainworks_launcher.supervise import control, hooks
from trainworks_launcher.supervise.attempt import STARTERS, Attempt
from trainworks_launcher.supervise.attribution import outcome_files
from trainworks_launcher.supervise.attribution.failure import last_words, name_of_program
from trainworks_launcher.supervise.event_loop import READ
from trainworks_launcher.supervise.outcome.outcome import FAILED, SUCCEEDED, Outcome, shorten
from trainworks_launcher.supervise.phase import Phase
from trainworks_launcher.supervise.preparation.run import Preparation
from trainworks_launcher.supervise.processes import output, processes
from trainworks_launcher.supervise.processes.job_directory import JobDirectory, NoJobDirectory
from trainworks_launcher.supervise.program import Program
from trainworks_launcher.supervise.restart import AttemptHistory
from trainworks_launcher.supervise.shutdown import Events, Stopping
from trainworks_launcher.supervise.signal_forwarding import SignalForwarding
from trainworks_launcher.supervise.signal_pipe import SignalPipe

if TYPE_CHECKING:
    from trainworks_launcher.supervise.outcome.evidence import Suspect
    from trainworks_launcher.supervise.part import Part
    from trainworks_launcher.supervise.processes.ranks import Rank

_DRAIN_SECONDS = 0.7
"""Limit of the wait for the rest of the ranks' output, after the end of the command."""


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
            two attempts are added.

    Returns:
        The exit status.
    """
    heartbeat = environment.variables.get(names.HEARTBEAT_FILE_VARIABLE, "").strip()
    history = AttemptHistory(plan, heartbeat)
    while True:
        # Each turn is one attempt. An attempt without an outcome has met a defect of the launcher.
        outcome = _supervisor_of(plan, environment, refusal, history).run(stopped)
        if outcome is None:
            return names.EXIT_LAUNCHER
        if not outcome.again:
            return outcome.status


def _supervisor_of(
    plan: NodePlan, environment: Environment, refusal: Outcome | None, history: AttemptHistory
) -> Supervisor:
    """Make the directories and the output of an attempt, and its supervisor.

    If they cannot be made, the reason is logged, and the attempt is one that only reports the
    refusal to the other hosts.

    Args:
        plan: What this host does.
        environment: What was read on this host.
        refusal: Why this host cannot take part; None if it can.
        history: The earlier attempts of the job.
    """
    runtime: JobDirectory | NoJobDirectory = NoJobDirectory()
    written: output.Output = output.SynchronousOutput()
    made: tuple[str, ...] = ()
    try:
        inherited = {
            name: value
            for name, value in environment.variables.items()
            if name not in plan.left_out
        }
        planned = {**plan.env, **hooks.variables(plan, environment)}
        has_own_ranks = bool(plan.ranks_by) and plan.shell is None
        runtime = JobDirectory(inherited, planned, has_own_ranks)
        if refusal is None:
            made = _make_directories(environment, history)
        written = output.Output()
    except RefusalError as refused:
        runtime.remove()
        directories.take_back(made)
        output.log(str(refused))
        runtime, made = NoJobDirectory(), ()
        refusal = refusal or Outcome(FAILED, refused.status, plan.host, str(refused))
        # The other hosts need not come before this host gives up: it starts nothing.
        limits = plan.limits._replace(join=min(plan.limits.join, names.REFUSAL_LIMIT_SECONDS))
        plan = plan._replace(argv=(), ranks_by="", auxiliaries=(), shell=None, limits=limits)
    attempt = Attempt(plan, environment, history, runtime, written)
    return Supervisor(attempt, refusal, made)


def _make_directories(environment: Environment, history: AttemptHistory) -> tuple[str, ...]:
    """Make the directories of the job, and return the paths of those that did not exist.

    Raises:
        RefusalError: The first attempt cannot have a directory.
    """
    if not history.restarts:
        return directories.make(environment.places, environment.home)
    # For a later attempt they exist, and their file system may not answer any more.
    return run_in_time(lambda: directories.make(environment.places, environment.home), ())


class Supervisor:
    """One attempt from its start to its end. Every method runs in the loop's thread."""

    def __init__(self, attempt: Attempt, refusal: Outcome | None, made: Sequence[str]) -> None:
        """Start nothing before ``run``.

        Args:
            attempt: The state of the attempt.
            refusal: Why this host cannot take part; None if it can.
            made: Directories that were made for the job, and are removed if nothing is started.
        """
        self._attempt = attempt
        self._refusal = refusal
        self._made = made
        environment = attempt.environment
        # A refusal leaves no files in a directory in which its report is not expected.
        reports = environment.output if refusal is None else environment.refusals
        self._writer = outcome_files.OutcomeWriter(
            reports, attempt.redactor, environment.manifest, attempt.log
        )
        self._events = control.Events(
            welcome=self._connected,
            go=self._go,
            stop=self._stop,
            restart=self._host_lost,
            suspect=self._suspected,
            inquire=_ask_no_other_host,
            judge=self._judge,
            finish=self._finish,
            left=self._left,
            told=attempt.told,
            log=attempt.log,
        )
        attempt.role = control.Alone(self._events)
        self._stopping = Stopping(
            attempt, Events(saving=self._write_early_outcome, abandoned=self._abandoned)
        )
        self._forwarding = SignalForwarding(attempt)
        self._preparation = Preparation(attempt, done=self._report_if_ready)
        self._program = Program(attempt)
        self._is_pausing = False

    # --- the attempt itself -----------------------------------------------------------------------
    def run(self, stopped: Sequence[int]) -> Outcome | None:
        """Run the attempt from its start to its end, and clean up, also after a defect.

        Blocks until then. Replaces the signal handlers of this process for that time. Nothing is
        raised: a defect is logged, and becomes the outcome.

        Args:
            stopped: Signals that came before this process had handlers, as numbers.

        Returns:
            The outcome of the attempt; None if it is not known.
        """
        attempt = self._attempt
        # A later attempt has no files: an outcome that begins another attempt is not written.
        if not attempt.history.restarts:
            outcome_files.clear(attempt.environment.output)
        signals = SignalPipe()
        try:
            attempt.loop.watch(signals.descriptor, READ, lambda _: self._signalled(signals.read()))
            numbers = attempt.history.new_signals(stopped)
            # A job that is stopped already starts nothing.
            stops = [number for number in numbers if number in STOP_SIGNALS]
            attempt.stop_signal = stops[0] if stops else 0
            self._begin()
            self._pass_on(numbers)
            attempt.loop.run()
        except Exception:  # noqa: BLE001  (the outermost frame: a defect of ours must not end a job without a word)
            import traceback  # only a defect of ours needs it

            self._report_defect(traceback.format_exc())
        finally:
            self._clean_up()
            # Signals that came too late for this attempt are for the next one.
            attempt.history.keep_signals(signals.close())
        return attempt.outcome

    def _report_defect(self, trace: str) -> None:
        """End the attempt because of a defect of the launcher: log and write the traceback.

        The outcome has the status ``names.EXIT_LAUNCHER``. The other hosts see this host as lost.

        Args:
            trace: The traceback, as ``traceback.format_exc`` returns it.
        """
        attempt = self._attempt
        attempt.log(trace)
        attempt.phase = max(attempt.phase, Phase.ENDING)
        notes = ("the launcher itself failed; please report this",)
        cause = trace.splitlines()[-1]
        host = attempt.plan.host
        attempt.outcome = Outcome(
            FAILED, names.EXIT_LAUNCHER, host, cause, notes=notes, message=shorten(trace)
        )
        self._writer.write(attempt.outcome, attempt.plan.mode, names.KILL_LIMIT_SECONDS)

    def _write_early_outcome(self, outcome: Outcome) -> None:
        """Write the outcome while the ranks still save: the platform may end this host first."""
        self._writer.write(outcome, self._attempt.plan.mode, LOOK_SECONDS)

    # --- before the program -----------------------------------------------------------------------
    def _begin(self) -> None:
        """Start the guard, make the parts, and open the control channel.

        The preparation follows when the channel is open (``_connected``). A refusal is reported as
        this host's failure.
        """
        attempt = self._attempt
        attempt.history.note_shared_memory()
        if attempt.history.restarts:
            attempt.clean_up_shared_memory()
        for name in attempt.runtime.by_file:
            attempt.log(
                f"{name} is too long for the kernel:"
                f" {name}{names.FILE_SUFFIX} names a file with its value"
            )
        if self._refusal is None:
            self._start_guard()
        try:
            attempt.parts += self._make_parts()
            if attempt.plan.control is not None:
                self._connect(attempt.plan.control)
            attempt.role.begin()
        except RefusalError as refusal:
            attempt.refuse(refusal)

    def _start_guard(self) -> None:
        """Start the guard of this host's processes; log a warning if that fails."""
        environment = self._attempt.environment
        try:
            self._attempt.guardian.start(
                environment.launcher_python,
                environment.launcher_directory,
                self._attempt.runtime.path,
            )
        except OSError as error:
            self._attempt.log(
                f"nothing ends this job's processes if the launcher is killed: no guard: {error}"
            )

    def _make_parts(self) -> list[Part]:
        """Return the parts that this job needs, in order. The code of other parts is not loaded."""
        attempt, plan = self._attempt, self._attempt.plan
        parts: list[Part] = []
        if plan.ranks_by in STARTERS:
            from trainworks_launcher.supervise.parts.rank_monitor import RankMonitor

            parts.append(RankMonitor(attempt, self._rank_started, self._rank_ended))
        if plan.ranks_by == "torchrun":
            from trainworks_launcher.supervise.parts import rank_restarts

            parts.append(rank_restarts.RankRestarts(attempt))
            variables = attempt.environment.variables
            if variables.get(names.GIVE_UP_VARIABLE, "").strip() != "off":
                parts.append(rank_restarts.CrashLoopDetection(attempt))
        if plan.control is not None:
            parts += self._make_parts_for_several_hosts(plan, plan.control)
        if plan.restarts or plan.control is not None:
            from trainworks_launcher.supervise.parts.restarts import Restarts

            parts.append(Restarts(attempt, self._program.start))
        if plan.limits.hang:
            from trainworks_launcher.supervise.parts.hang_detection import HangDetection

            parts.append(HangDetection(attempt))
        if plan.auxiliaries:
            from trainworks_launcher.supervise.parts.sidecars import SidecarProcesses

            parts.append(SidecarProcesses(attempt))
        return parts

    def _make_parts_for_several_hosts(self, plan: NodePlan, several: Control) -> list[Part]:
        """Return the parts that only a job of several hosts needs.

        Args:
            plan: The plan of this host.
            several: Its control channel.
        """
        from trainworks_launcher.supervise.parts.network_checks import ClockCheck, DataPathCheck

        attempt = self._attempt
        parts: list[Part] = []
        may_call_mpirun = not plan.ranks_by and plan.rank < 0
        if self._refusal is None and (plan.ranks_by == "mpirun" or may_call_mpirun):
            from trainworks_launcher.supervise.parts.mpirun_daemons import parts_for_mpirun

            parts += parts_for_mpirun(attempt)
        if plan.checks is not None:
            parts.append(ClockCheck(attempt))
        if plan.shell is None:
            parts.append(DataPathCheck(attempt, several, self._report_if_ready))
        return parts

    def _connect(self, several: Control) -> None:
        """Set this host's role among several hosts: the leader or a worker.

        Adds the part that collects evidence of all hosts. Opens no connection yet.
        """
        # Imported late, because only a job of several hosts needs them.
        from trainworks_launcher.supervise.control.handshake import Credentials
        from trainworks_launcher.supervise.control.identity import identity_of
        from trainworks_launcher.supervise.parts.evidence_collection import EvidenceCollection

        attempt, plan = self._attempt, self._attempt.plan
        evidence = EvidenceCollection(attempt)
        attempt.parts.append(evidence)
        events = self._events._replace(inquire=evidence.collect)
        own = Credentials(
            host=plan.member or plan.host,
            job=identity_of(attempt.environment, several, plan.mode),
            secret=attempt.environment.job_secret,
        )
        if plan.role == "leader":
            from trainworks_launcher.supervise.control.leader import Leader

            leader = Leader(attempt.loop, several, plan.limits, own, events)
            leader.program = plan.ranks_by if plan.ranks_by in STARTERS else name_of_program(plan)
            attempt.role = leader
        else:
            from trainworks_launcher.supervise.control.worker import Worker

            attempt.log(f"joining {several.leader} on port {several.port}")
            attempt.role = Worker(attempt.loop, several, plan.limits, own, events)

    def _connected(self) -> None:
        """Prepare this host: the control channel is open, and the other hosts prepare themselves.

        Called again on a worker whose leader has started anew: then the preparation goes on.
        """
        attempt = self._attempt
        is_again = attempt.phase > Phase.JOINING
        # A phase never goes back.
        attempt.phase = max(attempt.phase, Phase.PREPARING)
        if self._refusal is not None:
            attempt.report(self._refusal)
            return
        try:
            for part in attempt.parts:
                part.connected()
            if not self._preparation.check() or is_again:
                # After a new start of the leader, a preparation that has begun stays.
                return
            self._preparation.begin()
            if self._preparation.proceed():
                self._report_if_ready()
        except RefusalError as refusal:
            attempt.refuse(refusal)

    def _report_if_ready(self) -> None:
        """Report that this host is ready, if it is prepared and all its parts are ready.

        After an attempt without progress the leader, or the only host, pauses before that.
        """
        attempt = self._attempt
        parts_are_ready = all(part.is_ready for part in attempt.parts)
        if not self._preparation.is_done or not parts_are_ready or self._is_pausing:
            return
        pause = attempt.history.pause if attempt.plan.role != "worker" else 0.0
        if not pause:
            attempt.role.ready()
            return
        # The job waits because the leader is not ready. All hosts have joined, so that a stop
        # signal to one of them ends the wait on all.
        self._is_pausing = True
        attempt.history.pause = 0.0
        attempt.log(f"the last try got no step further: the next one starts in {pause:g} s")
        attempt.loop.after(pause, attempt.role.ready)

    def _go(self) -> None:
        """Start the program of this host: every host is ready.

        Nothing is started if the job is over. If the newest checkpoint is still being looked for,
        the part that looks starts the program later.
        """
        attempt = self._attempt
        if attempt.is_over:
            return
        attempt.phase = Phase.RUNNING
        attempt.verdict.started_at = time.time()
        for part in attempt.parts:
            part.go()
        if not attempt.awaits_checkpoint:
            self._program.start()

    # --- what hosts and ranks tell ----------------------------------------------------------------
    def _rank_started(self, rank: Rank) -> None:
        """Tell the parts that a rank of this host has reported.

        A rank that comes after a stop signal or the job's end gets SIGTERM, and its starter, too.
        """
        attempt = self._attempt
        for part in attempt.parts:
            part.rank_started(rank)
        if attempt.is_over:
            # torchrun tries again, or mpirun was still starting.
            processes.send(rank.pid, signal.SIGTERM)
            if attempt.running.command is not None:
                attempt.running.command.signal(signal.SIGTERM)

    def _rank_ended(self, rank: Rank) -> None:
        """Send the leader the evidence about a rank of this host that has ended; tell the parts.

        After the job's end, or in a stop, the evidence is not needed.
        """
        attempt = self._attempt
        if attempt.stop_signal:
            self._stopping.rank_ended(rank)
        ranks = attempt.running.ranks
        if attempt.is_over or ranks is None:
            return
        ranks.take()
        attempt.suspect(attempt.verdict.suspect_ended_rank(rank))
        for part in attempt.parts:
            part.rank_ended(rank)

    def _suspected(self, suspect: Suspect) -> None:
        """Keep the evidence of a host about one of its ranks, and tell the parts."""
        self._attempt.verdict.add(suspect)
        for part in self._attempt.parts:
            part.suspected()

    def _host_lost(self) -> None:
        """End the ranks of this host (SIGKILL): another host is lost, and the job goes on.

        The ranks may wait for the lost ones until their own time-outs. torchrun starts new ones,
        in a group without that host.
        """
        attempt = self._attempt
        if not attempt.is_over:
            for part in attempt.parts:
                part.host_lost()
            attempt.running.send_to_ranks(signal.SIGKILL)

    def _judge(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the attempt, with whether another attempt follows.

        Each part may add a note to an outcome that is not a success; notes are logged.

        Args:
            outcome: The end that decides, as its host reported it.
        """
        attempt = self._attempt
        judged = attempt.verdict.judge(self._program.reconsider(outcome))
        for part in attempt.parts:
            note = attempt.redactor.text(part.note())
            if note and judged.kind != SUCCEEDED:
                attempt.log(note)
                judged = judged._replace(notes=(*judged.notes, note))
        if attempt.stop_signal:
            return judged
        return attempt.history.judge(judged, started=attempt.phase >= Phase.RUNNING)

    # --- signals ----------------------------------------------------------------------------------
    def _signalled(self, numbers: Sequence[int]) -> None:
        """Handle signals that came to this process.

        Args:
            numbers: The signals; SIGCHLD stands for any number of ended children.
        """
        if signal.SIGCHLD in numbers:
            self._reap()
        self._pass_on(numbers)

    def _pass_on(self, numbers: Sequence[int]) -> None:
        """Pass on the signals to this container: stops to all hosts, others to the ranks.

        A stop signal is logged, and so are the hosts that have not joined yet.
        """
        for number in STOP_SIGNALS:
            if number in numbers:
                # Before the stop: afterwards no host is waited for.
                self._attempt.role.name_missing()
                self._stopping.from_platform(number)
                self._attempt.role.stopping()
        for number in sorted(PASSED_ON.intersection(numbers)):
            self._forwarding.forward(number)

    def _stop(self) -> None:
        """Stop this host, because another host was stopped."""
        self._stopping.from_other_host()

    def _reap(self) -> None:
        """Read the status of all children that have ended, orphans of the job among them.

        If the command of this host has ended, its handler is called with its return code.
        """
        attempt, command = self._attempt, self._attempt.running.command
        # First the children that others wait for: an ended one would hide the orphans behind it.
        has_ended = command is not None and command.has_just_ended()
        for part in reversed(attempt.parts):
            part.reap()
        orphans = attempt.family.reap(attempt.own_pids())
        for part in attempt.parts:
            part.orphans_ended(orphans)
        if command is None or not has_ended:
            return
        command.drain()
        if attempt.running.ranks is not None:
            attempt.running.ranks.take_ends()
            attempt.running.ranks.drain(_DRAIN_SECONDS)
        try:
            attempt.when_ended(command.returncode)
        except RefusalError as refusal:
            attempt.refuse(refusal)
        self._leave_if_over()

    # --- the end ----------------------------------------------------------------------------------
    def _finish(self, outcome: Outcome) -> None:
        """End what still runs on this host, because the job's outcome is known.

        The command and its ranks get SIGTERM, and after ``names.FAILURE_GRACE_SECONDS`` SIGKILL.
        This host leaves when they have ended. A second outcome does not count.

        Args:
            outcome: The outcome of the attempt.
        """
        attempt = self._attempt
        if attempt.phase >= Phase.ENDING:
            return
        if self._refusal is not None and attempt.phase is Phase.JOINING:
            # A host that refuses, and reaches no other host, still has its own reason.
            outcome = self._refusal
        attempt.outcome = outcome if outcome.again else attempt.history.of_job(outcome)
        attempt.phase = Phase.ENDING
        for part in attempt.parts:
            part.finish(attempt.outcome)
        command = attempt.running.command
        if command is not None and command.running:
            if self._stopping.leaves_time:
                # The leader is lost while this host's own platform stops it: its ranks save all
                # the same.
                attempt.outcome = self._stopping.instead_of(attempt.outcome)
            else:
                attempt.running.send(signal.SIGTERM)
                if attempt.plan.ranks_by:
                    command.signal(signal.SIGTERM)
                attempt.loop.after(names.FAILURE_GRACE_SECONDS, self._stopping.kill)
        self._leave_if_over()

    def _abandoned(self) -> None:
        """Begin no further attempt, and leave: a process of this host cannot be ended.

        It must not meet ranks of another attempt.
        """
        attempt = self._attempt
        if attempt.outcome is not None:
            attempt.outcome = attempt.outcome._replace(again=False)
        self._leave_if_over()

    def _leave_if_over(self) -> None:
        """Write the outcome and leave, once, if it is known and the command has ended."""
        attempt = self._attempt
        if attempt.phase is not Phase.ENDING or attempt.running.is_active:
            return
        attempt.phase = Phase.LEAVING
        for part in attempt.parts:
            part.program_ended()
        if attempt.outcome is not None and not attempt.outcome.again:
            self._writer.write(attempt.outcome, attempt.plan.mode, names.KILL_LIMIT_SECONDS)
        for part in attempt.parts:
            part.leaving()
        attempt.role.leave()

    def _left(self) -> None:
        """End the loop: every host knows the outcome."""
        for part in self._attempt.parts:
            part.left()
        self._attempt.loop.stop()

    def _clean_up(self) -> None:
        """End every process of the attempt, remove its files, and log the last line.

        Another attempt is given up if a process does not end after SIGKILL.
        """
        attempt = self._attempt
        command = attempt.running.command
        if command is not None and command.running:
            command.kill()
        for part in attempt.parts:
            part.program_ended()
        attempt.running.send_to_ranks(signal.SIGKILL)
        for part in attempt.parts:
            part.close()
        attempt.role.close()
        outcome = attempt.outcome or Outcome(
            FAILED, names.EXIT_LAUNCHER, attempt.plan.host, "no outcome is known"
        )
        limit = names.KILL_LIMIT_SECONDS if outcome.again else processes.REAP_SECONDS
        left = attempt.family.end(attempt.guardian.pids, limit)
        attempt.guardian.end()
        if attempt.running.ranks is not None:
            attempt.running.ranks.close()
        attempt.loop.close()
        attempt.runtime.remove()
        # A job that was not started leaves no empty directories.
        if not attempt.verdict.started_at:
            directories.take_back(self._made)
        if outcome.again and left:
            pids = ", ".join(map(str, left))
            attempt.log(f"not starting again: processes {pids} do not end after KILL")
            outcome = attempt.history.of_job(outcome._replace(again=False))
            attempt.outcome = outcome
        if attempt.verdict.full:
            attempt.log(attempt.verdict.full)
        if outcome.again:
            attempt.log(attempt.history.count(outcome, attempt.verdict.started_at))
        else:
            attempt.log(last_words(outcome))
        attempt.output.close()


def _ask_no_other_host(_: Outcome, then: Callable[[], None]) -> None:
    """Call ``then`` at once: a job of one host has no other host with evidence."""
    then()
