"""Show the progress of long tasks: bars on a terminal, lines in a log.

A process has one display, as it has one terminal. Any code adds a task with ``DISPLAY.task``; lines
that are written meanwhile (``output.say``) stand above the bars.
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

Only tasks in bytes have a rate and a remaining time.
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
    """Return a text after the label of this thread: ``LABEL: TEXT``; without a label the text."""
    label = LABEL.get()
    if not label:
        return text
    return f"{label}: {text}"


class Task:
    """A long task.

    Attributes:
        title: The action in a word or two, such as ``fetching``.
        total: The number of units of the complete task; 0 if it is not known.
        unit: ``BYTES``, ``"steps"``, ``"checks"``.
        done: The number of finished units.
        there: The part of ``done`` from an earlier run, which took no time.
        about: Whether the total is an estimate.
        note: Text beside the title.
        began: The time of the begin, in seconds of the display's clock.
    """

    def __init__(self, display: Display, title: str, total: int, unit: str, *, log: bool) -> None:
        """Begin at the display's time; arguments as of ``Display.task``."""
        self.title, self.total, self.unit = title, total, unit
        self.done = self.there = 0
        self.about = False
        self.note = ""
        self.began = self._last_line = display.clock()
        self._label = labelled_text("")
        self._display = display
        self._log = log

    def advance(self, steps: int = 1) -> None:
        """Count more units as finished; a log may get a line (``reach``)."""
        self.reach(self.done + steps)

    def skip(self, steps: int) -> None:
        """Count units of an earlier run as finished; they do not change the rate."""
        self.there += steps
        self.reach(self.done + steps)

    def reach(self, done: int) -> None:
        """Set the number of finished units; a lower one if units have to be repeated.

        A log gets a line about the task if it has had none for ``LOG_SECONDS``.
        """
        self.done = done
        now = self._display.clock()
        if self._log and now - self._last_line >= LOG_SECONDS and not self._display.live:
            self._last_line = now
            note = f", {self.note}" if self.note else ""
            self._display.write(f"{self._label}  {self.title}: {self.how_far}{note}")

    @property
    def elapsed(self) -> float:
        """Seconds since the task began."""
        return self._display.clock() - self.began

    @property
    def rate(self) -> float:
        """Bytes per second on average; 0 for other units, and in the first second."""
        elapsed = self.elapsed
        transferred = self.done - self.there
        if self.unit != BYTES or elapsed < 1 or transferred <= 0:
            return 0.0
        return transferred / elapsed

    @property
    def left(self) -> float | None:
        """Remaining seconds; ``None`` if they cannot be known."""
        if not self.rate or not self.total or self.elapsed < FORECAST_SECONDS:
            return None
        return max(0, self.total - self.done) / self.rate

    @property
    def counts(self) -> str:
        """The finished and the total number of units: ``3 of 12 steps``, ``20 MB of 1.50 GB``.

        Without a total: the bytes that are finished, and ``""`` for other units.
        """
        about = "about " if self.about else ""
        if self.unit == BYTES:
            done = amount(self.done)
            if not self.total:
                return done
            return f"{done} of {about}{amount(self.total)}"
        if not self.total:
            return ""
        return f"{self.done} of {about}{self.total} {self.unit}"

    @property
    def what(self) -> str:
        """The first column of the display: the title and the note."""
        return visible(f"{self._label}{self.title}  {self.note}").replace("\n", " ")

    @property
    def how_far(self) -> str:
        """The second column of the display: counts, elapsed and remaining time, rate.

        For example ``20 MB of 1.50 GB, 0:07, about 8:30 left, 2 MB/s``.
        """
        rate, left = self.rate, self.left
        parts = [self.counts] if self.counts else []
        parts.append(clock(self.elapsed))
        if left:
            parts.append(f"about {clock(left)} left")
        if rate:
            parts.append(f"{amount(int(rate))}/s")
        return ", ".join(parts)


class Display:
    """The tasks of a process, and the lines written above them."""

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Show nothing yet.

        Args:
            stream: The stream for lines and bars; default: ``sys.stderr`` of the moment.
            clock: Returns seconds.
        """
        self.clock = clock
        self._stream = stream
        self._lock = threading.RLock()
        self._tasks: list[Task] = []
        self._bars: Bars | None = None

    @property
    def stream(self) -> TextIO:
        """The stream for lines and bars."""
        return self._stream or sys.stderr

    @property
    def live(self) -> bool:
        """Whether the stream is a terminal that can move its cursor."""
        return self.stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")

    @contextmanager
    def task(
        self, title: str, total: int = 0, unit: str = "", *, log: bool = True
    ) -> Iterator[Task]:
        """Show a task for the time of the ``with`` block.

        Args:
            title: The action in a word or two, such as ``fetching``.
            total: The number of units of the complete task; 0 if it is not known (yet).
            unit: The unit, such as ``BYTES`` or ``"targets"``.
            log: Whether a log gets a line every ``LOG_SECONDS``; False if other lines show the
                progress.
        """
        task = self.add(title, total, unit, log=log)
        try:
            yield task
        finally:
            self.remove(task)

    def add(self, title: str, total: int = 0, unit: str = "", *, log: bool = True) -> Task:
        """Show a task until ``remove``; arguments as of ``task``."""
        task = Task(self, title, total, unit, log=log)
        with self._lock, _uninterrupted():
            self._tasks.append(task)
            if self._bars is not None:
                self._bars.add(task)
            else:
                self._show()
        return task

    def remove(self, task: Task) -> None:
        """Remove a task from the display; the last one leaves a clean terminal."""
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
                line = text[:LONGEST_LINE] if one_row else text
                self.stream.write(f"{line}\n")
                self.stream.flush()
                return
            # A Ctrl-C between the line and the bars below it would leave half of them behind.
            with _uninterrupted():
                self._bars.write(text, one_row=one_row)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the bars for the time of the ``with`` block, in which other code writes.

        Other threads wait for the display meanwhile.
        """
        with self._lock:
            self._hide()
            try:
                yield
            finally:
                self._show()

    def _show(self) -> None:
        """Show the bars, if there are tasks and the stream is a terminal."""
        if self._tasks and self.live:
            # Only a terminal needs rich, and its import is slow.
            from trainworks.terminal.bars import Bars

            self._bars = Bars(self.stream, self._tasks)

    def _hide(self) -> None:
        """Remove the bars, if they are shown."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


DISPLAY: Final = Display()
"""The display of this process, on stderr."""


def _uninterrupted() -> AbstractContextManager[None]:
    """Return a ``with`` block in which Ctrl-C waits until its end."""
    # Help and completion import this file too, and start no processes.
    from trainworks.engine.subprocesses import uninterrupted

    return uninterrupted()
