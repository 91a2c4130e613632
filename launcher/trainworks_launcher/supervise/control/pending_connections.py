"""Connections to the leader that have not joined yet: bounded in number, in time, and in the size
of their messages.

A host of the job can join while strangers flood the port: in a full room, the oldest connection of
the busiest address has to go, never the newcomer. So a stranger costs one place, for a few seconds,
and one message of a few kilobytes. The log has one line for an address, and for a few addresses
only.
"""

from __future__ import annotations

import time
from typing import Callable, Iterator

from trainworks_launcher.supervise.control.connection import Connection

ROOM = 256
"""Limit of connections that have not joined, besides one for each host of the job."""

PATIENCE_SECONDS = 10.0
"""Time in which such a connection has to join."""

_LINES = 5


class PendingConnections:
    """The connections that have not joined, by address, oldest first."""

    def __init__(self, log: Callable[[str], None], room: int = ROOM) -> None:
        """Start with none. room: limit of connections."""
        self._room = room
        self._log = log
        self._by_address: dict[str, list[Connection]] = {}
        self._count = 0
        self._named: dict[str, None] = {}  # in order

    def __iter__(self) -> Iterator[Connection]:
        """Yield all connections."""
        connections: list[Connection] = []
        for of_address in self._by_address.values():
            connections += of_address
        return iter(connections)

    def named(self) -> list[str]:
        """Return the first addresses of connections that did not join."""
        addresses = [*self._named, *self._by_address]
        return list(dict.fromkeys(addresses))[:_LINES]

    def add(self, connection: Connection) -> None:
        """Add a new connection; the room is made for it if necessary."""
        if self._count >= self._room:
            self.make_room()
        self._by_address.setdefault(connection.address, []).append(connection)
        self._count += 1

    def make_room(self) -> None:
        """Drop the oldest connection of the busiest address."""
        if self._count:
            self.drop(max(self._by_address.values(), key=len)[0], "too many connections")

    def remove(self, connection: Connection) -> None:
        """Forget a connection, which has joined or is gone; does nothing if it is unknown."""
        entries = self._by_address.get(connection.address, [])
        if connection in entries:
            entries.remove(connection)
            self._count -= 1
            if not entries:
                del self._by_address[connection.address]

    def drop(self, connection: Connection, reason: str) -> None:
        """Close a connection and log the reason, within the limit of lines."""
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
        """Close connections older than PATIENCE_SECONDS."""
        oldest = time.monotonic() - PATIENCE_SECONDS
        for connection in self:
            if connection.opened < oldest:
                self.drop(connection, "it never joined")
