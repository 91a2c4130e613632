"""Probes beside a silent connection, so that a job survives an outage shorter than the limit.

After an outage the kernel repeats lost packets at intervals that double: after 11 s without
packets, a healed connection may stay silent for 2 s more, after 8 s for 5 s (tcp_retries2,
ip-sysctl(7)). So once half of the limit has passed in silence, the worker sends probes on fresh
connections, several in a second. The leader's answer is a sign of life for the worker, the probe
one for the leader. Messages of the silent connection come later, in their order. The two
directions heal apart, so the leader's heartbeat has the time for which it has not heard the worker.

A probe and its answer carry a proof with a number that only grows: no other program can send one,
and none counts twice.
"""

from __future__ import annotations

import socket
import time

from trainworks_launcher.contract.json_values import number, text
from trainworks_launcher.supervise.control.connection import Attempt, Connection, heartbeat_interval
from trainworks_launcher.supervise.control.messages import STRANGERS_MESSAGE_LIMIT, Message
from trainworks_launcher.supervise.event_loop import Loop

TRY_SECONDS = 0.3
"""Between two probes without an answer; longer than a connection takes anywhere in a cluster."""


class Prober:
    """Sends a worker's probes while its connection to the leader is silent."""

    def __init__(self, loop: Loop, host: str, silent: Connection, limit: float) -> None:
        """Send nothing before ``look``.

        Args:
            loop: The loop of the run.
            host: Name of this host.
            silent: The connection of the job; an answer to a probe counts as heard on it.
            limit: Limit of silence, in seconds.
        """
        self._loop = loop
        self._host = host
        self._silent = silent
        self._limit = limit
        self._running = False
        self._unheard = 0.0
        self._answered_at = 0.0
        self._attempt: Attempt | None = None
        self._connection: Connection | None = None

    def look(self, unheard: float | None = None) -> None:
        """Begin to send probes if the connection has been silent for too long.

        Args:
            unheard: Seconds for which the leader has not heard this host on the connection, if
                the leader has just sent them.
        """
        self._unheard = self._unheard if unheard is None else unheard
        if not self._running and self._is_silent():
            self._running = True
            self._ask()

    def close(self) -> None:
        """Send no more probes."""
        if self._attempt is not None:
            self._attempt.cancel()
        if self._connection is not None:
            self._connection.close()

    def _is_silent(self) -> bool:
        silent = max(time.monotonic() - self._silent.spoke_at, self._unheard)
        return self._silent.open and silent > self._limit / 2

    def _ask(self) -> None:
        self._running = self._is_silent()
        if not self._running:
            self.close()
            return
        if time.monotonic() - self._answered_at >= heartbeat_interval(self._limit):
            self.close()
            self._silent.probe_count += 1
            there = self._silent.peer_address
            self._attempt = Attempt(
                self._loop, self._silent.family, there, TRY_SECONDS, self._connected
            )
        self._loop.after(TRY_SECONDS, self._ask)

    def _connected(self, opened: socket.socket | None, _: str) -> None:
        seal, count = self._silent.seal, self._silent.probe_count
        if opened is None or seal is None:
            return
        try:
            made = Connection(
                self._loop, opened, self._answered, lambda *_: None, STRANGERS_MESSAGE_LIMIT
            )
        except OSError:
            opened.close()
            return
        self._connection = made
        made.send("probe", host=self._host, count=count, proof=seal.probe(count))

    def _answered(self, connection: Connection, message: Message) -> None:
        connection.close()
        if is_probe(self._silent, message, self._silent.probe_count):
            self._silent.heard_at = self._answered_at = time.monotonic()


def is_probe(known: Connection, message: Message, at_least: int) -> bool:
    """Return whether a message on another connection is a new probe from the peer of ``known``."""
    count = number(message.get("count"))
    is_new = at_least <= count < 1 << 63
    if not is_new or known.seal is None:
        return False
    return known.seal.is_probe(count, text(message.get("proof")))


def answer(known: Connection, connection: Connection, message: Message) -> bool:
    """Answer a worker's probe, on the leader; False if it is not that host's next one."""
    if known.seal is None or not is_probe(known, message, known.probe_count + 1):
        return False
    known.heard_at, known.probe_count = time.monotonic(), number(message.get("count"))
    connection.send("probe", count=known.probe_count, proof=known.seal.probe(known.probe_count))
    return True
