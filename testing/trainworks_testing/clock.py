"""Measure bounds in seconds on a machine that has other work: the promises of the launcher.

A promise holds for a machine on which the launcher gets a processor when it wants one. Tests run
beside others, so the time in which something on this machine waited for a processor is taken off,
as the kernel counts it (``some`` in ``/proc/pressure/cpu``, Documentation/accounting/psi.rst). How
much is taken off is bounded: twice the promise, or as many times the promise as there are runnable
threads for each processor (``procs_running`` in ``/proc/stat``, proc(5)). So a launcher that takes
more than three times as long fails on a machine that does little else.
"""

from __future__ import annotations

import bisect
import functools
import os
import threading
import time
from pathlib import Path

PATIENCE = 300.0
"""Seconds after which a test gives up on an event that has to come. This is not a promise: nothing
takes a tenth of the time.
"""

PRESSURE = Path("/proc/pressure/cpu")
_STATISTICS = Path("/proc/stat")
_BETWEEN_SAMPLES = 0.1
_LONGEST = 1 << 20
"""Bytes; the statistics of a large machine have some kilobytes."""

_AT_MOST = 2.0
"""How many times the promise is taken off at most on a machine with no more threads to run than
that per processor.
"""


class _Pressure:
    """The time that something has waited for a processor, and the threads that wanted one, at
    moments of time.
    """

    def __init__(self) -> None:
        # Opened once: tests listen to the files that the tested code opens.
        self._files = [os.open(path, os.O_RDONLY) for path in (PRESSURE, _STATISTICS)]
        self._moments: list[float] = []
        self._stalled: list[float] = []
        self._runnable: list[int] = []
        self._take()
        threading.Thread(target=self._take_samples, daemon=True).start()

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """Return the seconds of stall, and the threads per processor, of samples that lie between
        these moments.

        The moments are of ``time.monotonic``. The seconds are never too many.
        """
        moments = list(self._moments)
        first, last = bisect.bisect_left(moments, begin), bisect.bisect_right(moments, end) - 1
        if first >= last:
            return 0.0, 0.0
        runnable = sum(self._runnable[first : last + 1]) / (last + 1 - first)
        return self._stalled[last] - self._stalled[first], runnable / (os.cpu_count() or 1)

    def _take_samples(self) -> None:
        while True:
            time.sleep(_BETWEEN_SAMPLES)
            self._take()

    def _take(self) -> None:
        pressure, statistics = (os.pread(file, _LONGEST, 0).decode("ascii") for file in self._files)
        stalled = float(pressure.partition("total=")[2].split()[0]) / 1e6
        # The thread that counts is one of them.
        runnable = int(statistics.partition("procs_running ")[2].split()[0]) - 1
        self._runnable.append(runnable)
        self._stalled.append(stalled)
        self._moments.append(time.monotonic())


@functools.cache
def _pressure() -> _Pressure | None:
    return _Pressure() if PRESSURE.exists() else None


def start_clock() -> float:
    """Return the moment, and take samples from now on: earlier time is not taken off."""
    _pressure()
    return time.monotonic()


def crowd_since(begin: float) -> float:
    """Return how many threads wanted each processor, on average, since a moment of
    ``time.monotonic``.
    """
    pressure = _pressure()
    return pressure.between(begin, time.monotonic())[1] if pressure else 0.0


def assert_within(seconds: float, begin: float, end: float, text: str = "") -> None:
    """Fail with ``text`` unless no more than ``seconds`` lie between two moments of
    ``time.monotonic``.
    """
    pressure = _pressure()
    stalled, crowd = pressure.between(begin, end) if pressure else (0.0, 0.0)
    stalled = min(stalled, max(_AT_MOST, crowd) * seconds)
    seconds_taken = end - begin
    assert seconds_taken - stalled <= seconds, (
        f"{seconds_taken:.2f} s, {stalled:.2f} of them without a processor; {text}"
    )
