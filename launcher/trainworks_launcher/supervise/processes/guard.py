"""Start the guard (programs/guard.py): a process that ends this host's job if the launcher dies
without ending it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path


class Guard:
    """The guard of one job.

    Process 1 needs no guard: when it ends, the kernel ends all others.
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, python: str, launcher: str, directory: Path) -> None:
        """Start the guard; do nothing as process 1. Marks this process (``_mark``).

        Args:
            python: Path of the launcher's Python.
            launcher: The launcher's directory.
            directory: The runtime directory, by which the guard recognises processes of the job.

        Raises:
            OSError: The guard cannot be started.
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
        """The guard's process id while the guard runs, else nothing."""
        if self._process is None or self._process.poll() is not None:
            return ()
        return (self._process.pid,)

    def tell(self, pid: int) -> None:
        """Report a command's process id to the guard; do nothing without a guard.

        So the guard finds the command even if it changes its environment.
        """
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"%d\n" % pid)

    def end(self) -> None:
        """End the guard (SIGKILL): the launcher has ended the job itself."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()


_MARKS = 1 << 16
"""Number of different marks."""


def _mark() -> int:
    """Mark this process for the guard, and with it every process that it starts from now on.

    The mark is the soft limit of bytes in POSIX message queues, less a random number below
    ``_MARKS``: no job notices that. A limit of resources is inherited even by a process that
    changes its session, its parent and its environment, and can be read without a lock of the
    process (proc(5), limits).

    Returns:
        The mark; 0 if the limit is too low, or cannot be changed.
    """
    import resource  # imported late: process 1 needs no guard

    limit = resource.RLIMIT_MSGQUEUE
    soft, hard = resource.getrlimit(limit)
    most = hard if hard != resource.RLIM_INFINITY else soft
    # A low limit would be noticed by a job with message queues.
    if most < 2 * _MARKS:
        return 0
    # Two random bytes: a number below _MARKS. The hard limit stays as it is.
    mark = int(most - 1 - int.from_bytes(os.urandom(2), "big"))
    try:
        resource.setrlimit(limit, (mark, hard))
    except (OSError, ValueError):
        return 0
    return mark
