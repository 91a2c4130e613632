"""Downloads as a person sees them: how far all of them are, and the one that comes now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainworks.terminal.output import say
from trainworks.terminal.progress import BYTES, DISPLAY, Task
from trainworks.terminal.words import amount


class Fetching:
    """What ``host.downloads.Client`` tells, shown below a task."""

    def __init__(self) -> None:
        """Begin with nothing to show."""
        self._task: Task | None = None
        self._before = 0
        self._file: tuple[str, int, int] | None = None

    @contextmanager
    def shown(self, title: str, total: int = 0) -> Iterator[Task]:
        """Show downloads for the time of the ``with`` block; ``total`` is their size in bytes, 0: nobody knows."""
        with DISPLAY.task(title, total, BYTES, rows=self._rows) as self._task:
            try:
                yield self._task
            finally:
                self._task = None

    def __call__(self, name: str, size: int, total: int) -> None:
        """Take how far a download is."""
        task = self._task
        if self._file is None or self._file[0] != name:
            self._before = task.done if task is not None else 0
            if size:
                say(f"  {name}: resumed at {amount(size)}")
                if task is not None:
                    task.skip(size)
        self._file = (name, size, total)
        if task is not None:
            task.reach(self._before + size)

    def _rows(self) -> list[str]:
        if self._file is None:
            return []
        name, size, total = self._file
        return [f"  {amount(size)}{f' of {amount(total)}' if total else ''}  {name}"]
