"""A small event loop: file descriptors and deadlines in one thread.

It wakes when something happens, never else.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import time
from typing import TYPE_CHECKING, Callable, TypeVar, Union

if TYPE_CHECKING:
    import socket  # a job of one host without ranks needs none

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

Watched = Union[int, "socket.socket"]
Seen = TypeVar("Seen")


class Loop:
    """Calls back when a descriptor is ready or a deadline has passed, until ``stop`` is called."""

    def __init__(self) -> None:
        """Open the selector; ``close`` releases it."""
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._stopped = False

    def watch(self, descriptor: Watched, events: int, callback: Callable[[int], None]) -> None:
        """Call ``callback(events)`` whenever a descriptor is ready.

        Args:
            descriptor: The descriptor, or a socket; an earlier watch of it is replaced.
            events: ``READ``, ``WRITE`` or both.
            callback: Called with the events that came.
        """
        if self._is_watched(descriptor):
            self._selector.modify(descriptor, events, callback)
        else:
            self._selector.register(descriptor, events, callback)

    def unwatch(self, descriptor: Watched) -> None:
        """Stop watching a descriptor; do nothing if it is not watched."""
        if self._is_watched(descriptor):
            self._selector.unregister(descriptor)

    def _is_watched(self, descriptor: object) -> bool:
        """Return whether a descriptor or socket is watched; False for a closed socket."""
        try:
            return descriptor in self._selector.get_map()
        except ValueError:
            # A closed socket has no number any more.
            return False

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, so many seconds from now; callbacks of one time in order."""
        # The count decides between equal times, because callbacks cannot be compared.
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), callback))

    def look(
        self, look: Callable[[], Seen], seconds: float, then: Callable[[Seen | None], None]
    ) -> None:
        """Call a function that may never return in a thread, and take its result in the loop.

        Returns at once.

        Args:
            look: The function, for example a read of a file system.
            seconds: Limit of the wait. A thread that has not returned by then is left alone.
            then: Called once, in the loop, with the result; with None if the function failed, has
                not returned in time, or if no thread can be started.

        Raises:
            OSError: No pipe can be made.
        """
        # Imported late, because threads cost a start that needs none.
        from trainworks_launcher.contract.inspection import Inspection

        receiver, sender = os.pipe()
        inspections: list[Inspection[Seen]] = []
        is_waiting = True

        def finish(_: int = 0) -> None:
            nonlocal is_waiting
            # Called at the end of the function and at the limit: the first one counts.
            if not is_waiting:
                return
            is_waiting = False
            self.unwatch(receiver)
            os.close(receiver)
            result: Seen | None = None
            if inspections and inspections[0].results:
                result = inspections[0].results[0]
            then(result)

        self.watch(receiver, READ, finish)
        try:
            inspections.append(Inspection(look, ended=lambda: os.close(sender)))
        except RuntimeError:
            # No thread can be started. The closed end makes the other one readable.
            os.close(sender)
        self.after(seconds, finish)

    def run(self) -> None:
        """Call the callbacks of ready descriptors and passed times until ``stop``.

        Blocks; without anything to do it sleeps. An exception of a callback ends the call, and is
        raised.
        """
        while not self._is_stopped():
            now = time.monotonic()
            # A timer: its time (monotonic clock), a number, and its callback.
            while not self._is_stopped() and self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            if self._is_stopped():
                return
            timeout = None
            if self._timers:
                timeout = max(0.0, self._timers[0][0] - time.monotonic())
            for key, events in self._selector.select(timeout):
                # An earlier callback of this round may have closed the descriptor.
                if not self._is_stopped() and self._is_watched(key.fileobj):
                    key.data(events)

    def stop(self) -> None:
        """Let ``run`` return after the current callback."""
        self._stopped = True

    def _is_stopped(self) -> bool:
        """Return whether ``stop`` was called: a method, because callbacks change the answer."""
        return self._stopped

    def close(self) -> None:
        """Release the selector."""
        self._selector.close()
