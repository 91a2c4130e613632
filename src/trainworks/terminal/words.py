"""How things are written for people: sizes, times, errors, and how far a piece of work is."""

from __future__ import annotations

import re

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


def clock(seconds: float) -> str:
    """Return a time as people read it: ``0:07``, ``12:30``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def row(
    title: str,
    fraction: float | None,
    amount: str,
    *,
    width: int,
    left: str = "",
    elapsed: str = "",
    rate: str = "",
    note: str = "",
) -> str:
    """Return a task in one row of a terminal, with a bar; what there is no room for is left out.

    Args:
        title: What is done.
        fraction: How much of it is done, from 0 to 1; ``None``: nobody knows, and there is no bar.
        amount: The same in words.
        width: Columns.
        left: How long it will go on.
        elapsed: How long it has gone on.
        rate: How fast it goes.
        note: More.
    """
    lengths = {"amount": len(amount), "title": len(title), "left": len(left)}
    lengths |= {"bar": 0 if fraction is None else SHORTEST_BAR}
    lengths |= {"elapsed": len(elapsed), "rate": len(rate), "note": len(note)}
    shown: set[str] = set()
    used = -len(GAP)
    # What matters most comes first.
    for name, length in lengths.items():
        if length and used + len(GAP) + length <= width:
            shown.add(name)
            used += len(GAP) + length
    drawn = bar(fraction or 0.0, min(SHORTEST_BAR + width - used, LONGEST_BAR))
    parts = {
        "title": title,
        "bar": drawn,
        "amount": amount,
        "rate": rate,
        "elapsed": elapsed,
        "left": left,
        "note": note,
    }
    return GAP.join(text for name, text in parts.items() if name in shown)


GAP = "  "
"""Between the parts of a row."""

SHORTEST_BAR = 6
"""Columns; where there are fewer, there is no bar."""

LONGEST_BAR = 40
"""Columns."""


def bar(fraction: float, width: int) -> str:
    """Return a bar of so many columns; it is full only when everything is done."""
    filled = int(min(1.0, max(0.0, fraction)) * width)
    return "━" * filled + "─" * (width - filled)
