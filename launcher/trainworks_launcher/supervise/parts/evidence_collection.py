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
        """Take part in inquiries; begin none."""
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
        """Ask all hosts what their ranks have noted, then call ``then``.

        Nothing is asked, and ``then`` called at once, before the program and for a failure that
        cannot be the effect of another one (``Outcome.may_be_an_effect``).

        Args:
            outcome: The failure of a host.
            then: Called without arguments; perhaps much later (``inquiry.AWAITED_SECONDS``).
        """
        attempt = self._attempt
        if attempt.phase is not Phase.RUNNING or not outcome.may_be_an_effect:
            then()
        else:
            self._inquiry.begin(attempt.role.others(), then)

    def suspected(self) -> None:
        """Weigh the evidence during an inquiry."""
        self._inquiry.note_evidence()

    def _look_for_records(self) -> int:
        """Report the running ranks of this host that have noted something, each once.

        Before, the ranks that have ended are noted, and all output is read.

        Returns:
            The number of running ranks that may still note something; 0 before the program.
        """
        attempt = self._attempt
        if not attempt.may_start:
            return 0
        verdict, running = attempt.verdict, attempt.running
        # Process id -> the evidence in its record; None if it has noted nothing.
        suspects: list[tuple[int, Suspect | None]] = []
        if running.ranks is not None:
            running.ranks.take_ends()
            running.ranks.take()
            alive = [rank for rank in running.ranks.all if rank.is_running()]
            suspects = [(rank.pid, verdict.suspect_running_rank(rank)) for rank in alive]
        elif running.is_active and not running.is_copy:
            suspects = [(running.pid, verdict.suspect_running_program(running.tail, running.pid))]
        waiting = 0
        for pid, suspect in suspects:
            if self._report_running(pid, suspect):
                waiting += 1
        return waiting

    def _report_running(self, pid: int, suspect: Suspect | None) -> bool:
        """Report a running process that has noted something, once.

        Args:
            pid: The process.
            suspect: The evidence in its record; None if it has noted nothing.

        Returns:
            Whether the process may still note more.
        """
        if suspect is None:
            return True
        if pid not in self._noted_by:
            self._noted_by.add(pid)
            self._attempt.suspect(suspect)
        # A process that has left its program may still fail: its status is not known yet.
        return suspect.kind is Kind.LEFT
