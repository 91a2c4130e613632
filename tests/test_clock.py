"""The clock of the launcher's bounds: it gives way to other work on the
machine, and not for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from trainworks_testing.clock import PRESSURE, assert_within, start_clock

BUSY = (
    sys.executable,
    "-c",
    "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass",
)


def test_in_time_is_in_time() -> None:
    now = time.monotonic()
    assert_within(1, now - 0.9, now)


def test_what_lies_before_the_first_sample_is_late_on_any_machine() -> None:
    now = start_clock()
    with pytest.raises(
        AssertionError, match=r"^3600\.00 s, .* of them without a processor; what it printed"
    ):
        assert_within(1, now - 3600, now, "what it printed")


@pytest.mark.skipif(
    not PRESSURE.exists(), reason=f"no {PRESSURE}: this kernel does not count the time"
)
def test_seconds_without_a_processor_are_taken_off() -> None:
    """Start more processes than processors: some of them wait most of the time, until the last one
    ends.
    """
    began = start_clock()
    processes = [subprocess.Popen(BUSY) for _ in range(6 * (os.cpu_count() or 1))]
    for process in processes:
        process.wait()
    end = time.monotonic()
    assert end - began > 2
    assert_within(0.6 * (end - began), began, end)
