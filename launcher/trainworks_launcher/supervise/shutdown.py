"""How a run is stopped: a signal of the platform or of another host is handed on, and the ranks
save what they have.

Every container gets the platform's signal, and every host tells the others. The ranks get it once,
and have all the time that the platform leaves: it sends KILL itself. Further signals change
nothing: Slurm sends TERM again before KILL. KILL comes from here only

- after ``Limits.stop_grace``, where a person has set it, or where nothing else would end the job;
- at a second SIGINT, where a person sits at a terminal;
- where this host's platform has sent no signal, and the host that was stopped is gone.

What does not end after KILL is left behind. Neither do the starters of the ranks shorten the time
(``processes.stopped_starters``), nor shells in front of them (``processes.stop_receivers``).
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
from trainworks_launcher.supervise.processes.stop_receivers import StopReceivers
from trainworks_launcher.supervise.processes.stopped_starters import (
    StoppedStarters,
    have_left_the_script,
)

if TYPE_CHECKING:
    from trainworks_launcher.contract.json_values import Json
    from trainworks_launcher.supervise.attempt import Attempt
    from trainworks_launcher.supervise.processes.ranks import Rank

_LOOK_SECONDS = 0.5
"""Seconds between looks whether the ranks of stopped starters have left their script, and whether
the processes behind a shell have ended.

This decides only how soon the starters and the shell end.
"""


class Events(NamedTuple):
    """The supervisor's handlers for events of a stop.

    Attributes:
        saving: Called when the ranks have their signal, with the outcome as it is known then.
        abandoned: Called when the command has not ended after KILL, and is left behind.
    """

    saving: Callable[[Outcome], None]
    abandoned: Callable[[], None]


class Stopping:
    """The stops of one attempt. Every method runs in the loop's thread."""

    def __init__(self, attempt: Attempt, events: Events) -> None:
        """Handle the messages of other hosts about a stop; stop nothing yet."""
        self._attempt = attempt
        self._plan = attempt.plan
        self._running = attempt.running
        self._events = events
        attempt.handlers[HOLD] = self._hold_for_other_host
        attempt.handlers[NO_MORE_TIME] = self._end_for_other_host
        # Not the same as ``attempt.stop_signal``: a signal may have come before the attempt.
        self._is_begun = False
        self._is_told_only = False  # another host was stopped, and this one got no signal
        self._interrupts = 0  # how often SIGINT came
        self._is_killing = False  # ``kill`` was called
        self._stopped_starters = StoppedStarters()
        self._receivers = StopReceivers()
        self._has_sent_hold = False  # to the other hosts, once

    @property
    def leaves_time(self) -> bool:
        """Whether the ranks have the time that this host's own platform leaves after its signal."""
        is_stopped = bool(self._attempt.stop_signal)
        return is_stopped and not self._is_told_only and not self._is_killing

    def instead_of(self, outcome: Outcome) -> Outcome:
        """Return an outcome that came during a stop as that of a stopped job.

        Its status is 128 and the number of the stop signal.
        """
        number = self._attempt.stop_signal
        by = f"stopped by {signal.Signals(number).name}"
        return outcome._replace(kind=STOPPED, status=128 + number, stopped=by)

    # --- signals that come ------------------------------------------------------------------------
    def from_platform(self, number: int) -> None:
        """Handle a stop signal to this container.

        The first one begins the stop. A second SIGINT from a terminal ends the ranks of all hosts.
        Any other signal only makes a line in the log.

        Args:
            number: The signal.
        """
        if number == signal.SIGINT:
            self._interrupts += 1
        # From now on this host's own platform leaves the time.
        was_told_only, self._is_told_only = self._is_told_only, False
        if was_told_only:
            # The platform signals every container. The ranks have had theirs, by the other host.
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
        """Begin the stop of this host, because another host was stopped.

        Does nothing if the stop has begun: a second signal would cut short what the first one
        started.
        """
        if not self._is_begun:
            self._is_told_only = True
            self._stop(signal.SIGTERM)

    def _end_for_other_host(self, _: str, message: Mapping[str, Json]) -> None:
        """End the ranks of this host, if it got no stop signal of its own.

        A host that was stopped is gone, so its platform leaves no more time. The leader passes the
        message on to all hosts.

        Args:
            message: With ``all`` true, a person has ended the wait of all hosts.
        """
        is_for_all = message.get("all") is True
        if self._attempt.plan.role == "leader":
            self._attempt.tell(NO_MORE_TIME, all=is_for_all)
        if is_for_all or self._is_told_only:
            self.kill()

    def _stop(self, number: int) -> None:
        """Begin the stop: send a signal to the ranks, and write the outcome as it is known now.

        Before the program the stop is the outcome. SIGKILL is planned only if a grace period is
        set. After the job's outcome nothing happens.

        Args:
            number: The stop signal; ranks may get another one (``STOP_SIGNALS``).
        """
        if self._attempt.phase >= Phase.ENDING:
            return
        self._is_begun = True
        for part in self._attempt.parts:
            part.stopping()
        self._attempt.stop_signal = number
        name, sent = signal.Signals(number).name, STOP_SIGNALS[number]
        as_what = f" as {sent.name}" if sent.name != name else ""
        self._attempt.log(f"{name}: passed on{as_what}; {self._who_kills()}")
        self._receivers.send(sent, self._running)
        self._signal_held_back_later()
        is_before_start = self._attempt.phase < Phase.RUNNING
        text = ", the ranks are saving"
        if is_before_start:
            text = " before the program was started"
        outcome = Outcome(STOPPED, 128 + number, self._plan.host, f"stopped by {name}{text}")
        if is_before_start and not self._running.is_active:
            self._attempt.report(outcome)
            return
        if self._plan.limits.stop_grace is not None:
            self._attempt.loop.after(self._plan.limits.stop_grace, self._grace_is_over)
        # At once: if the platform sends KILL before the ranks have saved, this is the last report.
        self._events.saving(outcome)

    def _who_kills(self) -> str:
        """Return who ends ranks that do not end, as the end of a sentence."""
        grace = self._plan.limits.stop_grace
        if grace is not None:
            return f"KILL follows in {grace:g} s ({names.STOP_GRACE_VARIABLE})"
        if self._is_told_only:
            return "the ranks have the time that the platform of the stopped host leaves"
        platform = self._plan.platform or "container engine"
        return (
            f"the ranks have the time that the platform leaves ({platform}),"
            " and it sends KILL itself"
        )

    # --- shells and starters that would cut it short ----------------------------------------------
    def _signal_held_back_later(self) -> None:
        """Send the signal to the shells that were held back, when the programs behind them end."""
        if self._receivers.any_held_back:
            self._attempt.loop.after(_LOOK_SECONDS, self._signal_held_back)

    def _signal_held_back(self) -> None:
        """Look once for shells that may get the signal now. Does nothing after the outcome."""
        if self._is_killing or self._attempt.phase >= Phase.ENDING:
            return
        self._receivers.send_to_held_back()
        self._signal_held_back_later()

    def rank_ended(self, rank: Rank) -> None:
        """Stop the starters of all hosts (SIGSTOP), if a rank of this host has failed in the stop.

        A starter that sees a failed rank would end the others while they save. After a rank that
        ended well, the starters go on if no other rank needs the time.
        """
        if rank.status == 0 or self._is_killing or self._attempt.phase >= Phase.ENDING:
            self._release_if_done()
            return
        if not self._has_sent_hold:
            self._has_sent_hold = True
            self._attempt.tell(HOLD)
        self.hold()

    def _hold_for_other_host(self, _: str, __: Mapping[str, Json]) -> None:
        """Stop the starter of this host: a rank of another host has failed in the stop.

        The leader passes the message on to all hosts.
        """
        if self._attempt.plan.role == "leader":
            self._attempt.tell(HOLD)
        self.hold()

    def hold(self) -> None:
        """Stop the starters of this host's ranks (SIGSTOP), until the ranks have nothing to save.

        Does nothing outside a stop, and after the ranks were told to end.
        """
        attempt = self._attempt
        if not attempt.stop_signal or self._is_killing or attempt.phase >= Phase.ENDING:
            return
        is_looking = self._stopped_starters.any
        self._stopped_starters.hold(self._running.rank_pids())
        if not is_looking:
            self._look()

    def _look(self) -> None:
        """Look at intervals whether the stopped starters may go on, until they do."""
        self._release_if_done()
        if self._stopped_starters.any:
            self._attempt.loop.after(_LOOK_SECONDS, self._look)

    def _release_if_done(self) -> None:
        """Let the stopped starters go on, if all ranks of this host have left their script."""
        if not self._stopped_starters.any:
            return
        ranks = self._running.rank_pids()
        if not ranks or have_left_the_script(ranks, self._attempt.runtime.path):
            self._stopped_starters.release()

    # --- KILL -------------------------------------------------------------------------------------
    def _grace_is_over(self) -> None:
        """End the ranks after the grace period; log that if the command still runs."""
        command = self._running.command
        if command is not None and command.running:
            grace = self._plan.limits.stop_grace
            self._attempt.log(f"{names.STOP_GRACE_VARIABLE}={grace:g} is over: KILL")
        self.kill()

    def kill(self) -> None:
        """End the ranks and the command of this host with SIGKILL.

        A starter first gets SIGTERM, and SIGKILL after ``names.FAILURE_GRACE_SECONDS``; its ranks
        get SIGKILL at once. A command that still runs ``names.KILL_LIMIT_SECONDS`` after this call
        is left behind (``_abandon``). Returns at once.
        """
        self._is_killing = True
        # A stopped process does not handle SIGTERM.
        self._stopped_starters.release()
        command = self._running.command
        if command is not None and command.running:
            self._attempt.verdict.killed = True
            if self._plan.ranks_by and self._attempt.phase < Phase.ENDING:
                # With SIGTERM mpirun ends its daemons on the other hosts, too. Once the job has an
                # outcome, the starter has had that signal.
                command.signal(signal.SIGTERM)
                self._attempt.loop.after(
                    names.FAILURE_GRACE_SECONDS, lambda: command.signal_group(signal.SIGKILL)
                )
            else:
                command.signal_group(signal.SIGKILL)
        self._running.send_to_ranks(signal.SIGKILL)
        self._attempt.loop.after(names.KILL_LIMIT_SECONDS, self._abandon)

    def _abandon(self) -> None:
        """Report a failure if the command has not ended after SIGKILL, and go on without it.

        Such a process hangs inside the kernel.
        """
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
    """Return whether this process has a controlling terminal (tty(4)), at which a person sits."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
