"""How the commands of a job's hosts ended, and what the outcome of the job is by that. Pure."""

from __future__ import annotations

from typing import Collection

from trainworks_launcher.supervise.outcome.evidence import tells_of_a_peer
from trainworks_launcher.supervise.outcome.outcome import STOPPED, SUCCEEDED, Outcome


class Ends:
    """The ends that the leader knows, its own among them."""

    def __init__(self) -> None:
        """None has ended."""
        self._by_host: dict[str, Outcome] = {}
        self._failures: dict[
            str, Outcome
        ] = {}  # those that are no success, in the order in which they came

    @property
    def count(self) -> int:
        """How many hosts have ended."""
        return len(self._by_host)

    def note(self, host: str, outcome: Outcome) -> None:
        """A host's command ended.

        The first end counts, but a failure also after a success: a server beside the command may
        still fail after the command has ended well.
        """
        if host not in self._by_host or self._by_host[host].kind == SUCCEEDED:
            self.replace(host, outcome)

    def replace(self, host: str, outcome: Outcome) -> None:
        """Note an end that counts, whatever the host reported before."""
        self._by_host[host] = outcome
        if outcome.kind != SUCCEEDED:
            self._failures[host] = outcome

    def forget(self, host: str) -> None:
        """The job goes on without a host, or it begins again."""
        self._by_host.pop(host, None)
        self._failures.pop(host, None)

    def failure(self) -> Outcome | None:
        """Return the end of the host that failed first.

        One that only misses another host gives way to any other.
        """
        others = (failure for failure in self._failures.values() if not tells_of_a_peer(failure))
        return next(others, None) or next(iter(self._failures.values()), None)

    def include(self, hosts: Collection[str]) -> bool:
        """Return whether all of these hosts have ended."""
        return len(self._by_host) >= len(hosts) and all(host in self._by_host for host in hosts)

    def stopped(self, leader: str) -> Outcome:
        """Return the outcome of a job that was stopped: the first status that
        is not 0 is the job's.
        """
        well = Outcome(STOPPED, 0, leader, "stopped by a signal; every process ended with status 0")
        first = next((outcome for outcome in self._failures.values() if outcome.status), well)
        return first._replace(kind=STOPPED)
