"""Bounds in seconds, on a machine that has other work: what a promise of the launcher is measured with.

A promise holds for a machine on which the launcher gets a processor when it wants one. Tests run beside others, so the
time in which something on this machine waited for a processor is taken off, as the kernel counts it (``some`` in
``/proc/pressure/cpu``, Documentation/accounting/psi.rst). At most twice the bound is taken off: a launcher that waits
for three times as long fails however busy the machine is.
"""

from __future__ import annotations

import bisect
import functools
import threading
import time
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")
_BETWEEN_SAMPLES = 0.1


class _Pressure:
    """How long something has waited for a processor, at moments of ``time.monotonic``."""

    def __init__(self) -> None:
        self._moments: list[float] = []
        self._stalled: list[float] = []
        self._take()
        threading.Thread(target=self._take_samples, daemon=True).start()

    def stalled_between(self, begin: float, end: float) -> float:
        """Seconds of stall, of samples that lie between these moments: never too many."""
        moments = list(self._moments)
        first, last = bisect.bisect_left(moments, begin), bisect.bisect_right(moments, end) - 1
        return self._stalled[last] - self._stalled[first] if first < last else 0.0

    def _take_samples(self) -> None:
        while True:
            time.sleep(_BETWEEN_SAMPLES)
            self._take()

    def _take(self) -> None:
        stalled = float(PRESSURE.read_text("ascii").partition("total=")[2].split()[0]) / 1e6
        self._stalled.append(stalled)
        self._moments.append(time.monotonic())


@functools.cache
def _pressure() -> _Pressure | None:
    return _Pressure() if PRESSURE.exists() else None


def start_clock() -> None:
    """Take samples from now on: what comes before the first one is not taken off."""
    _pressure()


def assert_within(seconds: float, begin: float, end: float, text: str = "") -> None:
    """Fail with ``text`` unless no more than ``seconds`` lie between two moments of ``time.monotonic``."""
    pressure = _pressure()
    stalled = min(pressure.stalled_between(begin, end) if pressure else 0.0, 2 * seconds)
    took = end - begin
    assert took - stalled <= seconds, f"{took:.2f} s, {stalled:.2f} of them without a processor; {text}"
