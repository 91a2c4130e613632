"""The bars of a terminal, in rich's own columns: what is done, a bar, and how far it is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TextIO

import rich.progress
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, TextColumn
from rich.table import Column, Table

from trainworks.terminal.progress import Task

PAINTED_PER_SECOND = 5
"""How often the bars are painted again."""

BAR_COLUMNS = 12
"""The width of a bar."""


class Bars:
    """One row for each task, below everything that is written, until ``stop``."""

    def __init__(self, stream: TextIO, tasks: Iterable[Task]) -> None:
        """Show tasks on a terminal, until ``stop``.

        Args:
            stream: The terminal.
            tasks: The tasks, from top to bottom.
        """
        # A terminal knows its width better than these variables do, and it may change.
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
        }
        console = Console(
            file=stream,
            force_terminal=True,
            highlight=False,
            markup=False,
            emoji=False,
            _environ=environment,
        )
        self._rows: dict[Task, rich.progress.TaskID] = {}
        self._progress = _Progress(
            _make_text_column("what"),
            BarColumn(BAR_COLUMNS),
            _make_text_column("how_far"),
            console=console,
            refresh_per_second=PAINTED_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        for task in tasks:
            self.add(task)
        self._progress.start()

    def add(self, task: Task) -> None:
        """Add a row for a task, below the others."""
        self._rows[task] = self._progress.add_task(task.title, mine=task)

    def remove(self, task: Task) -> None:
        """Remove the row of a task."""
        self._progress.remove_task(self._rows.pop(task))

    def write(self, text: str, *, one_row: bool) -> None:
        """Write a line above the bars.

        Args:
            text: The line.
            one_row: Whether a line that is longer than a row is cut; otherwise it goes on in the
                next row.
        """
        print_line = self._progress.console.print
        if one_row:
            print_line(text, no_wrap=True, overflow="ellipsis")
        else:
            print_line(text, soft_wrap=True)

    def stop(self) -> None:
        """Remove the bars from the terminal, and stop painting them."""
        self._progress.stop()


def _make_text_column(attribute: str) -> TextColumn:
    """Return a column with a text of a task, cut where a row is too narrow.

    Args:
        attribute: The attribute of ``Task`` with the text: ``how_far``.
    """
    cut = Column(no_wrap=True, overflow="ellipsis")
    return TextColumn(f"{{task.fields[mine].{attribute}}}", markup=False, table_column=cut)


class _Progress(rich.progress.Progress):
    """rich's bars, which take the numbers of our own tasks each time they are painted."""

    def get_renderables(self) -> Iterator[_Narrower]:
        for row in self.tasks:
            task: Task = row.fields["mine"]
            # Without a total, rich's bar moves and says nothing.
            row.total = task.total or None
            row.completed = task.done
        yield _Narrower(self.make_tasks_table(self.tasks))


class _Narrower:
    """A table that is two columns narrower than the terminal.

    The columns are room for the ``^C`` that a terminal shows: behind a full row it would begin
    another row, which stays.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return console.render(self.table, options.update_width(options.max_width - 2))
