"""Rounds of the ranks of one host: from one start to the next one, and whether
a round got further than those before.

torchrun starts failed ranks again as often as it may, also where that leads nowhere. A job is ended
for it only if nothing speaks for a step further, so each of these is believed, and one of them on
one host is enough:

- a file among the checkpoints, or the heartbeat file, was written, or cannot be looked at in time;
- the round lived for longer than ``names.FRUITLESS_SECONDS``: a job may save its work where nobody
  looks, and say nothing of it;
- another host was lost, and the ranks were ended for that.

Whether it ended as the round before is asked on the leader, which knows the failures of all hosts
(``crash_loop``), by the same rule as between two tries of all hosts: ``Outcome.kind_of_failure``.

The first round is the measure, and is never fruitless.
"""

from __future__ import annotations

import time
from typing import Callable

from trainworks_launcher.contract import names
from trainworks_launcher.contract.files import written_at
from trainworks_launcher.contract.inspection import in_time
from trainworks_launcher.supervise.processes.ranks import Rank


class Rounds:
    """The rounds of one host, in the loop's thread. restarts: how many came after the first one."""

    def __init__(
        self, checkpoints: str = "", heartbeat: str = "", longest: float = names.FRUITLESS_SECONDS
    ) -> None:
        """No rank has started.

        Args:
            checkpoints: Directory of the checkpoints; ``""`` if it is not known.
            heartbeat: Path of the script's heartbeat file; ``""`` if there is none.
            longest: Seconds of a round that can be judged.
        """
        self._checkpoints = checkpoints
        self._heartbeat = heartbeat
        self._longest = longest
        self._ranks: list[Rank] = []
        self._began = 0.0
        self._files: tuple[int | None, ...] = ()
        self._excused = False
        self._measured = False
        self.restarts = 0

    def started(self, rank: Rank) -> bool | None:
        """A rank has started.

        If it is the first of a new round, return whether the one before got a step further.
        """
        place = _place(rank)
        if all(_place(other) != place for other in self._ranks):
            self._began = self._began or time.monotonic()
            self._ranks.append(rank)
            return None
        self.restarts += 1
        found = self._got_further()
        self._began, self._excused, self._measured, self._ranks = (
            time.monotonic(),
            False,
            True,
            [rank],
        )
        return found

    def excuse(self) -> None:
        """The ranks of this round are ended for a host that was lost."""
        self._excused = True

    def _got_further(self) -> bool:
        before, self._files = self._files, self._state_of_files()
        return (
            not self._measured
            or self._excused
            or None in self._files
            or self._files != before
            or time.monotonic() - self._began > self._longest
        )

    def _state_of_files(self) -> tuple[int | None, ...]:
        """Return what changes when one of the files is written.

        None for what cannot be looked at.
        """
        from trainworks_launcher.contract.checkpoints import state_of  # only a restart needs it

        looks: list[Callable[[], int | None]] = []
        if self._checkpoints:
            looks.append(lambda: state_of(self._checkpoints))
        if self._heartbeat:
            looks.append(lambda: written_at(self._heartbeat))
        return tuple(in_time(look, None) for look in looks)


def _place(rank: Rank) -> int:
    """Return the number that only one rank of a round has on this host: a
    rank's own may change with the hosts.
    """
    return rank.local if rank.local >= 0 else rank.number
