"""Derive the outcome of a job from the outcomes of its hosts' commands. Pure."""

from __future__ import annotations

from typing import Collection

from trainworks_launcher.supervise.outcome.evidence import tells_of_a_peer
from trainworks_launcher.supervise.outcome.outcome import STOPPED, SUCCEEDED, Outcome


class HostOutcomes:
    """The outcomes that the leader knows, its own among them."""

    def __init__(self) -> None:
        """Start with none."""
        self._by_host: dict[str, Outcome] = {}
        self._failures: dict[str, Outcome] = {}  # all but successes, in the order of arrival

    @property
    def count(self) -> int:
        """Number of hosts with an outcome."""
        return len(self._by_host)

    def note(self, host: str, outcome: Outcome) -> None:
        """Note the outcome of a host's command, if the host has none yet or a success.

        A failure replaces a success: a server beside the command may still fail after the command
        has ended well. Nothing replaces a failure.
        """
        if host not in self._by_host or self._by_host[host].kind == SUCCEEDED:
            self.replace(host, outcome)

    def replace(self, host: str, outcome: Outcome) -> None:
        """Note an outcome in place of the host's earlier one."""
        self._by_host[host] = outcome
        if outcome.kind != SUCCEEDED:
            self._failures[host] = outcome

    def forget(self, host: str) -> None:
        """Forget a host: the job goes on without it, or it joins again."""
        self._by_host.pop(host, None)
        self._failures.pop(host, None)

    def failure(self) -> Outcome | None:
        """Return the outcome that came first and is not a success; None without one.

        A failure that only reports the loss of another host counts only if there is no other.
        """
        for failure in self._failures.values():
            if not tells_of_a_peer(failure):
                return failure
        return next(iter(self._failures.values()), None)

    def include(self, hosts: Collection[str]) -> bool:
        """Return whether all of these hosts have an outcome."""
        # The number first, because counting is quick: most calls come before all have ended, and a
        # job has thousands of hosts.
        return len(self._by_host) >= len(hosts) and all(host in self._by_host for host in hosts)

    def stopped(self, leader: str) -> Outcome:
        """Return the outcome of a stopped job.

        It is the first outcome with a status other than 0, as a stop; else one of the leader with
        status 0.

        Args:
            leader: Name of the leader.
        """
        for outcome in self._failures.values():
            if outcome.status:
                return outcome._replace(kind=STOPPED)
        cause = "stopped by a signal; every process ended with status 0"
        return Outcome(STOPPED, 0, leader, cause)
