"""What is being looked at now: a look at a dead mount, or at a name server that is gone, never returns.

The reader notes it before each look that may block; the thread that waits for the reader says it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, NamedTuple


class Looked(NamedTuple):
    """One look: what a person calls it, and its path (``""`` for a name that is looked up)."""

    what: str
    path: str


_now = [Looked("this host's files", "")]


@contextmanager
def looking_at(what: str, path: str = "") -> Iterator[None]:
    """Note what is looked at while the block runs."""
    before = _now[-1]
    _now.append(Looked(what, path))
    try:
        yield
    finally:
        _now[:] = [before]


def now() -> Looked:
    """Return what is looked at now."""
    return _now[-1]
