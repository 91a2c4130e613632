"""Watches the ranks of this host, which report when they start, and the program that started them.

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

_LOG_SECONDS = 0.05  # between looks into the log of torchrun
_LOG_LIMIT_SECONDS = 1.0  # until it has to be there


class RankMonitor(Part):
    """Present where mpirun or torchrun starts the ranks."""

    def __init__(
        self,
        attempt: Attempt,
        started: Callable[[Rank], None],
        ended: Callable[[Rank], None],
    ) -> None:
        """Listen for ranks. started, ended: called with each rank."""
        self._attempt = attempt
        self._ended = ended
        loop, running, verdict = attempt.loop, attempt.running, attempt.verdict
        handlers = RankHandlers(attempt.prefix_of, started, ended)
        ranks = Ranks(loop, attempt.runtime.path, attempt.output, handlers)
        running.ranks = verdict.ranks = ranks
        self._starter = StuckStarter(loop, attempt.plan, running, verdict, self._end_starter)

    def rank_started(self, rank: Rank) -> None:
        """The starter has more time."""
        del rank
        self._starter.note_change(self._attempt.running.restarts)

    def rank_ended(self, rank: Rank) -> None:
        """The time of the starter begins; torchrun's log may have the status of the rank."""
        attempt = self._attempt
        self._starter.note_change(attempt.running.restarts)
        command = attempt.running.command
        is_unknown = rank.status is None
        if is_unknown and attempt.plan.ranks_by == "torchrun" and command is not None:
            self._read_torchrun_log(rank, command.tail)

    def suspected(self) -> None:
        """The starter has more time: a rank of some host has ended."""
        self._starter.note_change(self._attempt.running.restarts)

    def _end_starter(self, why: str) -> None:
        """End a starter that outlives its ranks.

        What the hosts have seen of the ranks is the outcome.
        """
        self._attempt.log(why)
        self._attempt.report(self._attempt.verdict.judge_ranks(self._attempt.running.tail))

    def _read_torchrun_log(self, rank: Rank, tail: Tail) -> None:
        """Look for the status of a rank in torchrun's log.

        torchrun has taken the status before this launcher saw it. It logs the status long before
        it ends itself.
        """
        # Only a failure needs it.
        from trainworks_launcher.supervise.outcome.starter_reports import find_torchrun_status

        attempt = self._attempt
        rank.status = find_torchrun_status(tail.read(), rank.pid)
        if rank.status is not None:
            self._ended(rank)
        elif attempt.phase < Phase.ENDING and time.monotonic() < rank.ended_at + _LOG_LIMIT_SECONDS:
            attempt.loop.after(_LOG_SECONDS, lambda: self._read_torchrun_log(rank, tail))
