"""A build for people: a line for each step that ends, and on a terminal how far
it is and what runs now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from trainworks.engine.progress import StepTally
from trainworks.engine.protocol import StepEvent
from trainworks.terminal.formatting import readable
from trainworks.terminal.progress import DISPLAY, Display, Task

MENTIONED_SECONDS = 2.0
"""Steps that end sooner get no line."""


class BuildProgress:
    """Shows a build: receives the events of an engine.

    Attributes:
        display: The display that lines and tasks go to.
        verbose: Whether every line is shown that the steps print.
        running: The task of each step that runs, by component and instruction.
        cached: The number of steps that came from the cache.
        tally: Counts the steps that ended.
    """

    def __init__(self, stream: TextIO | None = None, *, verbose: bool = False) -> None:
        """Start with nothing running.

        Args:
            stream: The stream for the lines; default: this process's display.
            verbose: Whether every line is shown that the steps print.
        """
        self.display = DISPLAY if stream is None else Display(stream)
        self.verbose = verbose
        self.running: dict[tuple[str, str], Task] = {}
        self.cached = 0
        self.tally = StepTally(())
        self._task: Task | None = None

    def __call__(self, event: StepEvent) -> None:
        """Show one event of the build: the begin, a line or the end of a step."""
        key = (event.component, event.step)
        self.tally.add(event)
        if event.state == "started":
            self.running[key] = self.display.add(event.component or "engine", log=False)
            self.running[key].note = readable(event.step)
        elif event.state == "output":
            if key in self.running:
                self.running[key].note = event.text
            if self.verbose:
                self.line(f"  {event.component:<20} {event.text}")
        else:
            task = self.running.pop(key, None)
            seconds = event.seconds
            if task is not None:
                self.display.remove(task)
                # Not every engine measures its steps.
                if seconds is None:
                    seconds = task.elapsed
            self.say_end(event, seconds)
        if self._task is not None and event.state != "output":
            self._task.reach(self.tally.done)

    def say_end(self, event: StepEvent, seconds: float | None) -> None:
        """Write a line about a step that ended, unless it is the engine's own
        or took almost no time.

        Steps from the cache are counted, and get a line each if every line is shown.

        Args:
            event: The end of the step.
            seconds: The duration; ``None`` if it is not known.
        """
        if not event.component and event.state != "failed":
            return
        name = event.stage or event.component
        if event.state == "cached":
            self.cached += 1
            if self.verbose:
                self.line(f"  {name:<20} cached    {readable(event.step)}")
        elif event.state == "failed" or (seconds or 0) >= MENTIONED_SECONDS:
            # As wide as a duration, so that the columns stay straight.
            duration = " " * 8
            if seconds is not None:
                duration = f"{seconds:6.1f} s"
            verdict = "FAILED: " if event.state == "failed" else ""
            self.line(f"  {name:<20} {duration}  {verdict}{readable(event.step)}")

    def line(self, text: str) -> None:
        """Write a line above the bars, cut to one row."""
        self.display.say(text, one_row=True)

    @contextmanager
    def following(self, tally: StepTally) -> Iterator[None]:
        """Show how far the build is for the time of the ``with`` block.

        At its end the number of cached steps is written, and steps that still run are removed from
        the display.

        Args:
            tally: The steps of the build, which the events are counted by.
        """
        self.tally = tally
        with self.display.task("building", tally.total, "steps", log=False) as self._task:
            try:
                yield
            finally:
                self._task = None
                if self.cached and not self.verbose:
                    self.line(f"  steps from the cache: {self.cached}")
                self.cached = 0
                while self.running:
                    self.display.remove(self.running.popitem()[1])
