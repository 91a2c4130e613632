"""Looks that may never return: at a dead mount, at a name server that is gone,
at a process that hangs in a driver.

Each is made in a thread of its own, and is waited for with a bound (``Look``, ``in_time``;
``Loop.look`` where nothing may wait at all). What is looked at is noted before (``looking_at``);
the thread that waits for the reader says it.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Callable, Generic, Iterator, NamedTuple, TypeVar


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


Seen = TypeVar("Seen")

LOOK_SECONDS = 0.8
"""How long a look is waited for that only adds to what is known.

Heartbeats and the end of a job must not wait.
"""


class Look(Generic[Seen]):
    """One look, in a thread. It is left alone if it does not return.

    Attributes:
        found: What it has found, in a list; empty as long as it has not.
        failed: The exception that ended it, in a list.
    """

    def __init__(self, look: Callable[[], Seen], ended: Callable[[], None] = lambda: None) -> None:
        """Begin. ended: called in that thread when it is over, whatever it has found.

        Raises RuntimeError if no further thread may be started on this host.
        """
        self.found: list[Seen] = []
        self.failed: list[BaseException] = []
        self._look = look
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name="trainworks-look", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait, bounded. Returns whether it is over."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.found.append(self._look())
        except BaseException as error:  # noqa: BLE001  (for the thread that waits)
            self.failed.append(error)
        finally:
            self._ended()


def in_time(look: Callable[[], Seen], otherwise: Seen, seconds: float = LOOK_SECONDS) -> Seen:
    """Return what a look finds.

    ``otherwise`` if it does not return in time, fails, or no thread can be started.
    """
    try:
        looking = Look(look)
    except RuntimeError:
        return otherwise
    looking.wait(seconds)
    return looking.found[0] if looking.found else otherwise
