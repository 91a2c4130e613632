"""The difference between the clocks of two hosts, over the control channel: each host asks the
leader for the time.

As NTP does it: the answer is taken for the middle of the way there and back,
and is wrong by half of that at most.
"""

from __future__ import annotations

import time
from typing import Callable, Mapping

from trainworks_launcher.checks import rules
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise.control import Role

KIND = "clock"
"""Kind of the messages: ``sent`` (the asking host's time), and in the answer
``clock`` (the leader's).
"""


class Clocks:
    """One host's part in it."""

    def __init__(self, role: Role, host: str, leads: bool, log: Callable[[str], None]) -> None:
        """Nothing is sent before ``ask``. leads: this host is the leader, and answers."""
        self._role = role
        self._host = host
        self._leads = leads
        self._log = log

    def ask(self) -> None:
        """Ask the leader for the time."""
        if not self._leads:
            self._role.tell(KIND, sent=time.time())

    def heard(self, host: str, message: Mapping[str, Json]) -> None:
        """Answer, or compare the leader's clock with this host's."""
        now, sent, clock = (
            time.time(),
            _seconds(message.get("sent")),
            _seconds(message.get("clock")),
        )
        if self._leads:
            self._role.tell(KIND, host, sent=sent, clock=now)
            return
        finding = rules.clock(self._host, (sent + now) / 2 - clock, max(0.0, (now - sent) / 2))
        if finding is not None:
            self._log(f"warning: {finding}")


def _seconds(value: Json) -> float:
    """Return a time since 1970, from a host that may say anything."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e11 else 0.0
