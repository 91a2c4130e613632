"""The process that ends the job of this host if the launcher dies without doing so
(programs/guard.py).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path


class Guard:
    """Nothing before ``start``. Process 1 needs none: with it the kernel ends all others."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, python: str, launcher: str, directory: Path) -> None:
        """Start it, for the job with this runtime directory.

        Raises OSError if it cannot be started.
        """
        if os.getpid() == 1:
            return
        words = (python, "-IS", f"{launcher}/programs/guard.py", str(_mark()), str(directory))
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """Its process id while it runs; its status is taken when it has ended."""
        return (
            (self._process.pid,)
            if self._process is not None and self._process.poll() is None
            else ()
        )

    def tell(self, pid: int) -> None:
        """Let it know a command; one that hides its environment is found by that."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"%d\n" % pid)

    def end(self) -> None:
        """The launcher has ended the job itself."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()


_MARKS = 1 << 16


def _mark() -> int:
    """Mark this process, and with it all that it starts from now on, for the guard.

    Returns the mark; 0 for none.

    A limit of resources is inherited whatever a process does to its session, its parent and its
    environment, and is read without a lock of the process (proc(5), limits). The mark is the soft
    limit of bytes in POSIX message queues, less a random number of some thousand: nothing that a
    job starts notices that.
    """
    import resource  # process 1 needs no guard

    limit = resource.RLIMIT_MSGQUEUE
    soft, hard = resource.getrlimit(limit)
    most = hard if hard != resource.RLIM_INFINITY else soft
    if most < 2 * _MARKS:
        return 0
    mark = int(most - 1 - int.from_bytes(os.urandom(2), "big"))
    try:
        resource.setrlimit(limit, (mark, hard))
    except (OSError, ValueError):
        return 0
    return mark
