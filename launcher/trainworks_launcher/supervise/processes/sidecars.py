"""The processes beside a host's command: parameter servers. Started before it, ended with the job.

They serve the commands of all hosts, so one that ends with a failure is the job's failure, and one
that ends well (its work is done) is nothing. A stop signal does not go to them: the programs they
serve may want to save something first.
"""

from __future__ import annotations

from typing import Callable, Sequence

from trainworks_launcher.plan.plan import Auxiliary
from trainworks_launcher.supervise.processes.processes import Child


class Auxiliaries:
    """Those of one host."""

    def __init__(self, rows: Sequence[Auxiliary], start: Callable[[Auxiliary], Child]) -> None:
        """Nothing is started yet. start: starts one, or raises OSError."""
        self._rows = tuple(rows)
        self._start = start
        self._running: list[tuple[Auxiliary, Child]] = []

    def start(self) -> None:
        """Start all, in order. Raises OSError if one cannot be started."""
        for row in self._rows:
            self._running.append((row, self._start(row)))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids whose status is taken by ``failures``."""
        return tuple(child.pid for _, child in self._running)

    def failures(self) -> list[tuple[Auxiliary, Child]]:
        """Those that have ended with a failure since the last call."""
        ended = [(row, child) for row, child in self._running if child.has_just_ended()]
        for _, child in ended:
            child.drain()
        self._running = [(row, child) for row, child in self._running if child.running]
        return [(row, child) for row, child in ended if child.returncode]

    def end(self) -> None:
        """End those that still run: they have nothing of their own to save."""
        running, self._running = self._running, []
        for _, child in running:
            if child.running:
                child.kill()
