"""How a run is stopped: a signal of the platform or of another host is handed on, and the ranks
save what they have.

Every container gets the platform's signal, and every host tells the others. The ranks get it once,
and have all the time that the platform leaves: it sends KILL itself. Further signals change
nothing: Slurm sends TERM again before KILL. KILL comes from here only

- after ``Limits.stop_grace``, where a person has set it, or where nothing else would end the job;
- at a second SIGINT, where a person sits at a terminal;
- where this host's platform has sent no signal, and the host that was stopped is gone.

What does not end after KILL is left behind. The starters of the ranks do not shorten the time
either (``processes.stopped_starters``).
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Callable, Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.stop_signals import STOP_SIGNALS
from trainworks_launcher.supervise.attribution.failure import name_of_program
from trainworks_launcher.supervise.control import HOLD, NO_MORE_TIME
from trainworks_launcher.supervise.outcome.outcome import FAILED, STOPPED, Outcome
from trainworks_launcher.supervise.phase import Phase
from trainworks_launcher.supervise.processes.stopped_starters import (
    StoppedStarters,
    have_left_the_script,
)

if TYPE_CHECKING:
    from trainworks_launcher.contract.json_values import Json
    from trainworks_launcher.supervise.attempt import Attempt
    from trainworks_launcher.supervise.processes.ranks import Rank

_LOOK_SECONDS = 0.5
"""Between looks whether the ranks of held starters have left their script.

Decides nothing but how soon they end.
"""


class Events(NamedTuple):
    """What a stop tells the supervisor.

    Attributes:
        saving: The ranks have been told; the outcome, as far as it is known now.
        abandoned: The command hangs in the kernel, and the attempt goes on without it.
    """

    saving: Callable[[Outcome], None]
    abandoned: Callable[[], None]


class Stopping:
    """The stops of one attempt. Every method runs in the loop's thread."""

    def __init__(self, attempt: Attempt, events: Events) -> None:
        """Nothing is stopped yet."""
        self._attempt = attempt
        self._plan = attempt.plan
        self._running = attempt.running
        self._events = events
        attempt.handlers[HOLD] = self._told_to_hold
        attempt.handlers[NO_MORE_TIME] = self._told_of_no_more_time
        self._is_begun = False  # the signal may be known before: then nothing is started
        self._only_told = False
        self._interrupts = 0
        self._killing = False
        self._held = StoppedStarters()
        self._has_told = False

    @property
    def leaves_time(self) -> bool:
        """Whether the ranks have the time that this host's own platform leaves."""
        is_stopped = bool(self._attempt.stop_signal)
        return is_stopped and not self._only_told and not self._killing

    def instead_of(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a job that another one would end while it is being stopped."""
        number = self._attempt.stop_signal
        by = f"stopped by {signal.Signals(number).name}"
        return outcome._replace(kind=STOPPED, status=128 + number, stopped=by)

    # --- signals that come ------------------------------------------------------------------------
    def from_platform(self, number: int) -> None:
        """A stop signal to this container.

        Every container gets one: if another host's came first, the ranks have had theirs.
        """
        self._interrupts += number == signal.SIGINT
        was_told, self._only_told = self._only_told, False
        if was_told:
            return
        if not self._is_begun:
            self._stop(number)
        elif self._interrupts > 1 and number == signal.SIGINT and has_terminal():
            self._attempt.log("SIGINT again: the ranks of all hosts are ended now")
            self._attempt.tell(NO_MORE_TIME, all=True)
            self.kill()
        elif self._attempt.phase < Phase.ENDING:
            self._attempt.log(
                f"{signal.Signals(number).name} again: it changes nothing, the ranks have theirs"
            )

    def from_other_host(self) -> None:
        """Another host was stopped.

        Once only: a second signal would cut short what the first one started.
        """
        if not self._is_begun:
            self._only_told = True
            self._stop(signal.SIGTERM)

    def _told_of_no_more_time(self, _: str, message: Mapping[str, Json]) -> None:
        """A host that was stopped is gone, so its platform leaves no more time.

        With ``all`` a person has ended the wait of all hosts.
        """
        of_all = message.get("all") is True
        if self._attempt.plan.role == "leader":
            self._attempt.tell(NO_MORE_TIME, all=of_all)
        if of_all or self._only_told:
            self.kill()

    def _stop(self, number: int) -> None:
        """Hand a stop signal on."""
        if self._attempt.phase >= Phase.ENDING:
            return
        self._is_begun = True
        for part in self._attempt.parts:
            part.stopping()
        self._attempt.stop_signal = number
        name, sent = signal.Signals(number).name, STOP_SIGNALS[number]
        as_what = f" as {sent.name}" if sent.name != name else ""
        self._attempt.log(f"{name}: passed on{as_what}; {self._who_kills()}")
        self._running.send(sent)
        before = self._attempt.phase < Phase.RUNNING
        text = " before the program was started" if before else ", the ranks are saving"
        known = Outcome(STOPPED, 128 + number, self._plan.host, f"stopped by {name}{text}")
        if before and not self._running.is_active:
            self._attempt.report(known)
            return
        if self._plan.limits.stop_grace is not None:
            self._attempt.loop.after(self._plan.limits.stop_grace, self._grace_is_over)
        # Now: where the platform sends KILL before the ranks have saved, this
        # is what is left of the job.
        self._events.saving(known)

    def _who_kills(self) -> str:
        """Return who ends ranks that do not end, as the end of a sentence."""
        grace = self._plan.limits.stop_grace
        if grace is not None:
            return f"KILL follows in {grace:g} s ({names.STOP_GRACE_VARIABLE})"
        if self._only_told:
            return "the ranks have the time that the platform of the stopped host leaves"
        by_whom = self._plan.platform or "container engine"
        return (
            f"the ranks have the time that the platform leaves ({by_whom}),"
            " and it sends KILL itself"
        )

    # --- starters that would cut it short ---------------------------------------------------------
    def rank_ended(self, rank: Rank) -> None:
        """A rank of this host has ended in the stop.

        If that is a failure for its starter, all starters are held.
        """
        if rank.status == 0 or self._killing or self._attempt.phase >= Phase.ENDING:
            self._maybe_release()
            return
        if not self._has_told:
            self._has_told = True
            self._attempt.tell(HOLD)
        self.hold()

    def _told_to_hold(self, _: str, __: Mapping[str, Json]) -> None:
        """A rank of another host has ended badly in a stop."""
        if self._attempt.plan.role == "leader":
            self._attempt.tell(HOLD)
        self.hold()

    def hold(self) -> None:
        """Hold the starter of the ranks of this host, until they have ended or are done."""
        if self._attempt.stop_signal and not self._killing and self._attempt.phase < Phase.ENDING:
            held = self._held.any
            self._held.hold(self._running.rank_pids())
            if not held:
                self._look()

    def _look(self) -> None:
        self._maybe_release()
        if self._held.any:
            self._attempt.loop.after(_LOOK_SECONDS, self._look)

    def _maybe_release(self) -> None:
        ranks = self._running.rank_pids()
        if self._held.any and (
            not ranks or have_left_the_script(ranks, self._attempt.runtime.path)
        ):
            self._held.release()

    # --- KILL -------------------------------------------------------------------------------------
    def _grace_is_over(self) -> None:
        command = self._running.command
        if command is not None and command.running:
            grace = self._plan.limits.stop_grace
            self._attempt.log(f"{names.STOP_GRACE_VARIABLE}={grace:g} is over: KILL")
        self.kill()

    def kill(self) -> None:
        """The ranks have no more time."""
        self._killing = True
        self._held.release()
        command = self._running.command
        if command is not None and command.running:
            self._attempt.verdict.killed = True
            if self._plan.ranks_by and self._attempt.phase < Phase.ENDING:
                # It is told first, so that mpirun's daemons on the other hosts end too. With an
                # outcome it was told.
                command.signal(signal.SIGTERM)
                self._attempt.loop.after(
                    names.FAILURE_GRACE_SECONDS, lambda: command.signal_group(signal.SIGKILL)
                )
            else:
                command.signal_group(signal.SIGKILL)
        self._running.send_to_ranks(signal.SIGKILL)
        self._attempt.loop.after(names.KILL_LIMIT_SECONDS, self._abandon)

    def _abandon(self) -> None:
        """KILL did not end the command: it hangs inside the kernel. The job ends without it."""
        command = self._running.command
        if command is not None and command.running:
            self._attempt.log(f"process {command.pid} does not end after KILL; leaving without it")
            self._running.command = None
            text = (
                f"{name_of_program(self._plan)} did not end"
                f" {names.KILL_LIMIT_SECONDS:g} s after KILL"
            )
            self._attempt.report(Outcome(FAILED, 128 + signal.SIGKILL, self._plan.host, text))
            self._events.abandoned()


def has_terminal() -> bool:
    """Return whether a person at a terminal started this process: it has a
    controlling terminal (tty(4)).
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
