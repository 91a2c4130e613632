"""How pytest-xdist shares files out among processes: ``--dist loadfile``."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]


class FileSchedule(LoadFileScheduling):  # type: ignore[misc]
    """Shares files out, and goes on after the end of a process.

    pytest-xdist's own schedule gives a test that ended its process to the next one, which ends in
    it, too (its pull request 1371). And it can wait for ever: for a process that got tests which
    had run already (issue 1378), or one test alone (issue 1327), because a process begins a test
    when it knows the next one.
    """

    def remove_node(self, node: Any) -> str | None:
        """Remove a process that has ended, and hand what it has not begun to the others.

        Args:
            node: The process, as pytest-xdist names it.

        Returns:
            The test that was running; ``None`` if the process had nothing to run.

        Raises:
            KeyError: The process is not of this schedule.
        """
        running: str | None = None
        remaining = {}
        for file, tests in self.assigned_work.pop(node).items():
            names = [name for name, is_completed in tests.items() if not is_completed]
            if names and running is None:
                running = names.pop(0)
            if names:
                remaining[file] = dict.fromkeys(names, False)
        self.workqueue.update(remaining)
        if remaining:
            for other in self.nodes:
                self._reschedule(other)
        return running

    def _reschedule(self, node: Any) -> None:
        """Give a process files until it has two tests, or let it end if none is left."""
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
