"""The leader's port, and who gets in by it: the hosts of this job that prove
it, each of them once.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import Callable, Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.json_values import Json, mapping, text
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
"""Connections taken in at once, before others of the loop have their turn."""

_OTHER_DESCRIPTORS = 256
"""Files that the launcher has open besides connections of the control channel.

Its ranks' pipes are most of them.
"""


class Admission:
    """Takes connections in, and lets hosts join.

    Attributes:
        refused: Hosts that were not let in, with the last reason.
        rival: Takes what another leader says; False if it is not one of this job.
        other_launcher: Hears of a host of this job that has another version of the launcher. A
            stranger who has not the job's secret cannot say so.
    """

    def __init__(
        self,
        loop: Loop,
        hosts: Hosts,
        job: Mapping[str, Json],
        secret: str,
        let_in: Callable[[Connection], None],
        log: Callable[[str], None],
    ) -> None:
        """Nothing is opened before ``open``.

        Args:
            loop: The loop of the run.
            hosts: The other hosts of the job; those that join are noted there.
            job: Its identity.
            secret: Of the job; ``""`` if it has none.
            let_in: A host has joined by this connection, which has to be handed over.
            log: Prints a line.
        """
        self.refused: dict[str, str] = {}
        self.rival: Callable[[Connection, Message], bool] = lambda *_: False
        self.other_launcher: Callable[[str], None] = lambda _: None
        self._loop = loop
        self._hosts = hosts
        self._job = job
        self._secret = secret
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

    def came(self) -> str:
        """Return from where connections came that did not join, for a sentence; "" if none came."""
        addresses = self._strangers.named()
        return (
            f"connections from {', '.join(addresses)}, which did not join, have come"
            if addresses
            else ""
        )

    def sweep(self) -> None:
        """Drop the connections that had time enough to join."""
        self._strangers.sweep()

    def close(self) -> None:
        """Close the port, and what has not joined."""
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
                # The other end is gone already, or no descriptor is left: then
                # a stranger has to make room.
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
        asked, connection.asked = connection.asked, None
        known = self._hosts.joined.get(text(message.get("host")))
        if kind == "join" and asked is None:
            self._challenge(connection, message)
        elif kind == "answer" and asked is not None:
            if handshake.is_proof(self._secret, WORKER, asked, message.get("proof")):
                connection.use_seal(Seal(handshake.make_key(self._secret, asked), LEADER))
                self._proved(connection, asked)
            else:
                self._refuse(
                    connection,
                    asked.host,
                    f"it has another {names.JOB_SECRET_VARIABLE} than the leader",
                )
        elif kind == "refused" and asked is not None:
            self._refuse(
                connection,
                asked.host,
                f"it has another {names.JOB_SECRET_VARIABLE} than the leader",
            )
        elif kind == "probe" and known is not None and keepalive.answer(known, connection, message):
            self._strangers.remove(connection)
            connection.close()
        elif kind == RIVAL and self.rival(connection, message):
            # Its connection is bounded like each stranger's.
            if not connection.open:
                self._strangers.remove(connection)
        else:
            self._strangers.drop(connection, "it is not one of the job's hosts")

    def _challenge(self, connection: Connection, message: Message) -> None:
        """Let a host that may join prove that it is of this job, and prove the same to it."""
        host = text(message.get("host"))
        nonce = handshake.read_nonce(message.get("nonce"))
        different = identity.differences(self._job, message.get("job"))
        if host not in self._hosts:
            self._strangers.drop(
                connection, f"it is not one of the job's hosts: {one_line(host, 64)!r}"
            )
        elif message.get("protocol") != PROTOCOL:
            self._refuse(
                connection, host, f"it runs another version of the launcher: {OTHER_LAUNCHER}"
            )
            if not self._secret:
                self.other_launcher(host)
        elif different or not nonce:
            self._refuse(
                connection,
                host,
                f"it belongs to another job: different {different or 'launcher version'}",
            )
        elif host in self._hosts.joined:
            joined = self._hosts.joined[host].open
            self._refuse(connection, host, "it has already joined" if joined else "it was lost")
        elif self._secret and message.get("secret") is not True:
            self._refuse(
                connection, host, f"it has no {names.JOB_SECRET_VARIABLE}, and the leader has one"
            )
        else:
            said = identity.as_text(mapping(message.get("job")))
            asked = handshake.Transcript(said, host, nonce, handshake.make_nonce())
            connection.asked = asked
            shown = handshake.make_proof(self._secret, LEADER, asked)
            known = bool(self._secret)
            connection.send(
                "challenge", nonce=asked.leader_nonce, proof=shown, secret=known, protocol=PROTOCOL
            )

    def _proved(self, connection: Connection, asked: handshake.Transcript) -> None:
        host = asked.host
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
        """Do not let in the connection that claims to be this host, and tell it why."""
        self.refused[host] = reason
        connection.send("refused", reason=reason)
        self._strangers.drop(connection, f"as {host}, {reason}")


def _allow_descriptors(count: int) -> None:
    """Raise this process's own limit of open files where it is too low for the
    job's connections, as far as it may.

    The limit stays as it is where it suffices: what is started inherits it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < count:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (count if hard < 0 else min(count, hard), hard)
            )
