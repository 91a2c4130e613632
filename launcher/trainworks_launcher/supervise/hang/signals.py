"""Ask a process for its stacks through Python's own faulthandler, where there is no py-spy.

``programs/python/sitecustomize.py`` registers faulthandler in every Python of the job, without a
change of the script: the process writes its stacks when it gets a signal. The signal goes only to a
process with a handler, because the signal's default is to end the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path

SIGNAL = 50
"""A real-time signal that programs do not use; schedulers and frameworks take USR1 and USR2."""

_ANSWER_SECONDS = 1.0
"""How long a process has to write its stacks."""

_POLL_SECONDS = 0.01
"""Seconds between two looks at the size of the file."""

MEMORY = "trainworks-stacks"
"""Name of the file in memory (memfd_create(2)) to which a process writes.

Forked children share the file.
"""


def ask(pid: int) -> str:
    """Request the stacks of a process by a signal, and wait for them, at most a second.

    Returns:
        The report of faulthandler. ``""`` if the process has no handler or no file for the report,
        does not answer in time, or is gone.
    """
    try:
        if not _has_handler(pid, SIGNAL):
            return ""
        file = _find_report_file(pid)
        if file is None:
            return ""
        # Earlier reports stay in the file.
        before = file.stat().st_size
        os.kill(pid, SIGNAL)
        _wait_for_growth(file, before)
        with file.open("rb") as opened:
            opened.seek(before)
            return opened.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _wait_for_growth(file: Path, size: int) -> None:
    """Wait, at most a second, until a file is larger than a size and no longer grows.

    Blocks the thread. Returns also if the file has not grown in time. Raises OSError if the process
    that holds the file is gone.
    """
    deadline = time.monotonic() + _ANSWER_SECONDS
    before, now = size, size
    while time.monotonic() < deadline:
        has_grown = now > size
        if has_grown and now == before:
            return
        select.select((), (), (), _POLL_SECONDS)
        before, now = now, file.stat().st_size


def _find_report_file(pid: int) -> Path | None:
    """Return the file in memory to which a process writes its stacks; None if it has none.

    The path is that of the process's descriptor. Raises OSError if the process is gone.
    """
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(f"/memfd:{MEMORY} "):
                return path
    return None


def _has_handler(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal. Source: proc(5), SigCgt of status.

    Raises OSError if the process is gone.
    """
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            # A bit for each signal, in hexadecimal digits.
            handled = int(value, 16)
            return bool(handled >> (number - 1) & 1)
    return False
