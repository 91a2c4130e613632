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


class Restarts(Part):
    """Present where the job may be restarted, and where other hosts may tell that it was."""

    def __init__(self, attempt: Attempt, start: Callable[[], None]) -> None:
        """Nothing is looked for yet. start: starts the program, once its checkpoint is found."""
        self._attempt = attempt
        self._start = start
        attempt.handlers[KIND] = self._learn

    def connected(self) -> None:
        """Tell the leader how often the job was restarted, as far as this host knows."""
        attempt = self._attempt
        if attempt.plan.restarts:
            attempt.tell(KIND, **attempt.history.fields())

    def _learn(self, host: str, message: Mapping[str, Json]) -> None:
        """Another host knows of attempts of this job.

        The leader answers before it lets anything start.
        """
        attempt = self._attempt
        is_new = attempt.history.learn(message)
        if attempt.plan.role == "leader":
            attempt.role.tell(KIND, "" if is_new else host, **attempt.history.fields())

    def go(self) -> None:
        """Look for the checkpoint from which another attempt goes on.

        A slow file system must not let it begin anew: it waits, and the loop goes on.
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
        directory = self._attempt.plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, "")
        return (
            f"the newest checkpoint in {directory} cannot be found: the file system does not answer"
        )

    def _remind(self) -> None:
        if self._attempt.awaits_checkpoint:
            self._attempt.log(f"{self._unanswered}; this host waits for it")

    def _found(self, checkpoint: tuple[str, float] | None) -> None:
        """Start the program from a checkpoint; None: the file system has not answered."""
        attempt = self._attempt
        if not attempt.awaits_checkpoint:
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
        """Look no more: if this host was looking, nothing of the job runs here yet."""
        if self._attempt.awaits_checkpoint:
            self._attempt.awaits_checkpoint = False
            self._attempt.loop.after(0.0, self._report_stop)

    def _report_stop(self) -> None:
        attempt = self._attempt
        status = 128 + attempt.stop_signal
        text = "stopped before the program was started again"
        attempt.report(Outcome(STOPPED, status, attempt.plan.host, text))
