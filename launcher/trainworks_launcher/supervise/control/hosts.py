"""The leader's record of the other hosts: which of them joined, are prepared, lost, or have left.

Jobs have thousands of hosts, and each reports several times. So the questions that are asked at
every message compare counts, and visit no host.
"""

from __future__ import annotations

from typing import Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.supervise.control.connection import Connection
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome


class Hosts:
    """The other hosts of one job.

    Attributes:
        joined: Their connections, by name. A closed one is that of a lost host.
        without: Lost hosts without which the job goes on, with the reason.
    """

    def __init__(self, others: Sequence[str]) -> None:
        """Start with no host joined.

        Args:
            others: All hosts but the leader, in the job's order.
        """
        self.joined: dict[str, Connection] = {}
        self.without: dict[str, str] = {}
        self._others = dict.fromkeys(others)
        self._ready: set[str] = set()  # the leader may be one of them
        self._came: set[str] = set()  # joined at some time
        self._byes: set[str] = set()

    def __contains__(self, host: str) -> bool:
        """Return whether a host is another host of the job, lost or not."""
        return host in self._others

    @property
    def count(self) -> int:
        """Number of hosts that the job still has."""
        return len(self._others) - len(self.without)

    def names(self) -> tuple[str, ...]:
        """Return the hosts that the job still has, joined or not."""
        return tuple(host for host in self._others if host not in self.without)

    def let_in(self, host: str, connection: Connection) -> None:
        """Note that a host has joined, with its connection."""
        self.joined[host] = connection
        self._came.add(host)

    def note_ready(self, host: str) -> None:
        """Note that a host, or the leader, is prepared."""
        self._ready.add(host)

    def note_bye(self, host: str) -> None:
        """Note that a host has ended its part of the job."""
        self._byes.add(host)

    def forget(self, host: str) -> None:
        """Forget that a host joined: it left before the start, or the job goes on without it."""
        self.joined.pop(host, None)
        self._ready.discard(host)

    def is_current(self, connection: Connection) -> bool:
        """Return whether a connection is the present one of its host."""
        return self.joined.get(connection.host) is connection

    def have_joined(self) -> bool:
        """Return whether all hosts have joined."""
        return len(self.joined) == self.count

    def are_ready(self) -> bool:
        """Return whether all hosts have joined and are prepared, the leader too."""
        return self.have_joined() and len(self._ready) == self.count + 1

    def have_come(self) -> bool:
        """Return whether each host joined at some time."""
        return self._came.issuperset(self.names())

    def have_left(self) -> bool:
        """Return whether every connected host has said goodbye; True if none is connected."""
        for host, connection in self.joined.items():
            if connection.open and host not in self._byes:
                return False
        return True

    def missing(self) -> list[str]:
        """Return the hosts that have not joined, in the job's order, without given-up ones."""
        return [host for host in self.names() if host not in self.joined]

    def unprepared(self) -> list[str]:
        """Return the hosts that are not prepared, in the job's order, without given-up ones."""
        return [host for host in self.names() if host not in self._ready]

    def dismissal(self, host: str) -> Outcome:
        """Return the outcome for a host without which the job goes on: a failure of that host.

        Raises KeyError for a host that is not in ``without``.
        """
        cause = f"{self.without[host]}; the job continues without it"
        return Outcome(FAILED, names.EXIT_HOSTS, host, cause)
