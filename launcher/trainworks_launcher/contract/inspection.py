"""Inspect objects that may never answer: a dead mount, a lost name server, a driver that hangs.

Each inspection runs in a thread of its own, and the caller waits with a time limit (``Inspection``,
``run_in_time``). The event loop must not wait at all (``Loop.look`` in supervise/event_loop.py).
``inspecting`` notes the object before the inspection, so that the waiting thread can name the
object in a message.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Callable, Generic, Iterator, NamedTuple, TypeVar


class Inspected(NamedTuple):
    """The object of an inspection.

    Attributes:
        what: Its name for people, for example ``the code``.
        path: Its path; ``""`` for a name that is resolved.
    """

    what: str
    path: str


_current = [Inspected("this host's files", "")]
"""The objects of the inspections that run, the innermost last; the first one stands for none."""


@contextmanager
def inspecting(what: str, path: str = "") -> Iterator[None]:
    """Note the object of an inspection while the block runs: ``current`` returns it.

    Any thread may ask. Only one thread at a time may inspect.
    """
    before = _current[-1]
    _current.append(Inspected(what, path))
    try:
        yield
    finally:
        _current[:] = [before]


def current() -> Inspected:
    """Return the object of the inspection that runs."""
    return _current[-1]


Result = TypeVar("Result")

LOOK_SECONDS = 0.8
"""Time limit of an inspection for a message. Heartbeats and the end of a job must not wait."""


class Inspection(Generic[Result]):
    """An inspection in a thread. A thread that does not return is left alone.

    Attributes:
        results: The result, in a list; empty before the end, and after an exception.
        errors: The exception that ended the inspection, in a list.
    """

    def __init__(
        self, inspect: Callable[[], Result], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Begin.

        Args:
            inspect: Inspects, and returns the result.
            ended: Called in that thread at the end, also after an exception.

        Raises:
            RuntimeError: This host can start no further thread.
        """
        self.results: list[Result] = []
        self.errors: list[BaseException] = []
        self._inspect = inspect
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name="trainworks-look", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait, bounded; return whether the inspection has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Inspect, in the thread: fill ``results`` or ``errors``, then call ``ended``."""
        try:
            self.results.append(self._inspect())
        except BaseException as error:  # noqa: BLE001  (for the thread that waits)
            self.errors.append(error)
        finally:
            self._ended()


def run_in_time(
    inspect: Callable[[], Result], default: Result, seconds: float = LOOK_SECONDS
) -> Result:
    """Return the result of an inspection, within a limit of seconds.

    Returns the default if the inspection does not return in time, fails, or cannot get a thread.
    Nothing is raised. A thread that does not return in time runs on.
    """
    try:
        inspection = Inspection(inspect)
    except RuntimeError:
        return default
    inspection.wait(seconds)
    if not inspection.results:
        return default
    return inspection.results[0]
