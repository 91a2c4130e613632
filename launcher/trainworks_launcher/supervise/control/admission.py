"""Admit hosts at the leader's port: those that prove to be of this job, each of them once."""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import Callable

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.json_values import mapping, text
from trainworks_launcher.supervise.control import handshake, identity, keepalive
from trainworks_launcher.supervise.control.connection import Connection, listen
from trainworks_launcher.supervise.control.hosts import Hosts
from trainworks_launcher.supervise.control.message_authentication import LEADER, WORKER, Seal
from trainworks_launcher.supervise.control.messages import (
    OTHER_LAUNCHER,
    PROTOCOL,
    STRANGERS_MESSAGE_LIMIT,
    Message,
    one_line,
    outcome_fields,
)
from trainworks_launcher.supervise.control.pending_connections import ROOM, PendingConnections
from trainworks_launcher.supervise.control.rivals import KIND as RIVAL
from trainworks_launcher.supervise.event_loop import READ, Loop

_ACCEPTS = 32
"""Connections accepted in one turn of the loop."""

_OTHER_DESCRIPTORS = 256
"""Open files of the launcher besides connections of the control channel; most are pipes of ranks.
"""

_OTHER_SECRET = f"it has another {names.JOB_SECRET_VARIABLE} than the leader"


class Admission:
    """Accepts connections, and lets hosts join.

    Attributes:
        refused: Hosts that were not admitted, with the last reason.
        rival: Handles the message of another leader; returns False if it is of another job.
        other_launcher: Handles a host of this job with another version of the launcher. Not
            called in a job with a secret, because a stranger may claim to be such a host.
    """

    def __init__(
        self,
        loop: Loop,
        hosts: Hosts,
        own: handshake.Credentials,
        let_in: Callable[[Connection], None],
        log: Callable[[str], None],
    ) -> None:
        """Open nothing before ``open``.

        Args:
            loop: The loop of the run.
            hosts: The other hosts of the job; those that join are noted there.
            own: Name of this host, identity and secret of the job.
            let_in: Called for each host that has joined, to take over the connection.
            log: Prints a line.
        """
        self.refused: dict[str, str] = {}
        self.rival: Callable[[Connection, Message], bool] = lambda *_: False
        self.other_launcher: Callable[[str], None] = lambda _: None
        self._loop = loop
        self._hosts = hosts
        self._job = own.job
        self._secret = own.secret
        self._let_in = let_in
        self._strangers = PendingConnections(log, ROOM + hosts.count)
        self._server: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        """Whether hosts can join."""
        return self._server is not None

    def open(self, port: int) -> None:
        """Listen. Raises RefusalError if the port is taken."""
        _allow_descriptors(2 * (self._hosts.count + 1) + ROOM + _OTHER_DESCRIPTORS)
        try:
            self._server = listen(port)
        except OSError as error:
            advice = f"free the port, or set {names.CONTROL_PORT_VARIABLE} on every host"
            problem = Problem(f"cannot listen on port {port}: {error}", "control channel", advice)
            raise RefusalError([problem], names.EXIT_HOSTS) from error
        self._loop.watch(self._server, READ, self._accept)

    def describe_strangers(self) -> str:
        """Describe the connections that did not join, for a sentence; "" for none."""
        addresses = self._strangers.named()
        if not addresses:
            return ""
        return f"connections from {', '.join(addresses)}, which did not join, have come"

    def sweep(self) -> None:
        """Close the connections that are too old to join."""
        self._strangers.sweep()

    def close(self) -> None:
        """Close the port, and the connections that have not joined."""
        for connection in self._strangers:
            connection.close()
        if self._server is not None:
            self._loop.unwatch(self._server)
            self._server.close()
            self._server = None

    def _accept(self, _: int) -> None:
        for _turn in range(_ACCEPTS):
            if self._server is None:
                return
            try:
                opened, _address = self._server.accept()
            except BlockingIOError:
                return
            except OSError:
                # The other end is gone already, or no descriptor is left: in that case the
                # oldest stranger has to go.
                self._strangers.make_room()
                return
            try:
                connection = Connection(
                    self._loop, opened, self._message, self._strangers.drop, STRANGERS_MESSAGE_LIMIT
                )
            except OSError:
                opened.close()
                continue
            self._strangers.add(connection)

    def _message(self, connection: Connection, message: Message) -> None:
        kind = message.get("type")
        # Each challenge is for one answer.
        transcript, connection.transcript = connection.transcript, None
        joined = self._hosts.joined.get(text(message.get("host")))
        if kind == "join" and transcript is None:
            self._challenge(connection, message)
        elif kind == "answer" and transcript is not None:
            if handshake.is_proof(self._secret, WORKER, transcript, message.get("proof")):
                connection.use_seal(Seal(handshake.make_key(self._secret, transcript), LEADER))
                self._proved(connection, transcript)
            else:
                self._refuse(connection, transcript.host, _OTHER_SECRET)
        elif kind == "refused" and transcript is not None:
            self._refuse(connection, transcript.host, _OTHER_SECRET)
        elif (
            kind == "probe" and joined is not None and keepalive.answer(joined, connection, message)
        ):
            self._strangers.remove(connection)
            connection.close()
        elif kind == RIVAL and self.rival(connection, message):
            # A rival's connection is bounded in number and time like a stranger's.
            if not connection.open:
                self._strangers.remove(connection)
        else:
            self._strangers.drop(connection, "it is not one of the job's hosts")

    def _challenge(self, connection: Connection, message: Message) -> None:
        """Check a request to join; ask the host for its proof, and show the leader's."""
        host = text(message.get("host"))
        nonce = handshake.read_nonce(message.get("nonce"))
        different = identity.differences(self._job, message.get("job"))
        if host not in self._hosts:
            shown = one_line(host, 64)
            self._strangers.drop(connection, f"it is not one of the job's hosts: {shown!r}")
        elif message.get("protocol") != PROTOCOL:
            self._refuse(
                connection, host, f"it runs another version of the launcher: {OTHER_LAUNCHER}"
            )
            if not self._secret:
                self.other_launcher(host)
        elif different or not nonce:
            different = different or "launcher version"
            self._refuse(connection, host, f"it belongs to another job: different {different}")
        elif host in self._hosts.joined:
            reason = "it was lost"
            if self._hosts.joined[host].open:
                reason = "it has already joined"
            self._refuse(connection, host, reason)
        elif self._secret and message.get("secret") is not True:
            self._refuse(
                connection, host, f"it has no {names.JOB_SECRET_VARIABLE}, and the leader has one"
            )
        else:
            job = identity.as_text(mapping(message.get("job")))
            transcript = handshake.Transcript(job, host, nonce, handshake.make_nonce())
            connection.transcript = transcript
            connection.send(
                "challenge",
                nonce=transcript.leader_nonce,
                proof=handshake.make_proof(self._secret, LEADER, transcript),
                secret=bool(self._secret),
                protocol=PROTOCOL,
            )

    def _proved(self, connection: Connection, transcript: handshake.Transcript) -> None:
        """Admit a host that has proved that it is of this job."""
        host = transcript.host
        if host in self._hosts.without:
            connection.send("finish", **outcome_fields(self._hosts.dismissal(host)))
            self._strangers.drop(connection, f"{host} came back after it was lost")
            return
        if host in self._hosts.joined:
            # Two proofs of one host at the same time.
            self._refuse(connection, host, "it has already joined")
            return
        self._strangers.remove(connection)
        connection.trust(host)
        self.refused.pop(host, None)
        self._hosts.let_in(host, connection)
        connection.send("welcome")
        self._let_in(connection)

    def _refuse(self, connection: Connection, host: str, reason: str) -> None:
        """Drop a connection that claims to be this host, and send the reason."""
        self.refused[host] = reason
        connection.send("refused", reason=reason)
        self._strangers.drop(connection, f"as {host}, {reason}")


def _allow_descriptors(count: int) -> None:
    """Raise this process's own limit of open files if it is too low for the job's connections.

    A sufficient limit stays as it is, because child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not 0 <= soft < count:
        return
    limit = count if hard < 0 else min(count, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
