"""Detect two hosts that both lead: a leader asks the hosts that it misses whether they lead, too.

If the index of a host is set by hand, or falls back to 0, two hosts may wait for each other until
the join limit. Each of them asks its missing hosts at its own control port. A host that leads
answers, and with a job secret both prove that they know the secret. Then both jobs end, and name
both hosts.

=======  =================================================================================
message  fields
=======  =================================================================================
leads    host, job (its identity), nonce: the question
leads    host, nonce, proof: the answer of a host that leads
leads    proof: from the host that asked
=======  =================================================================================
"""

from __future__ import annotations

import socket
from typing import Any, Callable, Sequence

from trainworks_launcher.contract.json_values import mapping, text
from trainworks_launcher.supervise.control import handshake, identity
from trainworks_launcher.supervise.control.connection import Attempt, Connection
from trainworks_launcher.supervise.control.message_authentication import LEADER, WORKER
from trainworks_launcher.supervise.control.messages import (
    STRANGERS_MESSAGE_LIMIT,
    Message,
    one_line,
)
from trainworks_launcher.supervise.control.resolve import Addresses, Lookup
from trainworks_launcher.supervise.event_loop import Loop

KIND = "leads"

ASK_AFTER_SECONDS = 10.0
"""From the beginning; most hosts of a job start within this time of each other."""

_CONNECT_SECONDS = 5.0

_MOST = 8
"""Limit of hosts that are asked: one rival is enough."""

_MAY_DIFFER = "hosts"
"""The part of an identity in which two leaders of one job may differ: each names itself as leader.
"""


class Rivals:
    """The search of one leader for another one, and its answers to other leaders."""

    def __init__(
        self, loop: Loop, own: handshake.Credentials, on_found: Callable[[str, str], None]
    ) -> None:
        """Send nothing before ``ask``. on_found: gets the other leader's name and address, once."""
        self._loop = loop
        self._own = own
        self._on_found = on_found
        self._over = False
        self._lookups: list[Lookup] = []
        self._attempts: list[Attempt] = []
        self._connections: list[Connection] = []
        self._transcripts: dict[Connection, handshake.Transcript] = {}
        self._nonces: set[str] = set()  # of this host's own questions

    def ask(self, hosts: Sequence[str], port: int) -> None:
        """Ask these hosts whether they lead this job, too."""
        for host in hosts[:_MOST]:
            self._lookups.append(Lookup(self._loop, host, port, self._resolved))

    def close(self) -> None:
        """Ask no more."""
        self._over = True
        for lookup in self._lookups:
            lookup.cancel()
        for attempt in self._attempts:
            attempt.cancel()
        for connection in self._connections:
            connection.close()

    def receive(self, connection: Connection, message: Message) -> bool:
        """Handle a message of a host that leads, or of any program in its place.

        Returns:
            False if the sender is not of this job.
        """
        transcript = self._transcripts.get(connection)
        if transcript is None:
            return self._answer(connection, message)
        if not handshake.is_proof(self._own.secret, WORKER, transcript, message.get("proof")):
            return False
        self._is_rival(transcript.host, connection)
        return True

    # --- asking -----------------------------------------------------------------------------------
    def _resolved(self, addresses: Addresses, _reason: str) -> None:
        for family, address in addresses[:1]:
            if _is_here(family, address):
                continue
            self._attempts.append(
                Attempt(self._loop, family, address, _CONNECT_SECONDS, self._connected)
            )

    def _connected(self, opened: socket.socket | None, _reason: str) -> None:
        if opened is None or self._over:
            return
        try:
            connection = Connection(
                self._loop, opened, self._answered, lambda *_: None, STRANGERS_MESSAGE_LIMIT
            )
        except OSError:
            opened.close()
            return
        self._connections.append(connection)
        nonce = handshake.make_nonce()
        self._nonces.add(nonce)
        transcript = handshake.Transcript(
            identity.as_text(self._own.job), self._own.host, nonce, ""
        )
        self._transcripts[connection] = transcript
        connection.send(KIND, host=self._own.host, job=dict(self._own.job), nonce=nonce)

    def _answered(self, connection: Connection, message: Message) -> None:
        nonce_of_leader = handshake.read_nonce(message.get("nonce"))
        transcript = self._transcripts[connection]._replace(leader_nonce=nonce_of_leader)
        if message.get("type") != KIND or not nonce_of_leader:
            connection.close()
            return
        if not handshake.is_proof(self._own.secret, LEADER, transcript, message.get("proof")):
            connection.close()
            return
        connection.send(KIND, proof=handshake.make_proof(self._own.secret, WORKER, transcript))
        self._is_rival(one_line(message.get("host"), 64), connection)

    # --- answering --------------------------------------------------------------------------------
    def _answer(self, connection: Connection, message: Message) -> bool:
        nonce = handshake.read_nonce(message.get("nonce"))
        job = mapping(message.get("job"))
        different = identity.differences(self._own.job, message.get("job"))
        if not nonce or different not in ("", _MAY_DIFFER):
            return False
        if nonce in self._nonces:
            connection.close()  # this host has asked itself, at another of its addresses
            return True
        host = one_line(text(message.get("host")), 64)
        transcript = handshake.Transcript(
            identity.as_text(job), host, nonce, handshake.make_nonce()
        )
        self._transcripts[connection] = transcript
        shown = handshake.make_proof(self._own.secret, LEADER, transcript)
        connection.send(KIND, host=self._own.host, nonce=transcript.leader_nonce, proof=shown)
        return True

    def _is_rival(self, host: str, connection: Connection) -> None:
        if not self._over:
            self._over = True
            self._on_found(host, connection.address)


def _is_here(family: int, address: Any) -> bool:
    """Return whether an address is one of this host's own: the kernel binds only those."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
