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

_MAX_ACCEPTS = 32
"""Connections accepted in one turn of the loop: the loop has other work, too."""

_MAX_OTHER_DESCRIPTORS = 256
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
        """Listen on the control port, and accept connections in the loop.

        May raise this process's limit of open files.

        Raises:
            RefusalError: The port is taken.
        """
        # Two for each host: its own connection, and one with a probe or with a new try to join.
        _allow_descriptors(2 * (self._hosts.count + 1) + ROOM + _MAX_OTHER_DESCRIPTORS)
        try:
            self._server = listen(port)
        except OSError as error:
            advice = f"free the port, or set {names.CONTROL_PORT_VARIABLE} on every host"
            problem = Problem(f"cannot listen on port {port}: {error}", "control channel", advice)
            raise RefusalError([problem], names.EXIT_HOSTS) from error
        self._loop.watch(self._server, READ, self._accept)

    def describe_strangers(self) -> str:
        """Describe the connections that did not join, as a clause for people; "" for none.

        For example ``connections from 10.0.0.9, which did not join, have come``.
        """
        addresses = self._strangers.named()
        if not addresses:
            return ""
        return f"connections from {', '.join(addresses)}, which did not join, have come"

    def sweep(self) -> None:
        """Close the connections that have not joined in time."""
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
        """Accept the connections that wait at the port, as pending ones."""
        for _turn in range(_MAX_ACCEPTS):
            # A connection that is dropped below may end the job, which closes the port.
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
                # The other end has gone.
                opened.close()
                continue
            self._strangers.add(connection)

    def _message(self, connection: Connection, message: Message) -> None:
        """Handle a message of a connection that has not joined.

        The order of a join: the host sends ``join``, the leader ``challenge``, the host ``answer``
        with its proof, the leader ``welcome`` or ``refused``. A host that does not believe the
        leader's proof sends ``refused``. A message that is not expected ends the connection.
        """
        kind = message.get("type")
        # Each challenge is for one answer, so that a proof cannot be tried twice.
        transcript, connection.transcript = connection.transcript, None
        if kind == "join" and transcript is None:
            self._challenge(connection, message)
        elif kind == "answer" and transcript is not None:
            self._check_proof(connection, transcript, message)
        elif kind == "refused" and transcript is not None:
            self._refuse(connection, transcript.host, _OTHER_SECRET)
        elif kind == "probe" and self._answer_probe(connection, message):
            self._strangers.remove(connection)
            connection.close()
        elif kind == RIVAL and self.rival(connection, message):
            # A rival's connection is bounded in number and time like a stranger's.
            if not connection.open:
                self._strangers.remove(connection)
        else:
            self._strangers.drop(connection, "it is not one of the job's hosts")

    def _answer_probe(self, connection: Connection, message: Message) -> bool:
        """Answer the probe of a host that has joined on another connection.

        Return whether that was done: False for an unknown host, and for a wrong proof.
        """
        joined = self._hosts.joined.get(text(message.get("host")))
        return joined is not None and keepalive.answer(joined, connection, message)

    def _check_proof(
        self, connection: Connection, transcript: handshake.Transcript, message: Message
    ) -> None:
        """Admit a host whose proof is right, and authenticate its messages; else refuse it."""
        if not handshake.is_proof(self._secret, WORKER, transcript, message.get("proof")):
            self._refuse(connection, transcript.host, _OTHER_SECRET)
            return
        connection.use_seal(Seal(handshake.make_key(self._secret, transcript), LEADER))
        self._admit(connection, transcript.host)

    def _challenge(self, connection: Connection, message: Message) -> None:
        """Check a request to join; ask the host for its proof, and send the leader's.

        A request from another job, with another version of the launcher, without the secret, or
        for a host that has joined, is refused. A request of a host with an unknown name is dropped
        without an answer.

        Args:
            connection: Gets the transcript of the join, which the answer must prove.
            message: The request, with ``host``, ``nonce``, ``job``, ``protocol`` and ``secret``.
        """
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
            # With a secret the claim is worth nothing: this host has proved nothing yet.
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

    def _admit(self, connection: Connection, host: str) -> None:
        """Admit a host that has proved to be of this job, and send ``welcome``.

        A host without which the job goes on gets the end of its part instead. A host that has
        joined meanwhile is refused.
        """
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
        """Send ``refused`` with the reason, note the reason, and drop the connection.

        The drop is logged (``PendingConnections.drop``). The host may try again.

        Args:
            connection: The connection.
            host: The host that it claims to be.
            reason: End of a sentence about the host, for example ``it has already joined``.
        """
        self.refused[host] = reason
        connection.send("refused", reason=reason)
        self._strangers.drop(connection, f"as {host}, {reason}")


def _allow_descriptors(count: int) -> None:
    """Raise this process's limit of open files if it is lower than a number.

    A sufficient limit stays as it is, because child processes inherit it. The limit is raised as
    far as the hard limit allows; an error of the kernel is ignored.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A negative limit (RLIM_INFINITY) is none.
    is_too_low = 0 <= soft < count
    if not is_too_low:
        return
    limit = count if hard < 0 else min(count, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
