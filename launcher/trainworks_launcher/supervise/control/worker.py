"""The role of every host but the first: it joins, reports, and ends as the leader says."""

from __future__ import annotations

import os
import socket
import time

from trainworks_launcher import names
from trainworks_launcher.network import Limits
from trainworks_launcher.plan import Control
from trainworks_launcher.supervise.control import Events, proof
from trainworks_launcher.supervise.control.connection import Connection
from trainworks_launcher.supervise.control.messages import (
    Message,
    digest,
    one_line,
    outcome_fields,
    read_outcome,
    suspect_fields,
)
from trainworks_launcher.supervise.loop import WRITE, Loop
from trainworks_launcher.supervise.outcome import FAILED, Outcome, Suspect
from trainworks_launcher.values import Json, text

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 15.0
"""From the connection to the welcome; a leader that is busy with many hosts may take some of it."""

_LONGEST_PAUSE = 1.0
_LOGGED_REASONS = 5


class Worker:
    """Joins the leader, tells it what happens on this host, and does as it says."""

    def __init__(
        self,
        loop: Loop,
        control: Control,
        limits: Limits,
        mode: str,
        host: str,
        host_key: str,
        secret: str,
        events: Events,
    ) -> None:
        """Nothing is opened before ``begin``. secret: of the job, "" if hosts join without a proof."""
        self._loop = loop
        self._control = control
        self._limits = limits
        self._digest = digest(control, mode)
        self._host = host
        self._host_key = host_key
        self._secret = secret
        self._nonce = ""
        self._believed = False  # the leader has proved that it knows the secret, or there is none
        self._public_key = ""
        self._events = events
        self._connection: Connection | None = None
        self._connecting: socket.socket | None = None
        self._deadline = 0.0
        self._pause = 0.1
        self._why = "it did not try"
        self._answered = False
        self._refused = ""
        self._logged: set[str] = set()
        self._stopped = False
        self._finished: Outcome | None = None
        self._leaving = False
        self._left = False

    # -------------------------------------------------------------------------------------- what the supervisor calls
    def begin(self) -> None:
        """Start to look for the leader, which may not be up yet."""
        self._deadline = time.monotonic() + self._limits.join
        self._loop.after(names.HEARTBEAT_SECONDS, self._beat)
        self._try()

    def ready(self, ssh_port: int) -> None:
        """This host is prepared."""
        self._send("ready", ssh_port=ssh_port)

    def stopping(self) -> None:
        """A stop signal came to this host."""
        self._stopped = True
        self._send("stopping")

    def suspect(self, suspect: Suspect) -> None:
        """A rank of this host ended."""
        if self._connection is not None and self._connection.open and self._connection.host:
            self._connection.send("suspect", **suspect_fields(suspect, time.monotonic()))

    def ended(self, outcome: Outcome) -> None:
        """This host's command ended. Without a leader its outcome is all there is."""
        if self._connection is not None and self._connection.open and self._connection.host:
            self._connection.send("ended", **outcome_fields(outcome))
        elif not self._finished:
            self._finish(outcome)

    def leave(self) -> None:
        """Say goodbye, and go when the leader goes."""
        self._leaving = True
        self._send("bye")
        if self._connection is None or not self._connection.open:
            self._leave_now()
        else:
            self._loop.after(names.LEAVE_LIMIT_SECONDS, self._leave_now)

    def close(self) -> None:
        """Close everything at once."""
        self._close_attempt()
        if self._connection is not None:
            self._connection.close()

    def _send(self, kind: str, **fields: Json) -> None:
        if self._connection is not None and self._connection.host:
            self._connection.send(kind, **fields)

    # --------------------------------------------------------------------------------------------------------- joining
    def _try(self) -> None:
        """One try to connect, without waiting for it (except for the name's resolution)."""
        if self._finished:
            return
        if time.monotonic() >= self._deadline:
            done = "let this host in" if self._answered else "answer"
            reason = (
                f"the leader {self._control.leader} did not {done} on port {self._control.port} within"
                f" {self._limits.join:g} s: {self._why}"
            )
            self._finish(Outcome(FAILED, names.EXIT_HOSTS, self._host, reason))
            return
        try:
            found = socket.getaddrinfo(self._control.leader, self._control.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            opened = socket.socket(family, kind, protocol)
        except OSError as error:
            self._again(f"cannot resolve its name: {error.strerror or error}")
            return
        opened.setblocking(False)
        self._connecting = opened
        try:
            opened.connect(address)
        except BlockingIOError:
            pass
        except OSError as error:
            self._failed(error)
            return
        self._loop.watch(opened, WRITE, self._connected)
        self._loop.after(_CONNECT_SECONDS, lambda: self._give_up(opened))

    def _give_up(self, opened: socket.socket) -> None:
        if self._connecting is opened:
            self._failed(TimeoutError("it does not answer"))

    def _failed(self, error: OSError) -> None:
        self._close_attempt()
        self._again(str(error.strerror or error))

    def _close_attempt(self) -> None:
        if self._connecting is not None:
            self._loop.unwatch(self._connecting)
            self._connecting.close()
            self._connecting = None

    def _again(self, why: str) -> None:
        self._why = why
        self._loop.after(self._pause, self._try)
        self._pause = min(self._pause * 1.5, _LONGEST_PAUSE)

    def _connected(self, _: int) -> None:
        opened = self._connecting
        if opened is None:
            return
        code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._failed(OSError(code, os.strerror(code)))
            return
        self._connecting = None
        self._loop.unwatch(opened)
        try:
            connection = Connection(self._loop, opened, self._message, self._lost)
        except OSError as error:
            opened.close()
            self._again(str(error))
            return
        self._connection = connection
        self._answered = True
        self._believed = not self._secret
        self._refused = ""
        fields: dict[str, Json] = {"host": self._host, "digest": self._digest, "ssh_host_key": self._host_key}
        if self._secret:
            fields["nonce"] = self._nonce = proof.make_nonce()
        connection.send("join", **fields)
        self._loop.after(_ANSWER_SECONDS, lambda: self._not_let_in(connection))

    def _not_let_in(self, connection: Connection) -> None:
        if connection.open and not connection.host and not self._finished:
            connection.close()
            self._lost(connection, "it did not answer")

    def _message(self, connection: Connection, message: Message) -> None:
        kind = message.get("type")
        if kind == "refused" and not connection.host:
            self._refused = one_line(message.get("reason"))
        elif kind == "challenge" and not self._believed:
            self._answer(connection, message)
        elif kind == "welcome" and not connection.host:
            self._welcomed(connection, message)
        elif not self._believed:
            self._distrust(connection, "it does not prove that it knows the job's secret")
        elif kind == "finish" and not self._finished:
            self._finish(read_outcome(message))
        elif not connection.host:
            self._distrust(connection, "it does not speak the launcher's protocol")
        elif kind == "go":
            self._events.go()
        elif kind == "stop":
            self._events.stop()
        elif kind == "without":
            self._events.log(one_line(message.get("text"), 1000))
            self._events.restart()

    def _answer(self, connection: Connection, message: Message) -> None:
        """Believe the leader if it proves that it knows the secret; then prove the same to it."""
        nonce, self._nonce = self._nonce, ""
        key = text(message.get("public_key"))
        theirs = proof.read_nonce(message.get("nonce"))
        said = proof.Transcript(self._digest, self._host, nonce, theirs, self._host_key, key)
        if nonce and theirs and proof.is_proof(self._secret, proof.LEADER, said, message.get("proof")):
            self._believed = True
            self._public_key = key
            connection.send("answer", proof=proof.make_proof(self._secret, proof.WORKER, said))
        else:
            self._distrust(connection, f"it does not know this host's {names.JOB_SECRET_VARIABLE}")

    def _welcomed(self, connection: Connection, message: Message) -> None:
        if not self._believed:
            # A leader of this launcher, which trusts every host: the job is told, and ends.
            connection.trust(self._control.leader)
            cause = f"host {self._host} has {names.JOB_SECRET_VARIABLE}, the leader {self._control.leader} has none"
            outcome = Outcome(FAILED, names.EXIT_HOSTS, self._host, f"{cause}: set it to one value on every host")
            connection.send("ended", **outcome_fields(outcome))
            self._finish(outcome)
            return
        key = self._public_key if self._secret else text(message.get("public_key"))
        connection.trust(self._control.leader)
        self._events.log(f"joined {self._control.leader}")
        self._events.welcome(key, connection.address, connection.local_address)
        if self._stopped:
            connection.send("stopping")

    def _distrust(self, connection: Connection, reason: str) -> None:
        """What answers there is not the leader; the leader may be there later."""
        connection.close()
        self._lost(connection, reason)

    # ---------------------------------------------------------------------------------------------------------- ending
    def _lost(self, connection: Connection, reason: str) -> None:
        if connection is not self._connection:
            return
        if self._finished:
            # Not before everything on this host has ended and is written down.
            if self._leaving:
                self._leave_now()
        elif not connection.host:
            # Not welcomed: the leader is still starting, or refuses this host and says why.
            why = self._refused or f"{reason} before it let this host in"
            self._note(why)
            self._again(why)
        else:
            reason = f"lost host {self._control.leader}: {reason}"
            self._finish(Outcome(FAILED, names.EXIT_HOSTS, self._control.leader, reason))

    def _note(self, why: str) -> None:
        """Say once why this host is not let in; it may take the whole join limit."""
        if why not in self._logged and len(self._logged) < _LOGGED_REASONS:
            self._logged.add(why)
            self._events.log(f"{self._control.leader} does not let this host in yet: {why}")

    def _beat(self) -> None:
        connection = self._connection
        if connection is not None and connection.open and connection.host:
            silent = connection.silence(self._limits.heartbeat)
            if silent:
                connection.close()
                self._lost(connection, f"no message from it for {silent:.0f} s")
            else:
                connection.send("alive")
        open_ = connection is not None and connection.open
        after = connection.next_look(self._limits.heartbeat) if connection and open_ else names.HEARTBEAT_SECONDS
        self._loop.after(after, self._beat)

    def _finish(self, outcome: Outcome) -> None:
        self._finished = outcome
        self._events.finish(outcome)

    def _leave_now(self) -> None:
        if not self._left:
            self._left = True
            self._events.left()
