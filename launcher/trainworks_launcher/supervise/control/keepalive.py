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

_COUNT_LIMIT = 1 << 63
"""Numbers of probes are below this."""

TRY_SECONDS = 0.3
"""Seconds between two probes without an answer; a connection takes less anywhere in a cluster."""


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
        self._is_running = False
        self._unheard_seconds = 0.0  # for which the leader has not heard this host, as it said last
        self._answered_at = 0.0  # when a probe was answered last (monotonic clock)
        self._attempt: Attempt | None = None
        self._connection: Connection | None = None

    def look(self, unheard: float | None = None) -> None:
        """Begin to send probes if the connection has been silent for half of the limit.

        Does nothing while probes are sent: these end by themselves (``_send_probes``).

        Args:
            unheard: Seconds for which the leader has not heard this host on the connection, if
                the leader has just sent them; None keeps the earlier value.
        """
        if unheard is not None:
            self._unheard_seconds = unheard
        if not self._is_running and self._is_silent():
            self._is_running = True
            self._send_probes()

    def close(self) -> None:
        """Close the connection of the last probe; the job's own connection stays open."""
        if self._attempt is not None:
            self._attempt.cancel()
        if self._connection is not None:
            self._connection.close()

    def _is_silent(self) -> bool:
        """Return whether one of the two directions was silent for more than half of the limit.

        False for a closed connection.
        """
        unheard_here = time.monotonic() - self._silent.spoke_at
        silent_seconds = max(unheard_here, self._unheard_seconds)
        return self._silent.open and silent_seconds > self._limit / 2

    def _send_probes(self) -> None:
        """Connect for a probe every ``TRY_SECONDS``, as long as the connection is silent.

        After an answer the next probe comes a heartbeat's interval later.
        """
        self._is_running = self._is_silent()
        if not self._is_running:
            self.close()
            return
        if time.monotonic() - self._answered_at >= heartbeat_interval(self._limit):
            self.close()
            # Also if no connection is made: each number is used once.
            self._silent.probe_count += 1
            leader = self._silent.peer_address
            self._attempt = Attempt(
                self._loop, self._silent.family, leader, TRY_SECONDS, self._send_probe
            )
        self._loop.after(TRY_SECONDS, self._send_probes)

    def _send_probe(self, opened: socket.socket | None, _: str) -> None:
        """Send a probe on a new connection; do nothing if none was made.

        Args:
            opened: The connected socket; None after an error.
        """
        seal, count = self._silent.seal, self._silent.probe_count
        if opened is None or seal is None:
            return
        try:
            connection = Connection(
                self._loop, opened, self._take_answer, lambda *_: None, STRANGERS_MESSAGE_LIMIT
            )
        except OSError:
            opened.close()
            return
        self._connection = connection
        connection.send("probe", host=self._host, count=count, proof=seal.probe(count))

    def _take_answer(self, connection: Connection, message: Message) -> None:
        """Note that the leader was heard, if the answer to a probe is right."""
        connection.close()
        if is_probe(self._silent, message, self._silent.probe_count):
            self._silent.heard_at = self._answered_at = time.monotonic()


def is_probe(known: Connection, message: Message, at_least: int) -> bool:
    """Return whether a message on another connection is a new probe from the peer of ``known``.

    Args:
        known: The connection of the job, with the key of the proof.
        message: With ``count`` and ``proof``.
        at_least: The least number that is new.
    """
    count = number(message.get("count"))
    # The number is proved as 8 bytes.
    is_new = at_least <= count < _COUNT_LIMIT
    if not is_new or known.seal is None:
        return False
    return known.seal.is_probe(count, text(message.get("proof")))


def answer(known: Connection, connection: Connection, message: Message) -> bool:
    """Answer a worker's probe, on the leader, and note that the worker was heard.

    Args:
        known: The connection on which the worker has joined.
        connection: The connection of the probe.
        message: The probe.

    Returns:
        False, without an answer, if it is not a new probe of that worker.
    """
    if known.seal is None or not is_probe(known, message, known.probe_count + 1):
        return False
    known.heard_at, known.probe_count = time.monotonic(), number(message.get("count"))
    connection.send("probe", count=known.probe_count, proof=known.seal.probe(known.probe_count))
    return True
