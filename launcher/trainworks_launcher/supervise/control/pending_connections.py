"""Connections to the leader that have not joined yet: bounded in number, in
time, and in what they may say.

A host of the job gets in while strangers flood the port: when the room is full, the oldest
connection of the address that holds most of it has to go, never the newcomer. What a stranger costs
is one place, for a few seconds, and one message of a few kilobytes. The log says so once for an
address, and for a few addresses only.
"""

from __future__ import annotations

import time
from typing import Callable, Iterator

from trainworks_launcher.supervise.control.connection import Connection

ROOM = 256
"""Connections that may be open without having joined, beside one for each host of the job."""

PATIENCE_SECONDS = 10.0
"""How long one of them may take to join."""

_LINES = 5


class PendingConnections:
    """The connections that have not joined, by address, oldest first."""

    def __init__(self, log: Callable[[str], None], room: int = ROOM) -> None:
        """Start with none. room: how many there may be."""
        self._room = room
        self._log = log
        self._by_address: dict[str, list[Connection]] = {}
        self._count = 0
        self._named: dict[str, None] = {}  # in order

    def __iter__(self) -> Iterator[Connection]:
        """Yield all of them."""
        return iter([entry for entries in self._by_address.values() for entry in entries])

    def named(self) -> list[str]:
        """Return the first addresses of what came and did not join."""
        waiting = [*self._named, *self._by_address]
        return list(dict.fromkeys(waiting))[:_LINES]

    def add(self, connection: Connection) -> None:
        """Give a newcomer a place."""
        if self._count >= self._room:
            self.make_room()
        self._by_address.setdefault(connection.address, []).append(connection)
        self._count += 1

    def make_room(self) -> None:
        """Let the oldest connection of the busiest address go."""
        if self._count:
            self.drop(max(self._by_address.values(), key=len)[0], "too many connections")

    def remove(self, connection: Connection) -> None:
        """It has joined, or is gone; no error if it is none of them."""
        entries = self._by_address.get(connection.address, [])
        if connection in entries:
            entries.remove(connection)
            self._count -= 1
            if not entries:
                del self._by_address[connection.address]

    def drop(self, connection: Connection, reason: str) -> None:
        """Close a connection and say why, unless enough was said."""
        self.remove(connection)
        connection.close()
        if connection.address in self._named or len(self._named) > _LINES:
            return
        self._named[connection.address] = None
        if len(self._named) <= _LINES:
            self._log(
                f"dropped a connection from {connection.address}: {reason}; more from that address"
                " are not logged"
            )
        else:
            self._log("more such connections are dropped and not logged")

    def sweep(self) -> None:
        """Drop who had time enough to join."""
        oldest = time.monotonic() - PATIENCE_SECONDS
        for connection in self:
            if connection.opened < oldest:
                self.drop(connection, "it never joined")
