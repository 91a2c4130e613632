"""A job ends when its ranks have: a starter that outlives them is ended, and what the hosts have
seen is the outcome.

A failed rank that torchrun may start again is not the end, nor is a rank that ended well while
others run. torchrun itself ends the other ranks of its host within 30 s, so its time begins with
the end of the last one; mpirun's with that of the one that failed, unless the user's options let
the others go on.
"""

from __future__ import annotations

import re
from typing import Callable

from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.attribution.failure import Verdict
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.processes.command import HostCommand

STARTER_SECONDS = 10.0
"""How long a starter may live after its ranks."""

_GOES_ON = re.compile(r"recover|continuous|non.?zero.status[ =](0|false)")
"""Options with which mpirun lets the other ranks go on. Source: mpirun(1), prte-map(1)."""


class StuckStarter:
    """Watches the starter of one host's ranks. Every method runs in the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        plan: NodePlan,
        running: HostCommand,
        verdict: Verdict,
        end: Callable[[str], None],
    ) -> None:
        """Nothing has ended yet. end: ends the starter, for a reason in words."""
        self._loop = loop
        self._plan = plan
        self._running = running
        self._verdict = verdict
        self._end = end
        self._count = 0
        self._restarts = 0

    def moved(self, restarts: int = 0) -> None:
        """A rank has started or ended. restarts: how often the ranks have begun again."""
        self._count += 1
        self._restarts = restarts
        count = self._count
        self._loop.after(STARTER_SECONDS, lambda: self._look(count))

    def _look(self, count: int) -> None:
        plan = self._plan
        if count != self._count or not self._running.is_active:
            return
        # No rank has started or ended meanwhile: can anything come any more?
        if plan.ranks_by == "mpirun":
            goes_on = _GOES_ON.search(" ".join(plan.argv))
            due = self._verdict.knows_all() or (
                self._verdict.first_known() is not None and not goes_on
            )
        else:
            asked = [
                word.partition("=")[2] for word in plan.argv if word.startswith("--max-restarts=")
            ]
            elastic = plan.control is not None and plan.control.minimum_hosts
            again = elastic or self._restarts < int(next(iter(asked), "0"))
            due = (
                not again
                and not self._running.rank_pids()
                and self._verdict.first_known(plan.host) is not None
            )
        if due:
            self._end(
                f"{plan.ranks_by} has not ended {STARTER_SECONDS:g} s after its ranks: ending it"
            )
