"""Starters of a host's ranks that are stopped while some of their ranks are saving.

A stop signal goes to the ranks. A rank that dies of the signal, or ends with another status, is a
failure for its starter: mpirun and its daemons then send KILL to the other ranks a second later,
torchrun after 30 s, even while these are saving. So the starter is stopped (SIGSTOP) at the first
such end, and continued (SIGCONT) when the other ranks have ended. The starter then sees all ends,
and ends as it would have done.

The starter is not stopped earlier: ranks that still run may need it. MPI_Finalize waits for
mpirun's daemon, and torchrun may serve the ranks' store.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Iterable

from trainworks_launcher.supervise.processes import processes


class StoppedStarters:
    """The stopped starters of one host. Every method runs in the loop's thread."""

    def __init__(self) -> None:
        """Stop none yet."""
        self._held: dict[int, str] = {}  # process id -> its start time

    @property
    def any(self) -> bool:
        """Whether a starter is stopped."""
        return bool(self._held)

    def hold(self, ranks: Iterable[int]) -> None:
        """Stop the parents of ranks (SIGSTOP), unless they are stopped already.

        Args:
            ranks: Process ids.
        """
        for rank in ranks:
            parent = processes.stat(rank).parent
            # A rank whose starter has ended is this process's own child, or one of process 1.
            if parent > 1 and parent != os.getpid() and parent not in self._held:
                self._held[parent] = processes.stat(parent).started
                processes.send(parent, signal.SIGSTOP)

    def release(self) -> None:
        """Continue all stopped starters (SIGCONT)."""
        held, self._held = self._held, {}
        for pid, started in held.items():
            # The number may belong to a new process by now.
            if processes.stat(pid).started == started:
                processes.send(pid, signal.SIGCONT)


def have_left_the_script(ranks: Iterable[int], runtime: Path) -> bool:
    """Return whether the Python of each of these processes has noted its end.

    Such a rank has nothing left to save, and may wait in MPI_Finalize for a stopped daemon.

    Args:
        ranks: Process ids.
        runtime: The runtime directory, which has the file of records.
    """
    from trainworks_launcher.supervise.outcome import records  # only a stop needs it

    content = b""
    with contextlib.suppress(OSError):
        content = Path(runtime, records.FILE).read_bytes()
    # A record of another thread than the main one is not the end of its Python.
    ended = {row.pid for row in records.read(content) if not row.thread}
    return ended.issuperset(ranks)
