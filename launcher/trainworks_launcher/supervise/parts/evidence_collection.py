"""Collects evidence of all hosts at the first failure (``attribution.inquiry``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable

from trainworks_launcher.supervise.attribution import inquiry
from trainworks_launcher.supervise.outcome.evidence import Kind, Suspect
from trainworks_launcher.supervise.part import Part
from trainworks_launcher.supervise.phase import Phase

if TYPE_CHECKING:
    from trainworks_launcher.supervise.attempt import Attempt
    from trainworks_launcher.supervise.outcome.outcome import Outcome


class EvidenceCollection(Part):
    """Present in a job of several hosts."""

    def __init__(self, attempt: Attempt) -> None:
        """Nothing has failed."""
        self._attempt = attempt
        self._noted_by: set[int] = set()
        self._inquiry = inquiry.Inquiry(
            attempt.loop,
            look=self._look_for_records,
            tell=lambda fields: attempt.tell(inquiry.KIND, **fields),
            is_certain=attempt.verdict.is_certain,
        )
        attempt.handlers[inquiry.KIND] = self._inquiry.heard

    def collect(self, outcome: Outcome, then: Callable[[], None]) -> None:
        """Ask all hosts what their ranks have noted, where ranks have run; then call ``then``.

        outcome: the failure of some host.
        """
        attempt = self._attempt
        if attempt.phase is not Phase.RUNNING or not outcome.place:
            then()
        else:
            self._inquiry.begin(attempt.role.others(), then)

    def suspected(self) -> None:
        """Weigh the evidence, if it was asked for."""
        self._inquiry.moved()

    def _look_for_records(self) -> int:
        """Tell of what running ranks have noted. Returns how many may still note something."""
        attempt = self._attempt
        if not attempt.may_start:
            return 0
        verdict, running = attempt.verdict, attempt.running
        suspects: list[tuple[int, Suspect | None]] = []
        if running.ranks is not None:
            running.ranks.take_ends()
            running.ranks.take()
            alive = [rank for rank in running.ranks.all if rank.is_running()]
            suspects = [(rank.pid, verdict.suspect_running_rank(rank)) for rank in alive]
        elif running.is_active and not running.is_copy:
            suspects = [(running.pid, verdict.suspect_running_program(running.tail, running.pid))]
        return sum(self._tell_of_running(pid, suspect) for pid, suspect in suspects)

    def _tell_of_running(self, pid: int, suspect: Suspect | None) -> bool:
        """Tell once of a process that runs and has noted something.

        Returns whether it may still note more.
        """
        if suspect is None:
            return True
        if pid not in self._noted_by:
            self._noted_by.add(pid)
            self._attempt.suspect(suspect)
        return suspect.kind is Kind.LEFT  # its status is not known before its end
