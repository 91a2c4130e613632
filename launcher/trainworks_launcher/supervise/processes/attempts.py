"""Attempts of the ranks of one host: from one start of the ranks to the next one, and whether an
attempt made more progress than the one before.

torchrun restarts failed ranks as often as its limit allows, also where no restart helps. The job is
ended early only if nothing shows progress. Each of these counts as progress, and one of them on one
host is enough:

- A checkpoint or the heartbeat file was written, or could not be examined in time.
- The attempt lived longer than ``names.FRUITLESS_SECONDS``: a job may save its work in a place that
  the launcher does not know, and print nothing.
- Another host was lost, and the ranks were ended for that.

Whether two attempts failed in the same way is decided on the leader, which knows the failures of
all hosts (``crash_loop``). The rule is the one between two attempts of all hosts:
``Outcome.kind_of_failure``.

The first attempt is the measure, and always counts as progress.
"""

from __future__ import annotations

import time
from typing import Callable

from trainworks_launcher.contract import names
from trainworks_launcher.contract.files import written_at
from trainworks_launcher.contract.inspection import run_in_time
from trainworks_launcher.supervise.processes.ranks import Rank


class Attempts:
    """The attempts of one host, in the loop's thread.

    Attributes:
        restarts: Number of attempts after the first one.
    """

    def __init__(
        self, checkpoints: str = "", heartbeat: str = "", longest: float = names.FRUITLESS_SECONDS
    ) -> None:
        """Wait for the first rank.

        Args:
            checkpoints: Directory of the checkpoints; ``""`` if it is not known.
            heartbeat: Path of the script's heartbeat file; ``""`` if there is none.
            longest: Seconds; a longer attempt counts as progress.
        """
        self._checkpoints = checkpoints
        self._heartbeat = heartbeat
        self._longest = longest
        self._ranks: list[Rank] = []
        self._began = 0.0  # monotonic clock
        self._files: tuple[int | None, ...] = ()
        self._is_excused = False
        self._is_measured = False  # whether ``_files`` is that of an earlier attempt
        self.restarts = 0

    def started(self, rank: Rank) -> bool | None:
        """Note the start of a rank.

        Returns:
            For the first rank of a new attempt: whether the attempt before made progress. None
            for every other rank.
        """
        place = _place(rank)
        # A second rank in one place shows that the ranks were started again.
        if all(_place(other) != place for other in self._ranks):
            # Set already for all but the first rank of an attempt.
            self._began = self._began or time.monotonic()
            self._ranks.append(rank)
            return None
        self.restarts += 1
        progress = self._made_progress()
        self._began = time.monotonic()
        self._is_excused = False
        self._is_measured = True
        self._ranks = [rank]
        return progress

    def excuse(self) -> None:
        """Note that the ranks of this attempt are ended because another host was lost."""
        self._is_excused = True

    def _made_progress(self) -> bool:
        """Return whether the attempt that ends made progress.

        It did if it is the first one, if another host was lost, if the checkpoints or the heartbeat
        file were written or cannot be examined in time, or if it was longer than the limit. Reads
        the state of these files, and keeps it for the next comparison.
        """
        before, self._files = self._files, self._state_of_files()
        if not self._is_measured or self._is_excused:
            return True
        if None in self._files or self._files != before:
            return True
        return time.monotonic() - self._began > self._longest

    def _state_of_files(self) -> tuple[int | None, ...]:
        """Return a value for the checkpoints, and one for the heartbeat file, if the job has them.

        A value changes when the files are written. None if they cannot be examined in time.
        """
        from trainworks_launcher.contract.checkpoints import state_of  # only a restart needs it

        inspections: list[Callable[[], int | None]] = []
        if self._checkpoints:
            inspections.append(lambda: state_of(self._checkpoints))
        if self._heartbeat:
            inspections.append(lambda: written_at(self._heartbeat))
        return tuple(run_in_time(inspect, None) for inspect in inspections)


def _place(rank: Rank) -> int:
    """Return the number of a rank on this host, which no other rank of an attempt has.

    Its global rank may be another one after a restart, because the hosts may be others.
    """
    return rank.local if rank.local >= 0 else rank.number
