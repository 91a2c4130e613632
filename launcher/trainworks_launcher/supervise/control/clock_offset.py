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
        """Send nothing before ``ask``. leads: whether this host is the leader, and answers."""
        self._role = role
        self._host = host
        self._leads = leads
        self._log = log

    def ask(self) -> None:
        """Ask the leader for the time."""
        if not self._leads:
            self._role.tell(KIND, sent=time.time())

    def receive(self, host: str, message: Mapping[str, Json]) -> None:
        """Answer a question, or compare the leader's clock with this host's."""
        now = time.time()
        sent, clock = _seconds(message.get("sent")), _seconds(message.get("clock"))
        if self._leads:
            self._role.tell(KIND, host, sent=sent, clock=now)
            return
        offset = (sent + now) / 2 - clock
        error = max(0.0, (now - sent) / 2)
        finding = rules.clock(self._host, offset, error)
        if finding is not None:
            self._log(f"warning: {finding}")


def _seconds(value: Json) -> float:
    """Read a time since 1970 from another host; 0 if it is not a time."""
    if not isinstance(value, (int, float)) or not 0 <= value < 1e11:
        return 0.0
    return float(value)
