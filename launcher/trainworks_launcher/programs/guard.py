"""Ends the processes of a job when its launcher has died without doing so:
killed, or for lack of memory.

Started by the launcher as ``python3 -IS guard.py MARK DIRECTORY``, with a pipe as its input that
only the launcher holds. The launcher writes the process id of each command that it starts, a line
each; the end of the pipe is the end of the launcher. Then these commands, what they have started,
the sessions that these lead, and every process with the mark are killed, and the directory of the
job is removed. A launcher that ends in order ends its guard.

The mark is a limit of resources that all processes of the job have inherited (``processes.guard``);
0 if they have none.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

_LIMIT = "Max msgqueue size"
_LIMIT_SECONDS = 10.0
_BETWEEN_SECONDS = 0.02


def main(mark: str, directory: str) -> int:
    """Wait for the end of the launcher, then end the job."""
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)  # a scheduler may signal each process of a job
    commands = set()
    for line in sys.stdin:
        pid = int(line)
        commands.add((pid, _stat(pid)[1]))
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
            os.write(
                2,
                b"trainworks: the launcher has died;"
                b" the processes of its job on this host were killed\n",
            )
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
    return 0


def _belonging(commands: set[tuple[int, str]], mark: str, sessions: set[str]) -> set[int]:
    """Return the processes of the job that run. sessions: those that they lead; it grows."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  (names, not paths)
    table = {pid: _stat(pid) for pid in pids if pid != os.getpid()}
    found = {
        pid
        for pid, row in table.items()
        if (pid, row[1]) in commands or row[2] in sessions or _has(pid, mark)
    }
    size = 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, row in table.items() if row[0] in found}
    found = {pid for pid in found if table[pid][3] not in "ZX"}
    sessions |= {table[pid][2] for pid in found if table[pid][2] == str(pid)}
    return found


def _stat(pid: int) -> tuple[int, str, str, str]:
    """Return a process's parent, start time, session and state, of proc(5).

    The state is X if it is gone.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as opened:  # noqa: PTH123
            fields = opened.read().rpartition(")")[2].split()
    except OSError:
        return 0, "", "", "X"
    return int(fields[1]), fields[19], fields[3], fields[0]


def _has(pid: int, mark: str) -> bool:
    """Return whether a process has inherited the mark.

    Not by its environment: one that hangs in a driver may hold the lock that such a read waits for.
    """
    try:
        with open(f"/proc/{pid}/limits", encoding="ascii", errors="replace") as opened:  # noqa: PTH123
            lines = opened.read().splitlines()
    except OSError:
        return False
    return mark != "0" and any(
        line.startswith(_LIMIT) and line[len(_LIMIT) :].split()[0] == mark for line in lines
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
