"""Look up a host's name without stopping the loop: DNS may take half a minute, or never answer."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, Callable, List, Tuple

from trainworks_launcher.supervise.event_loop import READ, Loop

Addresses = List[Tuple[int, Any]]
"""Address family and socket address, as ``socket.getaddrinfo`` gives them, in its order."""


class Lookup:
    """One look-up of a name, in a thread of its own.

    Attributes:
        running: Whether the look-up has neither ended nor been cancelled.
    """

    def __init__(
        self, loop: Loop, name: str, port: int, done: Callable[[Addresses, str], None]
    ) -> None:
        """Begin to look up the name. Errors go to ``done``, none is raised.

        Args:
            loop: The loop of the run.
            name: A host's name or address.
            port: The TCP port that the addresses get.
            done: Called once, in the loop, with the addresses, or with none and the reason; not
                after ``cancel``.
        """
        self._loop = loop
        self._done = done
        self._addresses: Addresses = []
        self._reason = ""
        self.running = True
        self._reader, self._writer = os.pipe()
        loop.watch(self._reader, READ, lambda _: self._finish())
        thread = threading.Thread(target=self._resolve, args=(name, port), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # This host can start no further thread: the loop has to wait.
            self._resolve(name, port)

    def cancel(self) -> None:
        """Forget the look-up: ``done`` is not called. Its thread ends when the resolver answers."""
        if self.running:
            self.running = False
            self._loop.unwatch(self._reader)
            os.close(self._reader)

    def _resolve(self, name: str, port: int) -> None:
        """Look up the name, keep the addresses or the reason, and wake the loop.

        Runs in the thread.
        """
        try:
            rows = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            self._addresses = [(row[0], row[4]) for row in rows]
        except (OSError, UnicodeError) as error:
            # Python's own codec refuses a name with a part that is too long: a UnicodeError, which
            # has no strerror.
            cause = getattr(error, "strerror", "") or error
            self._reason = f"cannot resolve the name {name}: {cause}"
        # The reader's end becomes readable, which wakes the loop.
        os.close(self._writer)

    def _finish(self) -> None:
        """Call ``done`` with the result, in the loop."""
        if self.running:
            self.cancel()
            self._done(self._addresses, self._reason)
