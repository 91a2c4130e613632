"""What a person sees: progress of builds on stderr, results on stdout, errors as a paragraph and a hint."""

from __future__ import annotations

import re
import shutil
import sys
import time
from typing import TextIO

from trainworks.engine.protocol import StepEvent
from trainworks.errors import TrainworksError


def megabytes(size: int) -> str:
    """Return a size in bytes as people read it: ``740 MB``, ``5.72 GB`` (1 GB = 1,000,000,000 bytes)."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def amount(size: int) -> str:
    """Return a size as ``megabytes`` does, and what is less than one of them in kB."""
    return megabytes(size) if size >= 1e6 else f"{size / 1e3:.0f} kB"


def signed(size: int) -> str:
    """Return a change in bytes as people read it, with its sign."""
    return f"{'+' if size >= 0 else '-'}{amount(abs(size))}"


def describe(error: TrainworksError) -> str:
    """Return an error for the terminal: what, where, and after a blank line what to do next."""
    text = f"error: {error.message}"
    return f"{text}\n\nhint: {error.hint}" if error.hint else text


def readable(step: str) -> str:
    """Return an instruction as a person reads it: on one line, without what it mounts."""
    return " ".join(re.sub(r"--mount=\S+", "", step).split())


class BuildProgress:
    """Follows a build: one line for each step that ends, and on a terminal a last line with what runs now.

    Args:
        stream: Where to write; a terminal gets the moving line.
        verbose: Show every line that the steps print.
    """

    def __init__(self, stream: TextIO = sys.stderr, *, verbose: bool = False) -> None:
        """Start with nothing running."""
        self.stream = stream
        self.verbose = verbose
        self.live = stream.isatty()
        self.running: dict[tuple[str, str], float] = {}
        self.painted = False
        self.last_text = ""

    def __call__(self, event: StepEvent) -> None:
        """Take one event of the build."""
        key = (event.component, event.step)
        if event.state == "started":
            self.running[key] = time.monotonic()
        elif event.state == "output":
            self.last_text = event.text
            if self.verbose:
                self.line(f"  {event.component:<20} {event.text}")
        else:
            started = self.running.pop(key, None)
            seconds = event.seconds
            if seconds is None and started is not None:
                seconds = time.monotonic() - started
            self.ended(event, seconds)
        self.paint()

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
        """Write one whole line, above the moving one."""
        self.wipe()
        width = shutil.get_terminal_size().columns if self.live else 140
        self.stream.write(text[:width] + "\n")
        self.stream.flush()

    def paint(self) -> None:
        """Write the moving line: what runs, for how long, and what was said last."""
        if not self.live:
            return
        self.wipe()
        now = time.monotonic()
        names = [f"{component} {now - start:.0f} s" for (component, _), start in self.running.items() if component]
        if names:
            text = f"  {', '.join(names)}: {self.last_text}"
            self.stream.write(text[: shutil.get_terminal_size().columns - 1])
            self.painted = True
        self.stream.flush()

    def wipe(self) -> None:
        """Take the moving line away."""
        if self.painted:
            self.stream.write("\r\x1b[K")
            self.painted = False


MENTIONED_SECONDS = 0.5
"""Steps that end sooner are not worth a line."""
