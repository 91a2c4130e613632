"""Repeat what an engine failed at: starting a process or a container sometimes
fails on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from trainworks.errors import EngineError

ATTEMPTS: Final = 3
"""The number of attempts, with the first one."""

PAUSE: Final = 0.3
"""Seconds between two attempts."""

T = TypeVar("T")


def retry(attempt: Callable[[], T]) -> T:
    """Return the result of ``attempt``, after at most ``ATTEMPTS`` attempts.

    It sleeps ``PAUSE`` seconds between two of them.

    Args:
        attempt: A call that has no effect if it raises ``EngineError``.

    Raises:
        EngineError: The last attempt failed too. Any other error is raised at once.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except EngineError:
            time.sleep(PAUSE)
    return attempt()
