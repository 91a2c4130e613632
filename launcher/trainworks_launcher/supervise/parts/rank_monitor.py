"""Watches the ranks of this host, which report when they start, and their starter.

mpirun and torchrun start each rank through rank.py. A rank's end is mostly seen before its starter
says anything of it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable

from trainworks_launcher.supervise.attribution.stuck_starter import StuckStarter
from trainworks_launcher.supervise.part import Part
from trainworks_launcher.supervise.phase import Phase
from trainworks_launcher.supervise.processes.ranks import Rank, RankHandlers, Ranks

if TYPE_CHECKING:
    from trainworks_launcher.supervise.attempt import Attempt
    from trainworks_launcher.supervise.processes.output import Tail

_LOG_SECONDS = 0.05
"""Between two looks into the log of torchrun."""

_LOG_LIMIT_SECONDS = 1.0
"""From the end of a rank to its line in that log, at most."""


class RankMonitor(Part):
    """Present if mpirun or torchrun starts the ranks."""

    def __init__(
        self,
        attempt: Attempt,
        started: Callable[[Rank], None],
        ended: Callable[[Rank], None],
    ) -> None:
        """Listen for ranks.

        Args:
            attempt: The state of the attempt; gets the ranks.
            started: Called with each rank that has reported.
            ended: Called with each rank that has ended; again if its status is read later.
        """
        self._attempt = attempt
        self._ended = ended
        loop, running, verdict = attempt.loop, attempt.running, attempt.verdict
        handlers = RankHandlers(attempt.prefix_of, started, ended)
        ranks = Ranks(loop, attempt.runtime.path, attempt.output, handlers)
        running.ranks = verdict.ranks = ranks
        self._starter = StuckStarter(loop, attempt.plan, running, verdict, self._end_starter)

    def rank_started(self, rank: Rank) -> None:
        """Give the starter more time."""
        del rank
        self._starter.note_change(self._attempt.running.restarts)

    def rank_ended(self, rank: Rank) -> None:
        """Begin the time of the starter; look for an unknown status in torchrun's log."""
        attempt = self._attempt
        self._starter.note_change(attempt.running.restarts)
        command = attempt.running.command
        is_unknown = rank.status is None
        if is_unknown and attempt.plan.ranks_by == "torchrun" and command is not None:
            self._read_torchrun_log(rank, command.tail)

    def suspected(self) -> None:
        """Give the starter more time: a rank of a host has ended."""
        self._starter.note_change(self._attempt.running.restarts)

    def _end_starter(self, why: str) -> None:
        """Log why a starter is ended, and report the outcome that the hosts have seen of the ranks.

        The starter is ended with the job.
        """
        self._attempt.log(why)
        self._attempt.report(self._attempt.verdict.judge_ranks(self._attempt.running.tail))

    def _read_torchrun_log(self, rank: Rank, tail: Tail) -> None:
        """Look for the status of a rank in torchrun's log, at intervals, for at most a second.

        torchrun has read the status before this launcher could. It logs the status long before it
        ends itself. With the status the end of the rank is reported again.

        Args:
            rank: The rank; gets the status.
            tail: End of torchrun's output.
        """
        # Imported late, because only a failure needs it.
        from trainworks_launcher.supervise.outcome.starter_reports import find_torchrun_status

        attempt = self._attempt
        rank.status = find_torchrun_status(tail.read(), rank.pid)
        if rank.status is not None:
            self._ended(rank)
        elif attempt.phase < Phase.ENDING and time.monotonic() < rank.ended_at + _LOG_LIMIT_SECONDS:
            attempt.loop.after(_LOG_SECONDS, lambda: self._read_torchrun_log(rank, tail))
