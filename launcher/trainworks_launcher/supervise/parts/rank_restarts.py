"""Counts how often torchrun restarts the ranks of this host, and whether they make progress.

mpirun restarts no rank. ``processes.attempts`` says what progress is.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainworks_launcher.contract import names
from trainworks_launcher.supervise.attribution.crash_loop import MESSAGE, CrashLoop, Handlers
from trainworks_launcher.supervise.part import Part
from trainworks_launcher.supervise.processes.attempts import Attempts

if TYPE_CHECKING:
    from trainworks_launcher.supervise.attempt import Attempt
    from trainworks_launcher.supervise.outcome.evidence import KnownFailure
    from trainworks_launcher.supervise.processes.ranks import Rank


class RankRestarts(Part):
    """Present if torchrun starts the ranks."""

    def __init__(self, attempt: Attempt) -> None:
        """Begin before the first rank."""
        self._attempt = attempt
        plan, variables = attempt.plan, attempt.environment.variables
        heartbeat = variables.get(names.HEARTBEAT_FILE_VARIABLE, "").strip()
        self._attempts_of_ranks = Attempts(
            checkpoints=plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, ""),
            heartbeat=str(Path(plan.cwd, heartbeat)) if heartbeat else "",
        )

    def rank_started(self, rank: Rank) -> None:
        """Count a restart, if this is the first rank after one, and tell the parts.

        Failures before it no longer count, and the files of dead ranks in /dev/shm are removed.
        """
        attempt = self._attempt
        # Before the files are examined: what the new ranks write is later.
        now = time.time()
        # Whether the attempt before made progress; None if this is not the first rank of one.
        further = self._attempts_of_ranks.started(rank)
        rank.restarts = self._attempts_of_ranks.restarts
        attempt.running.restarts = rank.restarts
        if further is None:
            # Another rank of the same attempt.
            return
        failure = attempt.verdict.forget(rank.restarts)
        attempt.clean_up_shared_memory(until=now)
        for part in attempt.parts:
            part.ranks_restarted(further=further, failure=failure)

    def host_lost(self) -> None:
        """Note that the ranks are ended for a lost host: they need not have made progress."""
        self._attempts_of_ranks.excuse()


class CrashLoopDetection(Part):
    """Ends a job whose restarts make no progress; present unless a person has switched it off."""

    def __init__(self, attempt: Attempt) -> None:
        """Begin before the first restart."""
        self._attempt = attempt
        plan = attempt.plan
        handlers = Handlers(
            tell=lambda rounds: attempt.tell(MESSAGE, rounds=rounds),
            end=attempt.report,
            log=attempt.log,
            known=attempt.verdict.first_failure,
        )
        self._crash_loop = CrashLoop(
            plan.member or plan.host, leads=plan.role != "worker", handlers=handlers
        )
        attempt.handlers[MESSAGE] = self._crash_loop.receive_count

    def ranks_restarted(self, *, further: bool, failure: KnownFailure | None) -> None:
        """Count a restart, unless the job ends: that may end the job."""
        if not self._attempt.is_over:
            self._crash_loop.count_restart(further, failure)

    def host_lost(self) -> None:
        """Begin the count anew."""
        self._crash_loop.begin_anew()
