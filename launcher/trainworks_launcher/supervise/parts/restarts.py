"""Restarts the job on all hosts (``restart``): what the hosts tell each other, and the checkpoint
from which another attempt goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.supervise.outcome.outcome import FAILED, STOPPED, Outcome
from trainworks_launcher.supervise.part import Part
from trainworks_launcher.supervise.restart import KIND

if TYPE_CHECKING:
    from trainworks_launcher.contract.json_values import Json
    from trainworks_launcher.supervise.attempt import Attempt

_REMIND_SECONDS = 10.0
"""Time of the search for a checkpoint after which the log says that the program waits."""


class Restarts(Part):
    """Present if the job may be restarted, and if other hosts may know that it was."""

    def __init__(self, attempt: Attempt, start: Callable[[], None]) -> None:
        """Look for nothing yet.

        Args:
            attempt: The state of the attempt.
            start: Starts the program; called when its checkpoint is found.
        """
        self._attempt = attempt
        self._start = start
        attempt.handlers[KIND] = self._learn

    def connected(self) -> None:
        """Send the leader this host's history of the job, if the job may be restarted."""
        attempt = self._attempt
        if attempt.plan.restarts:
            attempt.tell(KIND, **attempt.history.fields())

    def _learn(self, host: str, message: Mapping[str, Json]) -> None:
        """Take another host's history of the job; the leader answers with its own.

        The leader answers before the job starts, because messages come in order.

        Args:
            host: The sender.
            message: With the fields of its ``AttemptHistory``.
        """
        attempt = self._attempt
        is_new = attempt.history.learn(message)
        if attempt.plan.role == "leader":
            # All hosts have to know of something new; else only the sender may know less.
            attempt.role.tell(KIND, "" if is_new else host, **attempt.history.fields())

    def go(self) -> None:
        """Look for the checkpoint from which a further attempt goes on, in a thread.

        The program waits for the result: without it the job would begin anew on a slow file system.
        """
        attempt = self._attempt
        if attempt.history.restarts:
            attempt.awaits_checkpoint = True
            attempt.loop.after(_REMIND_SECONDS, self._remind)
            attempt.loop.look(
                attempt.history.find_checkpoint, attempt.plan.limits.prepare, self._found
            )

    @property
    def _unanswered(self) -> str:
        """The sentence about a file system that does not answer."""
        directory = self._attempt.plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "")
        return (
            f"the newest checkpoint in {directory} cannot be found: the file system does not answer"
        )

    def _remind(self) -> None:
        """Log that the program still waits for its checkpoint, if it does."""
        if self._attempt.awaits_checkpoint:
            self._attempt.log(f"{self._unanswered}; this host waits for it")

    def _found(self, checkpoint: tuple[str, float] | None) -> None:
        """Start the program with the variables of its checkpoint, and log where it goes on.

        Args:
            checkpoint: As ``AttemptHistory.find_checkpoint``; None if the file system has not
                answered, which is this host's failure.
        """
        attempt = self._attempt
        if not attempt.awaits_checkpoint:
            # The job was stopped meanwhile.
            return
        attempt.awaits_checkpoint = False
        if checkpoint is None:
            host = attempt.plan.host
            attempt.report(Outcome(FAILED, names.EXIT_PREPARATION, host, self._unanswered))
            return
        variables, line = attempt.history.resume(*checkpoint)
        attempt.runtime.change(variables)
        attempt.log(line)
        self._start()

    def stopping(self) -> None:
        """Look no more; report the stop if the program waits for its checkpoint."""
        if self._attempt.awaits_checkpoint:
            self._attempt.awaits_checkpoint = False
            # In the next turn of the loop: the stop signal is noted only after this call.
            self._attempt.loop.after(0.0, self._report_stop)

    def _report_stop(self) -> None:
        """Report that this host was stopped before the program was started again."""
        attempt = self._attempt
        status = 128 + attempt.stop_signal
        text = "stopped before the program was started again"
        attempt.report(Outcome(STOPPED, status, attempt.plan.host, text))
