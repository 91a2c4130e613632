"""Sidecars: processes beside a host's command, for example parameter servers. They start before
the command, and end with the job.

Sidecars serve the commands of all hosts, so a sidecar that fails is the job's failure. One that
ends with status 0 has done its work. A stop signal does not go to sidecars: the programs that they
serve may still have to save something.
"""

from __future__ import annotations

from typing import Callable, Sequence

from trainworks_launcher.plan.plan import Auxiliary
from trainworks_launcher.supervise.processes.processes import Child


class Sidecars:
    """The sidecars of one host."""

    def __init__(self, rows: Sequence[Auxiliary], start: Callable[[Auxiliary], Child]) -> None:
        """Start nothing yet.

        Args:
            rows: The sidecars of the plan.
            start: Starts one sidecar; raises OSError.
        """
        self._rows = tuple(rows)
        self._start = start
        self._running: list[tuple[Auxiliary, Child]] = []

    def start(self) -> None:
        """Start all sidecars, in order. Raises OSError if one cannot be started."""
        for row in self._rows:
            self._running.append((row, self._start(row)))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids whose status is taken by ``failures``."""
        return tuple(child.pid for _, child in self._running)

    def failures(self) -> list[tuple[Auxiliary, Child]]:
        """Read the status of the sidecars that have ended; return those that have failed.

        Each is returned once. A sidecar that ended with status 0 is only forgotten.
        """
        failed: list[tuple[Auxiliary, Child]] = []
        running: list[tuple[Auxiliary, Child]] = []
        for row, child in self._running:
            if not child.has_just_ended():
                running.append((row, child))
                continue
            child.drain()
            if child.returncode:
                failed.append((row, child))
        self._running = running
        return failed

    def end(self) -> None:
        """End the sidecars that still run (SIGKILL): they have nothing to save."""
        running, self._running = self._running, []
        for _, child in running:
            if child.running:
                child.kill()
