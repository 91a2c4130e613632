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

from trainworks_launcher.contract.json_values import mapping
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
"""Seconds from the begin; most hosts of a job start within this time of each other."""

_CONNECT_SECONDS = 5.0
"""Limit of a try to connect to another leader."""

_MAX_ASKED_HOSTS = 8
"""Limit of hosts that are asked: one rival is enough."""

_HOST_CHARACTERS = 64
"""Length of a rival's name that is shown."""

_MAY_DIFFER = "hosts"
"""The part of an identity in which two leaders of one job may differ: each names itself as leader.
"""


class Rivals:
    """The search of one leader for another one, and its answers to other leaders."""

    def __init__(
        self, loop: Loop, own: handshake.Credentials, on_found: Callable[[str, str], None]
    ) -> None:
        """Send nothing before ``ask``.

        Args:
            loop: The loop of the run.
            own: Name, job and secret of this host.
            on_found: Called once with the name and the address of another leader.
        """
        self._loop = loop
        self._own = own
        self._on_found = on_found
        self._is_over = False  # closed, or a rival was found
        self._lookups: list[Lookup] = []
        self._attempts: list[Attempt] = []
        self._connections: list[Connection] = []
        # Of questions, this host's and those of others: the values that a proof covers.
        self._transcripts: dict[Connection, handshake.Transcript] = {}
        self._nonces: set[str] = set()  # of this host's own questions

    def ask(self, hosts: Sequence[str], port: int) -> None:
        """Ask hosts whether they lead this job, too; the first eight only.

        Args:
            hosts: Names or addresses.
            port: Their control port.
        """
        for host in hosts[:_MAX_ASKED_HOSTS]:
            self._lookups.append(Lookup(self._loop, host, port, self._connect))

    def close(self) -> None:
        """End all questions, and close the connections that this host has made."""
        self._is_over = True
        for lookup in self._lookups:
            lookup.cancel()
        for attempt in self._attempts:
            attempt.cancel()
        for connection in self._connections:
            connection.close()

    def receive(self, connection: Connection, message: Message) -> bool:
        """Handle a message that came to this leader's port.

        The first one of a connection is a question, the second one the proof of the host that
        asked. The sender may be any program.

        Returns:
            False if the sender is not of this job.
        """
        transcript = self._transcripts.get(connection)
        if transcript is None:
            return self._answer(connection, message)
        if not handshake.is_proof(self._own.secret, WORKER, transcript, message.get("proof")):
            return False
        self._report_rival(transcript.host, connection)
        return True

    # --- asking -----------------------------------------------------------------------------------
    def _connect(self, addresses: Addresses, _reason: str) -> None:
        """Begin to connect to the first address of a host, unless it is one of this host."""
        if not addresses:
            return
        family, address = addresses[0]
        if _is_local(family, address):
            return
        self._attempts.append(Attempt(self._loop, family, address, _CONNECT_SECONDS, self._send))

    def _send(self, opened: socket.socket | None, _reason: str) -> None:
        """Send the question; do nothing if no connection was made.

        Args:
            opened: The connected socket; None after an error.
        """
        if opened is None:
            return
        if self._is_over:
            opened.close()
            return
        try:
            connection = Connection(
                self._loop, opened, self._check_answer, lambda *_: None, STRANGERS_MESSAGE_LIMIT
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

    def _check_answer(self, connection: Connection, message: Message) -> None:
        """Report the rival, and send this host's proof, if the other end has proved to lead.

        Any other answer closes the connection.
        """
        nonce_of_leader = handshake.read_nonce(message.get("nonce"))
        transcript = self._transcripts[connection]._replace(leader_nonce=nonce_of_leader)
        if message.get("type") != KIND or not nonce_of_leader:
            connection.close()
            return
        if not handshake.is_proof(self._own.secret, LEADER, transcript, message.get("proof")):
            connection.close()
            return
        connection.send(KIND, proof=handshake.make_proof(self._own.secret, WORKER, transcript))
        self._report_rival(one_line(message.get("host"), _HOST_CHARACTERS), connection)

    # --- answering --------------------------------------------------------------------------------
    def _answer(self, connection: Connection, message: Message) -> bool:
        """Answer a question: this host leads the job. Return False if it is of another job.

        The answer has this host's proof, for which the other end then sends its own. A question of
        this host itself only closes the connection.
        """
        nonce = handshake.read_nonce(message.get("nonce"))
        job = mapping(message.get("job"))
        different = identity.differences(self._own.job, message.get("job"))
        if not nonce or different not in ("", _MAY_DIFFER):
            return False
        if nonce in self._nonces:
            # This host has asked itself, at another of its addresses.
            connection.close()
            return True
        host = one_line(message.get("host"), _HOST_CHARACTERS)
        transcript = handshake.Transcript(
            identity.as_text(job), host, nonce, handshake.make_nonce()
        )
        self._transcripts[connection] = transcript
        proof = handshake.make_proof(self._own.secret, LEADER, transcript)
        connection.send(KIND, host=self._own.host, nonce=transcript.leader_nonce, proof=proof)
        return True

    def _report_rival(self, host: str, connection: Connection) -> None:
        """Call ``on_found`` with the first other leader; later ones do not count."""
        if not self._is_over:
            self._is_over = True
            self._on_found(host, connection.address)


def _is_local(family: int, address: Any) -> bool:
    """Return whether an address is one of this host's own: the kernel binds only those.

    Args:
        family: Address family.
        address: Socket address, as ``socket.getaddrinfo`` returns it.
    """
    try:
        # Also the socket itself fails, if this host does not have the family (IPv6 is off).
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True
