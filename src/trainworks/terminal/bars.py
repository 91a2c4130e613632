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

BAR_COLUMNS = 12


class Bars:
    """One row for each task, below everything that is written, until ``stop``."""

    def __init__(self, stream: TextIO, tasks: Iterable[Task]) -> None:
        """Show tasks on a terminal."""
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
            _text("what"),
            BarColumn(BAR_COLUMNS),
            _text("how_far"),
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
        """Show one more task."""
        self._rows[task] = self._progress.add_task(task.title, mine=task)

    def remove(self, task: Task) -> None:
        """Show a task no longer."""
        self._progress.remove_task(self._rows.pop(task))

    def write(self, text: str, *, one_row: bool) -> None:
        """Write a line above the bars; a long one is cut or goes on in the next row."""
        print_line = self._progress.console.print
        if one_row:
            print_line(text, no_wrap=True, overflow="ellipsis")
        else:
            print_line(text, soft_wrap=True)

    def stop(self) -> None:
        """Take the bars off the terminal."""
        self._progress.stop()


def _text(attribute: str) -> TextColumn:
    """Return a column with a text of our own task, cut where a row is too narrow."""
    cut = Column(no_wrap=True, overflow="ellipsis")
    return TextColumn(f"{{task.fields[mine].{attribute}}}", markup=False, table_column=cut)


class _Progress(rich.progress.Progress):
    def get_renderables(self) -> Iterator[_Narrower]:
        for row in self.tasks:
            # Without a total, rich's bar moves and says nothing.
            row.total, row.completed = row.fields["mine"].total or None, row.fields["mine"].done
        yield _Narrower(self.make_tasks_table(self.tasks))


class _Narrower:
    """Room for the ^C that a terminal shows: behind a full row it would begin
    another one, which stays.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return console.render(self.table, options.update_width(options.max_width - 2))
