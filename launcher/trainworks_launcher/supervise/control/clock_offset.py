"""The difference between the clocks of two hosts: each host asks the leader for the time, over the
control channel.

As in NTP, the leader's time is compared with the middle of the way there and back. The error is at
most half of that way.
"""

from __future__ import annotations

import time
from typing import Callable, Mapping

from trainworks_launcher.checks import rules
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise.control import Role

KIND = "clock"
"""Kind of the messages: ``sent`` (the asking host's time), and in the answer ``clock`` (the
leader's).
"""


class ClockComparison:
    """One host's part in the comparison."""

    def __init__(self, role: Role, host: str, leads: bool, log: Callable[[str], None]) -> None:
        """Send nothing before ``ask``.

        Args:
            role: Sends the messages.
            host: Name of this host, for a warning.
            leads: Whether this host is the leader, which answers.
            log: Prints a line.
        """
        self._role = role
        self._host = host
        self._is_leader = leads
        self._log = log

    def ask(self) -> None:
        """Ask the leader for the time; do nothing on the leader."""
        if not self._is_leader:
            self._role.tell(KIND, sent=time.time())

    def receive(self, host: str, message: Mapping[str, Json]) -> None:
        """Answer a host's question, or compare the leader's clock with this host's.

        The leader sends its time. Another host logs a warning if its own clock differs too much.

        Args:
            host: The sender.
            message: With the times ``sent`` and, in an answer, ``clock``, in seconds since 1970.
        """
        now = time.time()
        sent = _read_time(message.get("sent"))
        if self._is_leader:
            self._role.tell(KIND, host, sent=sent, clock=now)
            return
        leader_time = _read_time(message.get("clock"))
        # The leader read its clock at some time of the round trip; the middle has the least error.
        middle = (sent + now) / 2
        offset = middle - leader_time
        error = max(0.0, (now - sent) / 2)
        finding = rules.clock(self._host, offset, error)
        if finding is not None:
            self._log(f"warning: {finding}")


_LATEST_TIME = 1e11
"""Seconds since 1970; a clock that shows more than the year 5000 is not one."""


def _read_time(value: Json) -> float:
    """Read seconds since 1970 from another host; 0 if the value is not a time."""
    if not isinstance(value, (int, float)) or not 0 <= value < _LATEST_TIME:
        return 0.0
    return float(value)
