"""Counts how often torchrun starts the ranks of this host again, and whether that leads on.

mpirun starts no rank again. ``processes.attempts`` says what a step further is.
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
    from trainworks_launcher.supervise.outcome.outcome import Outcome
    from trainworks_launcher.supervise.processes.ranks import Rank


class RankRestarts(Part):
    """Present where torchrun starts the ranks."""

    def __init__(self, attempt: Attempt) -> None:
        """No rank has started."""
        self._attempt = attempt
        plan, variables = attempt.plan, attempt.environment.variables
        heartbeat = variables.get(names.HEARTBEAT_FILE_VARIABLE, "").strip()
        self._rounds = Attempts(
            checkpoints=plan.env.get(names.CHECKPOINT_DIRECTORY_VARIABLE, ""),
            heartbeat=str(Path(plan.cwd, heartbeat)) if heartbeat else "",
        )

    def rank_started(self, rank: Rank) -> None:
        """If the ranks begin again with this one, earlier failures no longer count."""
        attempt = self._attempt
        now = time.time()
        further = self._rounds.started(rank)
        attempt.running.restarts = self._rounds.restarts
        if further is None:
            return
        failure = attempt.verdict.forget()
        attempt.clean_up_shared_memory(until=now)
        for part in attempt.parts:
            part.ranks_restarted(further=further, failure=failure)

    def host_lost(self) -> None:
        """The ranks are ended for the lost host: they need not have got further."""
        self._rounds.excuse()


class CrashLoopDetection(Part):
    """Ends a job whose restarts lead nowhere; present unless a person has switched it off."""

    def __init__(self, attempt: Attempt) -> None:
        """No restart has come."""
        self._attempt = attempt
        plan = attempt.plan
        handlers = Handlers(
            tell=lambda rounds: attempt.tell(MESSAGE, rounds=rounds),
            end=attempt.report,
            log=attempt.log,
            known=attempt.verdict.first_known,
        )
        self._crash_loop = CrashLoop(
            plan.member or plan.host, leads=plan.role != "worker", handlers=handlers
        )
        attempt.handlers[MESSAGE] = self._crash_loop.receive_count

    def ranks_restarted(self, *, further: bool, failure: Outcome | None) -> None:
        """Count a restart."""
        if not self._attempt.is_over:
            self._crash_loop.count_restart(further, failure)

    def host_lost(self) -> None:
        """Begin the count anew."""
        self._crash_loop.begin_anew()
