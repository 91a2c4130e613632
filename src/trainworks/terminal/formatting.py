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
    if size >= 1e9:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.0f} MB"


def amount(size: int) -> str:
    """Return a size in bytes as ``megabytes`` does, and one below 1 MB in kB: ``12 kB``."""
    if size >= 1e6:
        return megabytes(size)
    return f"{size / 1e3:.0f} kB"


def stacked(sizes: Sequence[int], width: int) -> list[str]:
    """Return one bar in as many lines as it has parts: each part begins where
    the one above it ends.

    The parts 1, 1, 2 in 8 characters are ``##``, ``  ##`` and ``    ####``.

    Args:
        sizes: The parts, none negative.
        width: Characters of the whole bar; a part that is too small for one of them is a dot.
    """
    # At least 1, so that parts of size 0 are no division by zero.
    whole = sum(sizes) or 1
    ends = [round(width * end / whole) for end in accumulate(sizes)]
    lines = []
    for start, end in pairwise((0, *ends)):
        part = "#" * (end - start) or "."
        # The dot of a part at the end is within the width, too.
        lines.append(" " * min(start, width - 1) + part)
    return lines


def signed(size: int) -> str:
    """Return a change in bytes as people read it, with its sign: ``+12 kB``."""
    sign = "+" if size >= 0 else "-"
    return f"{sign}{amount(abs(size))}"


def describe(error: TrainworksError) -> str:
    """Return an error for the terminal: its message, and after a blank line its hint, if any."""
    text = f"error: {error.message}"
    if error.hint:
        text += f"\n\nhint: {error.hint}"
    return text


def readable(step: str) -> str:
    """Return an instruction of a Dockerfile for people: on one line, without ``--mount`` options.

    For example ``RUN apt-get update``.
    """
    return " ".join(re.sub(r"--mount=\S+", "", step).split())


def clock(seconds: float) -> str:
    """Return a duration as people read it: ``0:07``, ``12:30``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
