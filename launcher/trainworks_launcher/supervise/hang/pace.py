"""How long a job is silent between two of its outputs, and which silence is too long for it. Pure.

A job that prints a line each second for minutes and then none for 30 s is worth a look long before the limit of ten
minutes. One that is silent for long while it works says so itself, by the pauses that it has made.
"""

from __future__ import annotations

import math

SHORTEST = 30.0
"""Seconds: no silence below this is looked into before the limit."""

MULTIPLE = 4.0
"""So many times its longest pause must a job be silent."""

FIRST_LOOK = 0.5
"""Share of the silence after which the ranks are looked at: twice the longest pause, so a steady job never is."""

_WARM_UP = 0.25
_STEADY = 0.1


class Pace:
    """The pauses of a job.

    A job is warm once it has printed for a quarter of the limit without a pause of more than a tenth of it: its start
    (imports, data, the first compilation) is over.
    """

    def __init__(self, limit: float) -> None:
        """Nothing was heard yet. limit: seconds without progress that count as a hang at any pace."""
        self.longest = 0.0
        """Seconds of the longest pause."""
        self._limit = limit
        self._first = self._last = 0.0

    def hear(self, printed: float) -> None:
        """Something was printed. printed: the time of the last output (monotonic clock), whether it is new or not."""
        pause = printed - self._last
        if pause <= 0:
            return
        if not self._first or (pause > self._limit * _STEADY and not self._is_warm):
            self._first, self.longest = printed, 0.0
        else:
            self.longest = max(self.longest, pause)
        self._last = printed

    def excuse(self, seconds: float) -> None:
        """A silence of so many seconds was no hang: count it as a pause."""
        self.longest = max(self.longest, seconds)

    @property
    def early(self) -> float:
        """Seconds of silence that are too many for this job; the limit itself while its pace is not known."""
        if not self._is_warm:
            return self._limit
        return min(self._limit, max(SHORTEST, float(math.ceil(MULTIPLE * self.longest))))

    @property
    def _is_warm(self) -> bool:
        return self._first > 0 and self._last - self._first >= self._limit * _WARM_UP
