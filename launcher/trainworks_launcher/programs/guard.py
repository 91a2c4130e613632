"""End the processes of a job whose launcher died without ending them: killed, or for lack of
memory.

Started by the launcher as ``python3 -IS guard.py MARK DIRECTORY``, with a pipe as its input that
only the launcher holds. The launcher writes the process id of each command that it starts, a line
each. The end of the pipe is the end of the launcher. Then the guard kills these commands, their
children, the sessions of both, and every process with the mark, and removes the directory of the
job. A launcher that ends in order ends its guard.

The mark is a limit of resources that all processes of the job have inherited (``processes.guard``);
0 for none.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

_LIMIT = "Max msgqueue size"
"""Name of the limit that is the mark, in proc(5), limits."""

# Places of fields in proc(5), stat, behind the program's name: three less than their numbers there.
_STATE, _PARENT, _SESSION, _STARTED = 0, 1, 3, 19

_LIMIT_SECONDS = 10.0
_BETWEEN_SECONDS = 0.02


def main(mark: str, directory: str) -> int:
    """Wait for the end of the launcher, then kill the processes of its job on this host.

    Removes the job's directory, and prints a line if a process was killed.

    Args:
        mark: The mark of the job's processes; ``"0"`` for none.
        directory: The job's directory.

    Returns:
        0.
    """
    # A scheduler may signal each process of a job, and the guard has to outlive the launcher.
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    # Reads until the pipe ends, with the launcher. The start time tells a command from a later
    # process with its number.
    commands = set()
    for line in sys.stdin:
        pid = int(line)
        commands.add((pid, _stat(pid).started))
    sessions: set[str] = set()
    deadline = time.monotonic() + _LIMIT_SECONDS
    killed = 0
    # Again and again, because a process may start another one before its own end.
    while time.monotonic() < deadline:
        pids = _processes_of_job(commands, mark, sessions)
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed += len(pids)
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


class _Stat:
    """A process by proc(5), ``stat``.

    Attributes:
        parent: The parent's process id.
        started: Start time in clock ticks since boot; ``""`` if the process is gone.
        session: Its session, as text.
        state: For example ``"S"``; ``"X"`` if the process is gone.
    """

    def __init__(self, parent: int, started: str, session: str, state: str) -> None:
        self.parent = parent
        self.started = started
        self.session = session
        self.state = state


def _processes_of_job(commands: set[tuple[int, str]], mark: str, sessions: set[str]) -> set[int]:
    """Return the ids of the running processes of the job.

    These are the commands, processes with the mark, the sessions of both, and all their
    descendants.

    Args:
        commands: Process id and start time of each command.
        mark: The mark of the job.
        sessions: Sessions that processes of the job lead; new ones are added. So a process is
            found that has left its parent, and whose session leader has ended.
    """
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  (names, not paths)
    table = {pid: _stat(pid) for pid in pids if pid != os.getpid()}
    of_job = set()
    for pid, row in table.items():
        if (pid, row.started) in commands or row.session in sessions or _has_mark(pid, mark):
            of_job.add(pid)
    # Add children until no process is new.
    size = 0
    while size != len(of_job):
        size = len(of_job)
        of_job |= {pid for pid, row in table.items() if row.parent in of_job}
    running = {pid for pid in of_job if table[pid].state not in "ZX"}
    sessions |= {table[pid].session for pid in running if table[pid].session == str(pid)}
    return running


def _stat(pid: int) -> _Stat:
    """Read proc(5), ``stat``, of a process; see ``_Stat`` for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as opened:  # noqa: PTH123
            fields = opened.read().rpartition(")")[2].split()
    except OSError:
        return _Stat(0, "", "", "X")
    return _Stat(int(fields[_PARENT]), fields[_STARTED], fields[_SESSION], fields[_STATE])


def _has_mark(pid: int, mark: str) -> bool:
    """Return whether a process has inherited the mark.

    The environment is not read: a process that hangs in a driver may hold the lock for that.
    """
    try:
        with open(f"/proc/{pid}/limits", encoding="ascii", errors="replace") as opened:  # noqa: PTH123
            lines = opened.read().splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith(_LIMIT):
            return mark != "0" and line[len(_LIMIT) :].split()[0] == mark
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
