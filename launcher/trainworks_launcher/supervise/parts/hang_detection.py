"""Looks for a hang while the program runs (``hang``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainworks_launcher.supervise.hang import activation
from trainworks_launcher.supervise.part import Part

if TYPE_CHECKING:
    from trainworks_launcher.supervise.attempt import Attempt
    from trainworks_launcher.supervise.outcome.outcome import Outcome


class HangDetection(Part):
    """Present if the job has a limit for hangs."""

    def __init__(self, attempt: Attempt) -> None:
        """Take no sample before the program starts."""
        self._attempt = attempt
        self._activation = activation.HangActivation(
            attempt.loop,
            attempt.plan,
            attempt.environment,
            attempt.running,
            activation.Handlers(attempt.report, attempt.log, attempt.redactor.text),
        )
        attempt.handlers[activation.MESSAGE] = self._activation.receive

    def starting(self) -> None:
        """Begin to look for a hang."""
        self._activation.begin(self._attempt.role, self._attempt.runtime.env)

    def stopping(self) -> None:
        """Look no more."""
        self._activation.end()

    def finish(self, outcome: Outcome) -> None:
        """Look no more."""
        del outcome
        self._activation.end()

    def note(self) -> str:
        """Return the sentence about ranks that had not found each other; "" if they had."""
        return self._activation.rendezvous_state

    @property
    def idle_seconds(self) -> float | None:
        """Seconds without progress of this host."""
        return self._activation.idle
