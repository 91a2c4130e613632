"""The starters of a host's ranks, held while some of their ranks are saving.

A stop signal goes to the ranks. One that dies of it, or ends with another status, is a failure for
its starter: mpirun and its daemons then send KILL to the other ranks a second later, torchrun after
30 s, also where these are still saving. So the starter is stopped (SIGSTOP) as soon as the first
such end is seen, and goes on (SIGCONT) when the other ranks have ended. It sees all ends then, and
ends as it would have done.

Not from the beginning of the stop: while all ranks run, they may need it. MPI_Finalize waits for
mpirun's daemon, and torchrun may have the store of the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Iterable

from trainworks_launcher.supervise.processes import processes


class Held:
    """Those of one host. Every method runs in the loop's thread."""

    def __init__(self) -> None:
        """None is held."""
        self._held: dict[int, str] = {}

    @property
    def any(self) -> bool:
        """Whether one is held."""
        return bool(self._held)

    def hold(self, ranks: Iterable[int]) -> None:
        """Hold the parents of these processes."""
        for rank in ranks:
            parent = processes.stat(rank)[0]
            if parent > 1 and parent != os.getpid() and parent not in self._held:
                self._held[parent] = processes.stat(parent)[1]
                processes.send(parent, signal.SIGSTOP)

    def release(self) -> None:
        """Let all of them go on."""
        held, self._held = self._held, {}
        for pid, started in held.items():
            if processes.stat(pid)[1] == started:
                processes.send(pid, signal.SIGCONT)


def have_left_the_script(ranks: Iterable[int], runtime: Path) -> bool:
    """Return whether the Python of each of these processes has noted its end:
    nothing is being saved any more.

    It may wait in MPI_Finalize then, for the daemon that is held.
    """
    from trainworks_launcher.supervise.outcome import records  # only a stop needs it

    content = b""
    with contextlib.suppress(OSError):
        content = Path(runtime, records.FILE).read_bytes()
    ended = {row.pid for row in records.read(content) if not row.thread}
    return ended.issuperset(ranks)
