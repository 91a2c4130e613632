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

_MAX_LOGGED_ADDRESSES = 5
"""Number of addresses whose first dropped connection has a line in the log."""


class PendingConnections:
    """The connections that have not joined, by address, oldest first."""

    def __init__(self, log: Callable[[str], None], room: int = ROOM) -> None:
        """Start with none.

        Args:
            log: Prints a line.
            room: Limit of connections.
        """
        self._room = room
        self._log = log
        self._by_address: dict[str, list[Connection]] = {}
        self._count = 0
        # A set in the order of its entries: the values mean nothing. It holds the logged addresses,
        # and one more after the line that no further one is logged.
        self._dropped_addresses: dict[str, None] = {}

    def __iter__(self) -> Iterator[Connection]:
        """Yield all connections; they may be removed meanwhile."""
        connections: list[Connection] = []
        for of_address in self._by_address.values():
            connections += of_address
        return iter(connections)

    def named(self) -> list[str]:
        """Return the first five addresses of connections that did not join, dropped or not."""
        addresses = [*self._dropped_addresses, *self._by_address]
        return list(dict.fromkeys(addresses))[:_MAX_LOGGED_ADDRESSES]

    def add(self, connection: Connection) -> None:
        """Add a new connection; in a full room another one is dropped first, as ``make_room``."""
        if self._count >= self._room:
            self.make_room()
        self._by_address.setdefault(connection.address, []).append(connection)
        self._count += 1

    def make_room(self) -> None:
        """Drop the oldest connection of the address with most connections; nothing without one."""
        if not self._count:
            return
        of_busiest_address = max(self._by_address.values(), key=len)
        self.drop(of_busiest_address[0], "too many connections")

    def remove(self, connection: Connection) -> None:
        """Forget a connection, which has joined or is gone; do nothing if it is unknown."""
        entries = self._by_address.get(connection.address, [])
        if connection in entries:
            entries.remove(connection)
            self._count -= 1
            if not entries:
                del self._by_address[connection.address]

    def drop(self, connection: Connection, reason: str) -> None:
        """Close and forget a connection; log the reason, for people.

        Only the first connection of an address is logged, and only five addresses. The sixth
        address has the line that further ones are not logged.
        """
        self.remove(connection)
        connection.close()
        is_logged = connection.address in self._dropped_addresses
        # More addresses than lines: the last line has been written.
        if is_logged or len(self._dropped_addresses) > _MAX_LOGGED_ADDRESSES:
            return
        self._dropped_addresses[connection.address] = None
        if len(self._dropped_addresses) <= _MAX_LOGGED_ADDRESSES:
            self._log(
                f"dropped a connection from {connection.address}: {reason}; more from that address"
                " are not logged"
            )
        else:
            self._log("more such connections are dropped and not logged")

    def sweep(self) -> None:
        """Drop the connections that are older than PATIENCE_SECONDS."""
        limit = time.monotonic() - PATIENCE_SECONDS
        for connection in self:
            if connection.opened < limit:
                self.drop(connection, "it never joined")
