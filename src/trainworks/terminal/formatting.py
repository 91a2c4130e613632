"""Write sizes, times, build steps and errors for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from trainworks.errors import TrainworksError


def megabytes(size: int) -> str:
    """Return a size in bytes as people read it: ``740 MB``, ``5.72 GB`` (1 GB =
    1,000,000,000 bytes).
    """
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def amount(size: int) -> str:
    """Return a size as ``megabytes`` does, and what is less than one of them in kB."""
    return megabytes(size) if size >= 1e6 else f"{size / 1e3:.0f} kB"


def stacked(sizes: Sequence[int], width: int) -> list[str]:
    """Return one bar in as many lines as it has parts: each part begins where
    the one above it ends.

    Args:
        sizes: The parts, none negative.
        width: Characters of the whole; what is too small for one of them is a dot.
    """
    whole = sum(sizes) or 1
    ends = [round(width * end / whole) for end in accumulate(sizes)]
    return [
        " " * min(start, width - 1) + ("#" * (end - start) or ".")
        for start, end in pairwise((0, *ends))
    ]


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


def clock(seconds: float) -> str:
    """Return a time as people read it: ``0:07``, ``12:30``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
    )
