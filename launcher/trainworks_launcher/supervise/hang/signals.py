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
_POLL_SECONDS = 0.01


MEMORY = "trainworks-stacks"
"""Name of the file in memory (memfd_create(2)) to which a process writes.

Forked children share the file.
"""


def ask(pid: int) -> str:
    """Request the stacks of a process; ``""`` without a handler, or without an answer in time."""
    try:
        file = _memory_of(pid) if _catches(pid, SIGNAL) else None
        if file is None:
            return ""
        before = file.stat().st_size
        os.kill(pid, SIGNAL)
        _wait_for(file, before)
        with file.open("rb") as opened:
            opened.seek(before)
            return opened.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _wait_for(file: Path, size: int) -> None:
    """Wait, bounded, until a file has grown and no longer grows."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    before, now = size, size
    while time.monotonic() < deadline and not now == before > size:
        select.select((), (), (), _POLL_SECONDS)
        before, now = now, file.stat().st_size


def _memory_of(pid: int) -> Path | None:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(f"/memfd:{MEMORY} "):
                return path
    return None


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal. Source: proc(5), SigCgt of status."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (number - 1) & 1)
    return False
