"""Show work that takes long: bars on a terminal, a line now and then in a log.

A process has one display, as it has one terminal. Any code adds a piece of work with
``DISPLAY.task``; lines written meanwhile (``output.say``) stand above the bars.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TextIO

from trainworks.terminal.formatting import amount, clock
from trainworks.terminal.visible import visible

if TYPE_CHECKING:
    from trainworks.terminal.bars import Bars

BYTES: Final = "bytes"
"""The unit of data that is sent, fetched or read.

Only bytes have a rate, and a remaining time that follows from it.
"""

LOG_SECONDS: Final = 30.0
"""Seconds between two lines about a task in a log, and before the first one."""

FORECAST_SECONDS: Final = 3.0
"""Seconds that a task must have run before its remaining time is estimated."""

LONGEST_LINE: Final = 140
"""Characters of a step's line in a log."""

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
        total: How much there is to do, in ``unit``; 0 if that is not known.
        unit: ``BYTES``, ``"steps"``, ``"checks"``.
        done: How much of it is done.
        there: How much of ``done`` was done before and took no time.
        about: Whether the total is an estimate.
        note: Text beside the title.
        began: When it began, in seconds of the display's clock.
    """

    def __init__(self, display: Display, title: str, total: int, unit: str, *, log: bool) -> None:
        """Begin; see ``Display.task``."""
        self.title, self.total, self.unit = title, total, unit
        self.done = self.there = 0
        self.about = False
        self.note = ""
        self.began = self._said = display.clock()
        self._label = labelled_text("")
        self._display = display
        self._log = log

    def advance(self, steps: int = 1) -> None:
        """Count more as done."""
        self.reach(self.done + steps)

    def skip(self, steps: int) -> None:
        """Count more as done before, which says nothing about the rate."""
        self.there += steps
        self.reach(self.done + steps)

    def reach(self, done: int) -> None:
        """Set how much is done; less than before if something has to be done again."""
        self.done = done
        now = self._display.clock()
        if self._log and now - self._said >= LOG_SECONDS and not self._display.live:
            self._said = now
            self._display.write(
                f"{self._label}  {self.title}: {self.how_far}{self.note and f', {self.note}'}"
            )

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self._display.clock() - self.began

    @property
    def rate(self) -> float:
        """Bytes per second on average; 0 if that means nothing."""
        worked, elapsed = self.done - self.there, self.elapsed
        return worked / elapsed if self.unit == BYTES and elapsed >= 1 and worked > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Remaining seconds; ``None`` if they cannot be known."""
        if not self.rate or not self.total or self.elapsed < FORECAST_SECONDS:
            return None
        return max(0, self.total - self.done) / self.rate

    @property
    def counts(self) -> str:
        """How much is done of how much; ``""`` if there is nothing to count."""
        about = "about " if self.about else ""
        if self.unit == BYTES:
            return (
                f"{amount(self.done)} of {about}{amount(self.total)}"
                if self.total
                else amount(self.done)
            )
        return f"{self.done} of {about}{self.total} {self.unit}" if self.total else ""

    @property
    def what(self) -> str:
        """The first column of the display: what is done."""
        return visible(f"{self._label}{self.title}  {self.note}").replace("\n", " ")

    @property
    def how_far(self) -> str:
        """The second column of the display, beside the bar: counts, elapsed and
        remaining time, rate.
        """
        rate, left = self.rate, self.left
        parts = (
            self.counts,
            clock(self.elapsed),
            f"about {clock(left)} left" if left else "",
            f"{amount(int(rate))}/s" if rate else "",
        )
        return ", ".join(filter(None, parts))


class Display:
    """The tasks of a process, and the lines written above them."""

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Show nothing yet.

        Args:
            stream: Where to write; default: stderr, whatever it is at the time.
            clock: Returns seconds.
        """
        self.clock = clock
        self._stream = stream
        self._lock = threading.RLock()
        self._tasks: list[Task] = []
        self._bars: Bars | None = None

    @property
    def stream(self) -> TextIO:
        """Where it writes."""
        return self._stream or sys.stderr

    @property
    def live(self) -> bool:
        """Whether the stream is a terminal that can move its cursor."""
        return self.stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")

    @contextmanager
    def task(
        self, title: str, total: int = 0, unit: str = "", *, log: bool = True
    ) -> Iterator[Task]:
        """Show a piece of work for the time of the ``with`` block.

        Args:
            title: What is done, in a word or two.
            total: How much there is to do; 0 if that is not known (yet).
            unit: Of what.
            log: Whether a log gets a line now and then; False if other lines say how far it is.
        """
        mine = self.add(title, total, unit, log=log)
        try:
            yield mine
        finally:
            self.remove(mine)

    def add(self, title: str, total: int = 0, unit: str = "", *, log: bool = True) -> Task:
        """Show a piece of work until ``remove``; arguments as of ``task``."""
        mine = Task(self, title, total, unit, log=log)
        with self._lock, _uninterrupted():
            self._tasks.append(mine)
            if self._bars is not None:
                self._bars.add(mine)
            else:
                self._show()
        return mine

    def remove(self, task: Task) -> None:
        """Show a task no longer; the last one leaves a clean terminal."""
        # A second Ctrl-C must not leave a terminal without its cursor.
        with self._lock, _uninterrupted():
            self._tasks.remove(task)
            if self._bars is not None and self._tasks:
                self._bars.remove(task)
            else:
                self._hide()

    def say(self, text: str, *, one_row: bool = False) -> None:
        """Write a line for people after this thread's label.

        Args:
            one_row: Cut a line that is longer than a row; otherwise it goes on in the next row.
        """
        self.write(labelled_text(text), one_row=one_row)

    def write(self, text: str, *, one_row: bool = False) -> None:
        """Write a line without the label; arguments as of ``say``."""
        text = visible(text)
        with self._lock:
            if self._bars is None:
                self.stream.write(f"{text[:LONGEST_LINE] if one_row else text}\n")
                self.stream.flush()
                return
            # A Ctrl-C between the line and the bars below it would leave half of them behind.
            with _uninterrupted():
                self._bars.write(text, one_row=one_row)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bars away while something else is written to the same terminal."""
        with self._lock:
            self._hide()
            try:
                yield
            finally:
                self._show()

    def _show(self) -> None:
        if self._tasks and self.live:
            # Only a terminal needs rich, which takes a while to import.
            from trainworks.terminal.bars import Bars

            self._bars = Bars(self.stream, self._tasks)

    def _hide(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


DISPLAY: Final = Display()
"""This process's own."""


def _uninterrupted() -> AbstractContextManager[None]:
    # Help and completion import this file too, and start no processes.
    from trainworks.engine.subprocesses import uninterrupted

    return uninterrupted()
