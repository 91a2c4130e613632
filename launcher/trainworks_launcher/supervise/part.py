"""The interface of the optional parts of an attempt: hang detection, sidecars, restarts and others.

The supervisor tells every part of each moment below, in the order of its list, ``reap`` in reverse.
A part that a job does not need is not in the list. The moments in their usual order:

===================  =============================================================================
moment               what has happened
===================  =============================================================================
``connected``        the hosts can talk to each other; every host prepares itself now
``go``               every host is prepared
``starting``         this host starts its program next
``rank_started``     a rank of this host has reported
``rank_ended``       a rank of this host has ended
``ranks_restarted``  torchrun has started the ranks of this host again
``suspected``        some host has sent evidence of a failure
``host_lost``        another host is lost, and the job goes on without it
``reap``             a child process has ended
``orphans_ended``    orphans of the job have ended
``stopping``         the job is being stopped
``finish``           the outcome is known; what still runs is ended next
``program_ended``    nothing runs on this host any more
``leaving``          the outcome is in its files
``left``             every host knows the outcome
``close``            the attempt is over
===================  =============================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from trainworks_launcher.supervise.outcome.evidence import KnownFailure
    from trainworks_launcher.supervise.outcome.outcome import Outcome
    from trainworks_launcher.supervise.processes.ranks import Rank


class CannotStartError(Exception):
    """A part cannot start what the program needs; the text is the cause of the failure."""


class Part:
    """A part that does nothing. Every method runs in the loop's thread."""

    # --- before the program -----------------------------------------------------------------------
    def connected(self) -> None:
        """The hosts can talk to each other; this host is being prepared.

        Called again on a worker whose leader starts anew.
        """

    @property
    def is_ready(self) -> bool:
        """Whether the job may start, as far as this part knows."""
        return True

    def go(self) -> None:
        """Every host is ready."""

    def starting(self) -> None:
        """The program of this host starts next.

        Raises:
            CannotStartError: The part cannot start what the program needs.
        """

    # --- while the program runs -------------------------------------------------------------------
    def rank_started(self, rank: Rank) -> None:
        """A rank of this host has reported."""

    def rank_ended(self, rank: Rank) -> None:
        """A rank of this host has ended, before the job's outcome is known."""

    def ranks_restarted(self, *, further: bool, failure: KnownFailure | None) -> None:
        """Torchrun has started the ranks of this host again.

        Args:
            further: Whether the ranks made progress before.
            failure: Why they ended; None if this host does not know it.
        """

    def suspected(self) -> None:
        """A host has sent evidence of a failure, which is in ``attempt.verdict`` now."""

    def host_lost(self) -> None:
        """Another host is lost, and the job goes on: the ranks of this host are ended next."""

    def reap(self) -> None:
        """A child has ended: read the status of those that this part has started."""

    def orphans_ended(self, statuses: Sequence[int]) -> None:
        """Orphans of the job have ended with these statuses, negative after a signal."""

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of children whose status this part reads itself, in ``reap``."""
        return ()

    def note(self) -> str:
        """Return a sentence for the outcome of a job that does not succeed; "" for none."""
        return ""

    @property
    def idle_seconds(self) -> float | None:
        """Seconds without progress of this host; None if this part does not look at that."""
        return None

    # --- the end ----------------------------------------------------------------------------------
    def stopping(self) -> None:
        """The job is being stopped; no signal has been passed on yet."""

    def finish(self, outcome: Outcome) -> None:
        """The job's outcome is known."""

    def program_ended(self) -> None:
        """Nothing runs on this host any more, or the attempt is over. May be called again."""

    def leaving(self) -> None:
        """The outcome is written; the other hosts are told next that this host is done."""

    def left(self) -> None:
        """Every host knows the outcome."""

    def close(self) -> None:
        """End the processes of this part that still run, and close its sockets and files."""
