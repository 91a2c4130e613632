"""End a starter (mpirun, torchrun) that goes on after its ranks have ended.

The outcome of the job is then what the hosts have seen of the ranks.

- **torchrun** ends the other ranks of its host within 30 s after a failure. So its time begins when
  the last rank has ended. A failed rank that torchrun may start again is not the end.
- **mpirun** ends the other ranks of all hosts. So its time begins when a rank has failed, unless
  the user's options let the other ranks go on. A rank that ended well while others run is not the
  end.
"""

from __future__ import annotations

import re
from typing import Callable, Sequence

from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.attribution.failure import Verdict
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.processes.command import HostCommand

STARTER_SECONDS = 10.0
"""How long a starter may run after its ranks."""

_GOES_ON = re.compile(r"recover|continuous|non.?zero.status[ =](0|false)")
"""Options with which mpirun lets the other ranks go on. Source: mpirun(1), prte-map(1)."""

_MAX_RESTARTS = "--max-restarts="

_RANK_WRAPPER = "/programs/rank.py"
"""End of the word after which a command line has no more options of its starter."""


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
        """Watch nothing before the first call of ``note_change``.

        Args:
            loop: The event loop.
            plan: The plan of this host.
            running: The starter, and the ranks of this host.
            verdict: What the hosts have seen of the ranks.
            end: Ends the starter; called with the reason as a log line.
        """
        self._loop = loop
        self._plan = plan
        self._running = running
        self._verdict = verdict
        self._end = end
        self._changes = 0
        self._restarts = 0

    def note_change(self, restarts: int = 0) -> None:
        """Note that a rank has started or ended, and give the starter ``STARTER_SECONDS`` anew.

        Args:
            restarts: Number of restarts of the ranks so far.
        """
        self._changes += 1
        self._restarts = restarts
        changes = self._changes
        self._loop.after(STARTER_SECONDS, lambda: self._check(changes))

    def _check(self, changes: int) -> None:
        """End the starter if it still runs and nothing more can come from its ranks.

        Args:
            changes: Number of changes when this check was planned. A later change has planned a
                check of its own, so this one does nothing.
        """
        if changes != self._changes or not self._running.is_active:
            return
        if self._plan.ranks_by == "mpirun":
            is_stuck = self._is_mpirun_stuck()
        else:
            is_stuck = self._is_torchrun_stuck()
        if is_stuck:
            self._end(
                f"{self._plan.ranks_by} has not ended {STARTER_SECONDS:g} s after its ranks:"
                " ending it"
            )

    def _is_mpirun_stuck(self) -> bool:
        """Return whether mpirun should have ended.

        True if the ends of all ranks are known, or if one has failed and no option lets the others
        go on.
        """
        if self._verdict.knows_all():
            return True
        options = " ".join(options_of_starter(self._plan.argv))
        return self._verdict.first_failure() is not None and not _GOES_ON.search(options)

    def _is_torchrun_stuck(self) -> bool:
        """Return whether torchrun should have ended.

        True if a rank of this host has failed, none runs, and torchrun starts none again.
        """
        plan = self._plan
        is_elastic = plan.control is not None and plan.control.minimum_hosts > 0
        max_restarts = 0
        for word in options_of_starter(plan.argv):
            if word.startswith(_MAX_RESTARTS):
                max_restarts = int(word[len(_MAX_RESTARTS) :])
        if is_elastic or self._restarts < max_restarts:
            return False
        if self._running.rank_pids():
            return False
        return self._verdict.first_failure(plan.host) is not None


def options_of_starter(argv: Sequence[str]) -> Sequence[str]:
    """Return the words of a command line before rank.py: the options of mpirun or torchrun.

    The words after rank.py are the user's program and its arguments, which may look like options
    of a starter: ``train.py --recover``.
    """
    for place, word in enumerate(argv):
        if word.endswith(_RANK_WRAPPER):
            return argv[:place]
    return argv
