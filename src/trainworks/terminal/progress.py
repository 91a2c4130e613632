"""Work that takes long, as a person sees it: on a terminal a display that moves, in a log a line now and then.

A process has one display, as it has one terminal. ``task`` adds a piece of work to it from wherever the work is done;
what is written meanwhile (``cli.output``) stands above it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import IO, TYPE_CHECKING, Final, TextIO, cast

from trainworks.terminal.words import amount, clock, row

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

BYTES: Final = "bytes"
"""The unit of what is sent, fetched or read; only there is a rate, and time left that follows from it."""

LOG_SECONDS: Final = 30.0
"""In a log a task says where it is so often, and not at all before that."""

RATE_SECONDS: Final = 10.0
"""How far a rate looks back."""

FORECAST_SECONDS: Final = 3.0
"""No remaining time follows from less."""

PAINTED_PER_SECOND: Final = 5

LONGEST_LINE: Final = 140
"""Characters of a step's line in a log."""

RELAY: Final = "TRAINWORKS_PROGRESS"
"""Set to 1 for a process whose stderr another one of ours shows: each state of its work is a text that ends in a
carriage return, each line one that ends in a newline."""


LABEL: Final[ContextVar[str]] = ContextVar("label", default="")
"""The name that stands before each line and each task of this thread (``output.labelled``)."""


def labelled_text(text: str) -> str:
    """Return a text after the label of this thread, if it has one."""
    label = LABEL.get()
    return f"{label}: {text}" if label else text


class Task:
    """One piece of work that takes long.

    Attributes:
        title: What is done, in a word or two.
        total: How much there is to do; 0: nobody knows.
        unit: Of what: ``BYTES``, ``"steps"``, ``"checks"``.
        done: How much of it is done.
        there: How much of that was done before, and took no time.
        about: Whether the total is an estimate.
        note: What is to be said beside the numbers.
        present: What is worked on now, for those who do not see the rows below.
    """

    def __init__(
        self,
        display: Display,
        title: str,
        total: int,
        unit: str,
        *,
        log: bool,
        rows: Callable[[], Sequence[str]],
        left: Callable[[], float | None] | None,
    ) -> None:
        """Begin; see ``Display.task``."""
        self.title, self.total, self.unit = labelled_text(title), total, unit
        self._name = title
        self.done = self.there = 0
        self.about = False
        self.note = self.present = ""
        self._display = display
        self._log = log
        self._rows = rows
        self._left = left
        self._began = self._said = display.clock()
        self._samples = deque([(self._began, 0)])

    def advance(self, steps: int = 1) -> None:
        """Say that so much more is done."""
        self.reach(self.done + steps)

    def skip(self, steps: int) -> None:
        """Say that so much was done before."""
        self.there += steps
        self._samples = deque((when, done + steps) for when, done in self._samples)
        self.reach(self.done + steps)

    def reach(self, done: int) -> None:
        """Say how much is done; less than before where something has to be done once more."""
        now = self._display.clock()
        # Never empty, and never changed in place but at its ends: another thread paints from it.
        if done < self.done:
            self._samples = deque([(now, done)])
        self.done = done
        self._samples.append((now, done))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RATE_SECONDS:
            self._samples.popleft()
        if self._log and now - self._said >= LOG_SECONDS:
            self._said = now
            self._display.log(self.sentence())
        self._display.changed()

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self._display.clock() - self._began

    @property
    def rate(self) -> float:
        """Bytes per second, lately; 0 where that means nothing."""
        when, done = self._samples[0]
        seconds = self._display.clock() - when
        return (self.done - done) / seconds if self.unit == BYTES and seconds >= 1 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds that it will go on; ``None`` where nobody can know."""
        if self._left is not None:
            return self._left()
        worked = self.done - self.there
        if self.unit != BYTES or not self.total or worked <= 0 or self.elapsed < FORECAST_SECONDS:
            return None
        return max(0, self.total - self.done) * self.elapsed / worked

    @property
    def counts(self) -> str:
        """How much is done of how much; ``""`` where there is nothing to count."""
        about = "about " if self.about else ""
        if self.unit == BYTES:
            return f"{amount(self.done)} of {about}{amount(self.total)}" if self.total else amount(self.done)
        return f"{self.done} of {about}{self.total} {self.unit}" if self.total else ""

    def sentence(self) -> str:
        """Return where it is, for a log."""
        rate, left = self.rate, self.left
        parts = (
            self.counts,
            f"{amount(int(rate))}/s" if rate else "",
            clock(self.elapsed),
            f"about {clock(left)} left" if left else "",
            self.note,
        )
        return f"  {self._name}: {', '.join(filter(None, parts))}"

    def lines(self, width: int) -> list[str]:
        """Return where it is, for a terminal of so many columns; lines below the first one may be longer."""
        rate, left = self.rate, self.left
        first = row(
            self.title,
            self.done / self.total if self.total else None,
            self.counts,
            width=width,
            left=f"~{clock(left)} left" if left else "",
            elapsed=clock(self.elapsed),
            rate=f"{amount(int(rate))}/s" if rate else "",
            note=self.note,
        )
        return [first, *self._rows()]


class Display:
    """What moves on a terminal, and what is written above it."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Show nothing yet.

        Args:
            stream: Where to write; default: stderr, whatever it is at the time.
            clock: Tells seconds.
        """
        self.clock = clock
        self._stream = stream
        self._tasks: list[Task] = []
        self._live: Live | None = None
        self._lock = threading.RLock()
        self._state = ""

    @property
    def stream(self) -> TextIO:
        """Where it writes."""
        return self._stream or sys.stderr

    @property
    def live(self) -> bool:
        """Whether something can move there: on a terminal, and no dumb one."""
        return self.stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")

    @contextmanager
    def task(
        self,
        title: str,
        total: int = 0,
        unit: str = "",
        *,
        log: bool = True,
        rows: Callable[[], Sequence[str]] = tuple,
        left: Callable[[], float | None] | None = None,
    ) -> Iterator[Task]:
        """Show a piece of work for the time of the ``with`` block.

        Args:
            title: What is done, in a word or two.
            total: How much there is to do; 0: nobody knows (yet).
            unit: Of what.
            log: Whether a log gets a line now and then; not where other lines say how far it is.
            rows: Gives the lines that stand below its own on a terminal.
            left: Gives the seconds that it will go on; default: what follows from its rate.
        """
        mine = Task(self, title, total, unit, log=log, rows=rows, left=left)
        with self._lock:
            self._tasks.append(mine)
        try:
            self._show()
            self.changed()
            yield mine
        finally:
            # An impatient user's second Ctrl-C must not leave a terminal without its cursor.
            with _uninterrupted():
                with self._lock:
                    self._tasks.remove(mine)
                if not self._tasks:
                    self._hide()

    def say(self, text: str, *, one_row: bool = False) -> None:
        """Write a line for people; a long one goes on in the next row of a terminal, or is cut."""
        text = labelled_text(text)
        with self._lock:
            if self._live is None:
                self.stream.write(f"{text[:LONGEST_LINE] if one_row else text}\n")
                self.stream.flush()
                return
            # A Ctrl-C between the line and what moves below it would leave half of that behind.
            with _uninterrupted():
                console = self._live.console
                if one_row:
                    console.print(text, no_wrap=True, overflow="ellipsis")
                else:
                    console.print(text, soft_wrap=True)

    def log(self, text: str) -> None:
        """Write a line that a moving display shows already."""
        if self._live is None and not self._relays:
            self.say(text)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the display away while somebody else writes to the same terminal."""
        shown = self._live is not None
        self._hide()
        try:
            yield
        finally:
            if shown and self._tasks:
                self._show()

    def changed(self) -> None:
        """Tell who relays that there is news; a terminal is painted so many times a second anyway."""
        if not self._relays:
            return
        with self._lock:
            texts = [
                ", ".join(filter(None, (task.counts or task.title, task.present, task.note))) for task in self._tasks
            ]
            if (state := "; ".join(texts)) != self._state:
                self._state = state
                self.stream.write(f"{state}\r")
                self.stream.flush()

    @property
    def _relays(self) -> bool:
        return os.environ.get(RELAY) == "1"

    def _show(self) -> None:
        if self._live is not None or not self.live:
            return
        # Only here: a plan, and a log, are there without it.
        from rich.console import Console
        from rich.live import Live

        # A terminal knows its width better than whoever set these, and it may be another one soon.
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        console = Console(
            file=self.stream, force_terminal=True, highlight=False, markup=False, emoji=False, _environ=environment
        )
        self._live = Live(
            self,
            console=console,
            refresh_per_second=PAINTED_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with _uninterrupted():
            self._live.start(refresh=True)

    def _hide(self) -> None:
        if (live := self._live) is not None:
            live.stop()
            self._live = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give rich the rows as they are now."""
        from rich.text import Text

        for task in tuple(self._tasks):
            for line in task.lines(options.max_width):
                text = Text(line.translate(ASCII) if options.ascii_only else line, no_wrap=True, overflow="ellipsis")
                text.highlight_regex("━+", "green")
                text.highlight_regex("─+", "dim")
                yield text


ASCII: Final = str.maketrans("━─", "#-")
"""A bar for terminals that know no other letters."""

DISPLAY: Final = Display()
"""This process's own."""


def _uninterrupted() -> AbstractContextManager[None]:
    # Help and completion load this file too, and have no use for what starts processes.
    from trainworks.engine.processes import uninterrupted

    return uninterrupted()


def counted(file: IO[bytes], told: Callable[[int], None]) -> IO[bytes]:
    """Return an open file, for reading only, that tells with each read how much of it was read altogether."""
    return cast("IO[bytes]", _Counted(file, told))


class _Counted:
    def __init__(self, file: IO[bytes], told: Callable[[int], None]) -> None:
        self._file = file
        self._told = told
        self._size = 0

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._size += len(content)
        self._told(self._size)
        return content
