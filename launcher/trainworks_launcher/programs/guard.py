"""Ends the processes of a job when its launcher has died without doing so: killed, or for lack of memory.

Started by the launcher as ``python3 -IS guard.py VARIABLE DIRECTORY``, with a pipe as its input that only the launcher
holds. The launcher writes the process id of each command that it starts, a line each; the end of the pipe is the end of
the launcher. Then these commands, what they have started, and every process with ``VARIABLE=DIRECTORY`` in its
environment are killed, and the directory of the job is removed. A launcher that ends in order ends its guard.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

_LIMIT_SECONDS = 10.0
_BETWEEN_SECONDS = 0.02


def main(variable: str, directory: str) -> int:
    """Wait for the end of the launcher, then end the job."""
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)  # a scheduler may signal each process of a job
    commands = set()
    for line in sys.stdin:
        pid = int(line)
        commands.add((pid, _stat(pid)[1]))
    mark = f"{variable}={directory}".encode()
    sessions: set[str] = set()
    deadline = time.monotonic() + _LIMIT_SECONDS
    killed = 0
    while time.monotonic() < deadline:
        found = _belonging(commands, mark, sessions)
        if not found:
            break
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed += len(found)
        select.select((), (), (), _BETWEEN_SECONDS)
    if killed:
        with contextlib.suppress(OSError):
            os.write(2, b"trainworks: the launcher has died; the processes of its job on this host were killed\n")
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
    return 0


def _belonging(commands: set[tuple[int, str]], mark: bytes, sessions: set[str]) -> set[int]:
    """Return the processes of the job that run. sessions: those that they lead; it grows."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  (names, not paths)
    table = {pid: _stat(pid) for pid in pids if pid != os.getpid()}
    found = {pid for pid, row in table.items() if (pid, row[1]) in commands or row[2] in sessions or _has(pid, mark)}
    size = 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, row in table.items() if row[0] in found}
    found = {pid for pid in found if table[pid][3] not in "ZX"}
    sessions |= {table[pid][2] for pid in found if table[pid][2] == str(pid)}
    return found


def _stat(pid: int) -> tuple[int, str, str, str]:
    """Return a process's parent, start time, session and state, of proc(5); the state is X if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as opened:  # noqa: PTH123
            fields = opened.read().rpartition(")")[2].split()
    except OSError:
        return 0, "", "", "X"
    return int(fields[1]), fields[19], fields[3], fields[0]


def _has(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as opened:  # noqa: PTH123
            return mark in opened.read().split(b"\0")
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
