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
        """Call ``callback(events)`` whenever the descriptor is ready.

        Replaces an earlier watch of it.
        """
        if self._is_watched(descriptor):
            self._selector.modify(descriptor, events, callback)
        else:
            self._selector.register(descriptor, events, callback)

    def unwatch(self, descriptor: Watched) -> None:
        """Forget a descriptor; no error if it is not watched."""
        if self._is_watched(descriptor):
            self._selector.unregister(descriptor)

    def _is_watched(self, descriptor: object) -> bool:
        try:
            return descriptor in self._selector.get_map()
        except ValueError:  # a socket that was closed has no number any more
            return False

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, this many seconds from now."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), callback))

    def look(
        self, look: Callable[[], Seen], seconds: float, then: Callable[[Seen | None], None]
    ) -> None:
        """Look at what may never answer, in a thread, and go on here.

        Args:
            look: Does it.
            seconds: How long it is waited for.
            then: Called once, with what was found; with None if the look failed, or has not
                returned in time, or no thread can be started.
        """
        # Its threads cost a start that needs none.
        from trainworks_launcher.contract.inspection import Inspection

        receiver, sender = os.pipe()
        made: list[Inspection[Seen]] = []
        waits = [True]

        def over(_: int = 0) -> None:
            if not waits:
                return
            waits.clear()
            self.unwatch(receiver)
            os.close(receiver)
            then(made[0].results[0] if made and made[0].results else None)

        self.watch(receiver, READ, over)
        try:
            made.append(Inspection(look, ended=lambda: os.close(sender)))
        except RuntimeError:
            os.close(sender)
        self.after(seconds, over)

    def run(self) -> None:
        """Serve events until ``stop``."""
        while not self._is_stopped():
            now = time.monotonic()
            while not self._is_stopped() and self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            if self._is_stopped():
                return
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, events in self._selector.select(timeout):
                # An earlier callback of this round may have closed the descriptor.
                if not self._is_stopped() and self._is_watched(key.fileobj):
                    key.data(events)

    def stop(self) -> None:
        """Let ``run`` return after the current callback."""
        self._stopped = True

    def _is_stopped(self) -> bool:
        return self._stopped

    def close(self) -> None:
        """Release the selector."""
        self._selector.close()
