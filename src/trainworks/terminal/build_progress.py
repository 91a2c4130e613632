"""A build as a person sees it: a line for each step that ends, and on a terminal how far it is and what runs now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from trainworks.engine.progress import StepTally
from trainworks.engine.protocol import StepEvent
from trainworks.terminal.progress import DISPLAY, Display, Task
from trainworks.terminal.words import clock, readable


class BuildProgress:
    """Follows a build: one line for each step that ends, and on a terminal how far it is and what runs now.

    Args:
        stream: Where to write; default: this process's display.
        verbose: Show every line that the steps print.
    """

    def __init__(self, stream: TextIO | None = None, *, verbose: bool = False) -> None:
        """Start with nothing running."""
        self.display = DISPLAY if stream is None else Display(stream)
        self.verbose = verbose
        self.running: dict[tuple[str, str], float] = {}
        self.last_texts: dict[tuple[str, str], str] = {}
        self.tally = StepTally(())
        self._task: Task | None = None

    def __call__(self, event: StepEvent) -> None:
        """Take one event of the build."""
        key, now = (event.component, event.step), self.display.clock()
        self.tally.add(event)
        if event.state == "started":
            self.running[key] = now
        elif event.state == "output":
            self.last_texts[key] = event.text
            if self.verbose:
                self.line(f"  {event.component:<20} {event.text}")
        else:
            started = self.running.pop(key, None)
            self.last_texts.pop(key, None)
            seconds = event.seconds
            if seconds is None and started is not None:
                seconds = now - started
            self.ended(event, seconds)
        if self._task is not None and event.state != "output":
            self._task.present = ", ".join(dict.fromkeys(component for component, _ in self.running if component))
            self._task.reach(self.tally.done)

    def ended(self, event: StepEvent, seconds: float | None) -> None:
        """Say that a step ended, unless it is the engine's own or took no time worth a line."""
        if not event.component and event.state != "failed":
            return
        if event.state == "cached":
            self.line(f"  {event.component:<20} cached    {readable(event.step)}")
        elif event.state == "failed" or (seconds or 0) >= MENTIONED_SECONDS:
            duration = f"{seconds:6.1f} s" if seconds is not None else " " * 8
            verdict = "FAILED: " if event.state == "failed" else ""
            self.line(f"  {event.component:<20} {duration}  {verdict}{readable(event.step)}")

    def line(self, text: str) -> None:
        """Write one row, above what moves."""
        self.display.say(text, one_row=True)

    @contextmanager
    def following(self, tally: StepTally) -> Iterator[None]:
        """Show how far the build is for the time of the ``with`` block; ``tally`` knows its steps."""
        self.tally = tally
        with self.display.task(
            "building",
            tally.total,
            "steps",
            log=False,
            rows=self.rows,
        ) as self._task:
            try:
                yield
            finally:
                self._task = None

    def rows(self) -> list[str]:
        """Return a line for each step that runs: whose it is, for how long, what it said last."""
        now = self.display.clock()
        found = []
        for key, began in tuple(self.running.items()):
            said = self.last_texts.get(key) or readable(key[1])
            found.append(f"  {key[0] or 'engine':<20} {clock(now - began):>8}  {said}")
        return found


MENTIONED_SECONDS = 0.5
"""Steps that end sooner are not worth a line."""
