"""Show downloads: how far all of them are, and the file that comes now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainworks.terminal.formatting import amount
from trainworks.terminal.output import say
from trainworks.terminal.progress import BYTES, DISPLAY, Task


class Fetching:
    """Shows downloads: receives the progress of ``host.downloads.Client`` (``Watch``)."""

    def __init__(self) -> None:
        """Begin with nothing to show."""
        # The task of all downloads, and that of the file that comes now.
        self._task: Task | None = None
        self._file: Task | None = None
        self._name = ""
        # Bytes of all files before this one.
        self._before = 0

    @contextmanager
    def shown(self, title: str, total: int = 0) -> Iterator[Task]:
        """Show downloads as one task for the time of the ``with`` block.

        Args:
            title: The action in a word or two: ``fetching``.
            total: The size of all files in bytes; 0 if it is not known.
        """
        with DISPLAY.task(title, total, BYTES) as self._task:
            try:
                yield self._task
            finally:
                self._task = None
                self._end_file()

    def __call__(self, name: str, size: int, total: int) -> None:
        """Show how far a download is.

        Args:
            name: The file's name; another one than before begins the next file.
            size: The bytes that are there. In the first call of a file: those of an earlier run.
            total: All bytes of the file; 0 if they are not known.
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
                # Bytes of an earlier run took no time now.
                if size:
                    task.skip(size)
                    self._file.skip(size)
        if task is not None:
            task.reach(self._before + size)
        if self._file is not None:
            self._file.reach(size)

    def _end_file(self) -> None:
        """Remove the task of the current file from the display."""
        self._name = ""
        if self._file is not None:
            DISPLAY.remove(self._file)
            self._file = None
