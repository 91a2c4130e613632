"""Find the uv that is installed with the builder."""

from __future__ import annotations

from functools import cache
from threading import Lock

import uv

_LOCK = Lock()


def find_uv() -> str:
    """Return the path of the uv that is installed with the builder; ``PATH`` does not matter.

    Raises:
        FileNotFoundError: uv is not installed.
    """
    # The first question of a process fills a table of Python's ``sysconfig``. Python 3.11 shows
    # that table to other threads before it is full, and the targets of one run are planned in
    # threads.
    with _LOCK:
        return _find_uv_once()


@cache
def _find_uv_once() -> str:
    """Return the path of uv; only the first call of a process searches."""
    return uv.find_uv_bin()
