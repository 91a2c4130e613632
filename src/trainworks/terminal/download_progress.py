"""Show downloads: how far all of them are, and the file that comes now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainworks.terminal.formatting import amount
from trainworks.terminal.output import say
from trainworks.terminal.progress import BYTES, DISPLAY, Task


class Fetching:
    """Takes the reports of ``host.downloads.Client`` and shows them."""

    def __init__(self) -> None:
        """Begin with nothing to show."""
        self._task: Task | None = None
        self._file: Task | None = None
        self._name = ""
        self._before = 0

    @contextmanager
    def shown(self, title: str, total: int = 0) -> Iterator[Task]:
        """Show downloads for the time of the ``with`` block.

        ``total`` is their size in bytes, 0 if not known.
        """
        with DISPLAY.task(title, total, BYTES) as self._task:
            try:
                yield self._task
            finally:
                self._task = None
                self._end_file()

    def __call__(self, name: str, size: int, total: int) -> None:
        """Take how far a download is: the file's name, the bytes that are
        there, and all its bytes, 0 if not known.
        """
        task = self._task
        if self._name != name:
            self._end_file()
            self._name = name
            self._before = task.done if task is not None else 0
            if size:
                say(f"  {name}: resumed at {amount(size)}")
            if task is not None:
                self._file = DISPLAY.add(name, total, BYTES, log=False)
                for each in (task, self._file) if size else ():
                    each.skip(size)
        if task is not None:
            task.reach(self._before + size)
        if self._file is not None:
            self._file.reach(size)

    def _end_file(self) -> None:
        self._name = ""
        if self._file is not None:
            DISPLAY.remove(self._file)
            self._file = None
