"""What the leader knows of the other hosts: who joined, who is prepared, who is
lost, who said goodbye.

Jobs have thousands of hosts, and each reports several times: the questions that are asked for every
message count, and look at no host.
"""

from __future__ import annotations

from typing import Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.supervise.control.connection import Connection
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome


class Hosts:
    """The other hosts of one job.

    Attributes:
        joined: Their connections, by name. One that is closed belongs to a host that is lost.
        without: Hosts that the job goes on without, with the reason.
    """

    def __init__(self, others: Sequence[str]) -> None:
        """None has joined."""
        self.joined: dict[str, Connection] = {}
        self.without: dict[str, str] = {}
        self._others = dict.fromkeys(others)  # in the job's order
        self._ready: set[str] = set()  # those that are prepared, the leader among them
        self._came: set[str] = set()
        self._byes: set[str] = set()

    def __contains__(self, host: str) -> bool:
        """Return whether a host is another host of the job, lost or not."""
        return host in self._others

    @property
    def count(self) -> int:
        """How many the job still has."""
        return len(self._others) - len(self.without)

    def names(self) -> tuple[str, ...]:
        """Return those that the job still has, joined or not."""
        return tuple(host for host in self._others if host not in self.without)

    def let_in(self, host: str, connection: Connection) -> None:
        """A host has joined."""
        self.joined[host] = connection
        self._came.add(host)

    def note_ready(self, host: str) -> None:
        """A host, or the leader, is prepared."""
        self._ready.add(host)

    def note_bye(self, host: str) -> None:
        """A host is done, and waits for nothing any more."""
        self._byes.add(host)

    def forget(self, host: str) -> None:
        """A host left before the start, or the job goes on without it: it is as
        if it had never joined.
        """
        self.joined.pop(host, None)
        self._ready.discard(host)

    def is_current(self, connection: Connection) -> bool:
        """Return whether a connection is its host's present one."""
        return self.joined.get(connection.host) is connection

    def have_joined(self) -> bool:
        """Return whether all have joined."""
        return len(self.joined) == self.count

    def are_ready(self) -> bool:
        """Return whether all have joined and are prepared, the leader too."""
        return self.have_joined() and len(self._ready) == self.count + 1

    def have_come(self) -> bool:
        """Return whether each of them joined at some time."""
        return self._came.issuperset(self.names())

    def have_left(self) -> bool:
        """Return whether nobody who is connected waits for the leader."""
        return all(
            host in self._byes for host, connection in self.joined.items() if connection.open
        )

    def missing(self) -> list[str]:
        """Return those that have not joined."""
        return [host for host in self.names() if host not in self.joined]

    def unprepared(self) -> list[str]:
        """Return those that are not prepared."""
        return [host for host in self.names() if host not in self._ready]

    def dismissal(self, host: str) -> Outcome:
        """Return the end of a host that the job goes on without."""
        cause = f"{self.without[host]}; the job goes on without it"
        return Outcome(FAILED, names.EXIT_HOSTS, host, cause)
