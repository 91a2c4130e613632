"""Signs of life beside a silent connection, so that an outage that is shorter
than the limit is survived.

After an outage the kernel repeats what was lost at intervals that double: after 11 s without
packets, a healed connection may stay silent for 2 s more, after 8 s for 5 s (tcp_retries2,
ip-sysctl(7)). So once half of the limit has passed in silence, the worker asks over fresh
connections, several in a second. The leader's answer is a sign of life for the worker, the question
one for the leader. What was sent on the silent connection comes later, in its order. The two
directions heal apart, so the leader's heartbeat says for how long it has not heard the worker.

A question and its answer carry a proof with a number that only grows: nobody
else can ask, and none counts twice.
"""

from __future__ import annotations

import socket
import time

from trainworks_launcher.contract.json_values import number, text
from trainworks_launcher.supervise.control.connection import Attempt, Connection, heartbeat_interval
from trainworks_launcher.supervise.control.messages import STRANGERS_MESSAGE_LIMIT, Message
from trainworks_launcher.supervise.event_loop import Loop

TRY_SECONDS = 0.3
"""From one question to the next while there is no answer.

Longer than a connection takes anywhere in a cluster.
"""


class Prober:
    """A worker's questions while its connection to the leader is silent."""

    def __init__(self, loop: Loop, host: str, silent: Connection, limit: float) -> None:
        """Nothing is asked before ``look``. silent: the connection of the job.

        An answer counts as heard on it.
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
        """Begin to ask if the connection has been silent too long.

        unheard: for how many seconds the leader has not heard this host on it,
        where the leader has just said so.
        """
        self._unheard = self._unheard if unheard is None else unheard
        if not self._running and self._is_silent():
            self._running = True
            self._ask()

    def close(self) -> None:
        """Ask no more."""
        if self._attempt is not None:
            self._attempt.cancel()
        if self._connection is not None:
            self._connection.close()

    def _is_silent(self) -> bool:
        silent = max(time.monotonic() - self._silent.spoke, self._unheard)
        return self._silent.open and silent > self._limit / 2

    def _ask(self) -> None:
        self._running = self._is_silent()
        if not self._running:
            self.close()
            return
        if time.monotonic() - self._answered_at >= heartbeat_interval(self._limit):
            self.close()
            self._silent.probes += 1
            there = self._silent.there
            self._attempt = Attempt(
                self._loop, self._silent.family, there, TRY_SECONDS, self._connected
            )
        self._loop.after(TRY_SECONDS, self._ask)

    def _connected(self, opened: socket.socket | None, _: str) -> None:
        seal, count = self._silent.seal, self._silent.probes
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
        if is_probe(self._silent, message, self._silent.probes):
            self._silent.heard = self._answered_at = time.monotonic()


def is_probe(known: Connection, message: Message, at_least: int) -> bool:
    """Return whether a message on another connection comes from the other end
    of ``known``, and is new.
    """
    count = number(message.get("count"))
    new = at_least <= count < 1 << 63
    return new and known.seal is not None and known.seal.is_probe(count, text(message.get("proof")))


def answer(known: Connection, connection: Connection, message: Message) -> bool:
    """Answer a worker's question, on the leader; False if it is not that host's next one."""
    if known.seal is None or not is_probe(known, message, known.probes + 1):
        return False
    known.heard, known.probes = time.monotonic(), number(message.get("count"))
    connection.send("probe", count=known.probes, proof=known.seal.probe(known.probes))
    return True
