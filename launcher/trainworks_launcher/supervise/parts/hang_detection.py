"""Looks for a hang while the program runs (``hang``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainworks_launcher.supervise.hang import activation
from trainworks_launcher.supervise.part import Part

if TYPE_CHECKING:
    from trainworks_launcher.supervise.attempt import Attempt
    from trainworks_launcher.supervise.outcome.outcome import Outcome


class HangDetection(Part):
    """Present where the job has a limit for hangs."""

    def __init__(self, attempt: Attempt) -> None:
        """Nothing is looked at before the program starts."""
        self._attempt = attempt
        self._lookout = activation.Lookout(
            attempt.loop,
            attempt.plan,
            attempt.environment,
            attempt.running,
            attempt.runtime.env,
            attempt.report,
            attempt.log,
            attempt.redactor.text,
        )
        attempt.handlers[activation.MESSAGE] = self._lookout.told

    def starting(self) -> None:
        """Look from now on."""
        self._lookout.begin(self._attempt.role)

    def stopping(self) -> None:
        """Look no more."""
        self._lookout.end()

    def finish(self, outcome: Outcome) -> None:
        """Look no more."""
        del outcome
        self._lookout.end()

    def note(self) -> str:
        """Return where ranks were that had not found each other; "" if they have."""
        return self._lookout.of_start

    @property
    def idle_seconds(self) -> float | None:
        """How long the job made no progress."""
        return self._lookout.idle
