"""The role of every host but the first: it joins, reports, and ends as the leader says."""

from __future__ import annotations

import socket
import time
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.values import Json, text
from trainworks_launcher.job.network import Limits
from trainworks_launcher.plan.plan import Control
from trainworks_launcher.supervise.control import Events, identity, proof
from trainworks_launcher.supervise.control.connection import Attempt, Connection, heartbeat_interval
from trainworks_launcher.supervise.control.messages import (
    Message,
    one_line,
    outcome_fields,
    read_outcome,
    seconds,
    suspect_fields,
)
from trainworks_launcher.supervise.control.probe import Prober
from trainworks_launcher.supervise.control.seal import LEADER, WORKER, Seal
from trainworks_launcher.supervise.loop import Loop
from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome, Suspect

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
        job: Mapping[str, Json],
        host: str,
        host_key: str,
        secret: str,
        events: Events,
    ) -> None:
        """Nothing is opened before ``begin``. job: its identity. secret: of the job, "" if it has none."""
        self._loop = loop
        self._control = control
        self._limits = limits
        self._job = job
        self._host = host
        self._host_key = host_key
        self._secret = secret
        self._nonce = ""
        self._public_key = ""
        self._events = events
        self._connection: Connection | None = None
        self._prober: Prober | None = None
        self._attempt: Attempt | None = None
        self._deadline = 0.0
        self._tries = 0
        self._pause = 0.1
        self._answered = False
        self._refused = ""  # in the words of the one who answers there now
        self._reasons: dict[str, None] = {}  # why it was not let in, in order
        self._why = "it did not try"  # the last try failed
        self._alike = True  # this host and the leader have the same secret, or none
        self._unlike_since = 0.0  # since when the secrets differ
        self._lost_reason = ""  # the leader had let this host in, and left
        self._ssh_port = -1  # of this host once it is prepared
        self._went = False
        self._stopped = False
        self._ended: Outcome | None = None
        self._finished: Outcome | None = None
        self._leaving = False
        self._left = False

    # -------------------------------------------------------------------------------------- what the supervisor calls
    def begin(self) -> None:
        """Start to look for the leader, which may not be up yet."""
        self._deadline = time.monotonic() + self._limits.join
        self._loop.after(heartbeat_interval(self._limits.heartbeat), self._beat)
        self._try()

    def ready(self, ssh_port: int) -> None:
        """This host is prepared."""
        self._ssh_port = ssh_port
        self._send("ready", ssh_port=ssh_port)

    def stopping(self) -> None:
        """A stop signal came to this host."""
        self._stopped = True
        self._send("stopping")

    def suspect(self, suspect: Suspect) -> None:
        """A rank of this host ended."""
        self._send("suspect", **suspect_fields(suspect, time.monotonic()))

    def ended(self, outcome: Outcome) -> None:
        """This host's command ended. Without a leader its outcome is all there is."""
        self._ended = outcome
        if not self._send("ended", **outcome_fields(outcome)) and not self._finished:
            self._finish(outcome)

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Tell the leader."""
        del host
        self._send(kind, **fields)

    def others(self) -> tuple[str, ...]:
        """Only the leader needs to know."""
        return ()

    def leave(self) -> None:
        """Say goodbye, and go when the leader goes."""
        self._leaving = True
        if self._send("bye"):
            self._loop.after(names.LEAVE_LIMIT_SECONDS, self._leave_now)
        else:
            self._leave_now()

    def close(self) -> None:
        """Close everything at once."""
        if self._attempt is not None:
            self._attempt.cancel()
        if self._prober is not None:
            self._prober.close()
        if self._connection is not None:
            self._connection.close()

    def _send(self, kind: str, **fields: Json) -> bool:
        """Send to the leader; False if it has not let this host in, or is gone."""
        connection = self._connection
        if connection is None or not connection.host or not connection.open:
            return False
        connection.send(kind, **fields)
        return connection.open

    # --------------------------------------------------------------------------------------------------------- joining
    def _try(self) -> None:
        """One try to connect, without waiting for it (except for the name's resolution)."""
        if self._finished:
            return
        if time.monotonic() >= self._deadline:
            self._give_up()
            return
        name = self._control.address or self._control.leader
        try:
            found = socket.getaddrinfo(name, self._control.port, type=socket.SOCK_STREAM)
        except OSError as error:
            # The names of pods appear after the pods.
            why = f"cannot resolve the name {name}: {error.strerror or error}"
            self._note(why)
            self._again(why)
            return
        # A name may have several addresses, and only one that answers: the next one, each time.
        family, _, _, _, address = found[self._tries % len(found)]
        self._tries += 1
        self._attempt = Attempt(self._loop, family, address, _CONNECT_SECONDS, self._connected)

    def _give_up(self) -> None:
        leader = self._control.leader
        if self._lost_reason:
            reason = f"lost host {leader}: {self._lost_reason}"
        else:
            done = "let this host in" if self._answered else "answer"
            said = "; ".join(dict.fromkeys([*self._reasons, self._why]))
            within = f"within {self._limits.join:g} s" if time.monotonic() >= self._deadline else "in"
            reason = f"the leader {leader} did not {done} on port {self._control.port} {within}: {said}"
        self._finish(Outcome(FAILED, names.EXIT_HOSTS, self._host, reason))

    def _again(self, why: str) -> None:
        self._why = why
        self._loop.after(self._pause, self._try)
        self._pause = min(self._pause * 1.5, _LONGEST_PAUSE)

    def _connected(self, opened: socket.socket | None, why: str) -> None:
        if opened is None:
            self._again(why)
            return
        try:
            connection = Connection(self._loop, opened, self._message, self._lost)
        except OSError as error:
            opened.close()
            self._again(str(error))
            return
        self._connection = connection
        self._answered = True
        self._refused = ""
        self._nonce = proof.make_nonce()
        connection.send(
            "join",
            host=self._host,
            job=dict(self._job),
            ssh_host_key=self._host_key,
            nonce=self._nonce,
            secret=bool(self._secret),
        )
        self._loop.after(_ANSWER_SECONDS, lambda: self._not_let_in(connection))

    def _not_let_in(self, connection: Connection) -> None:
        if connection.open and not connection.host and not self._finished:
            self._distrust(connection, "it did not answer")

    def _message(self, connection: Connection, message: Message) -> None:
        kind = message.get("type")
        if connection.seal is None:
            self._before_joining(connection, message)
        elif kind == "finish":
            if not self._finished:
                self._finish(read_outcome(message, self._control.leader))
        elif kind == "refused" and not connection.host:
            self._refused = one_line(message.get("reason"))
        elif kind == "welcome" and not connection.host:
            self._welcomed(connection)
        elif not connection.host:
            self._distrust(connection, "it does not speak the launcher's protocol")
        elif kind == "go":
            # Once only, and not before it was asked for.
            if self._ssh_port >= 0 and not self._went:
                self._went = True
                self._events.go()
        elif kind == "stop":
            self._events.stop()
        elif kind == "without":
            self._events.log(one_line(message.get("text"), 1000))
            self._events.restart()
        elif kind == "alive":
            if self._prober is not None:
                self._prober.look(seconds(message.get("silent")))
        else:
            self._events.told(self._control.leader, text(kind), message)

    def _before_joining(self, connection: Connection, message: Message) -> None:
        if message.get("type") == "refused":
            self._refused = one_line(message.get("reason"))
            if names.JOB_SECRET_VARIABLE in self._refused:
                self._secrets_differ()
        elif message.get("type") == "challenge" and self._nonce:
            self._answer(connection, message)
        else:
            self._distrust(connection, "it does not speak the launcher's protocol")

    def _answer(self, connection: Connection, message: Message) -> None:
        """Believe the leader if it proves that it knows the secret; then prove the same to it."""
        nonce, self._nonce = self._nonce, ""
        key = text(message.get("public_key"))
        theirs = proof.read_nonce(message.get("nonce"))
        said = proof.Transcript(identity.as_text(self._job), self._host, nonce, theirs, self._host_key, key)
        # A leader without a secret lets every host in: this one joins to tell it, and the job ends.
        secret = self._secret if message.get("secret") is True else ""
        if theirs and proof.is_proof(secret, LEADER, said, message.get("proof")):
            self._public_key = key if secret == self._secret else ""
            connection.send("answer", proof=proof.make_proof(secret, WORKER, said))
            connection.use_seal(Seal(proof.make_key(secret, said), WORKER))
            self._alike = secret == self._secret
            return
        reason = f"it has another {names.JOB_SECRET_VARIABLE} than this host"
        connection.send("refused", reason=reason)
        self._secrets_differ()
        self._distrust(connection, reason)

    def _secrets_differ(self) -> None:
        """It will not get better: bounded, because what answers there may be the leader of another job, which ends."""
        now = time.monotonic()
        self._unlike_since = self._unlike_since or now
        self._deadline = min(self._deadline, self._unlike_since + names.REFUSAL_LIMIT_SECONDS)

    def _welcomed(self, connection: Connection) -> None:
        connection.trust(self._control.leader)
        if not self._alike:
            cause = f"host {self._host} has {names.JOB_SECRET_VARIABLE}, the leader {self._control.leader} has none"
            outcome = Outcome(FAILED, names.EXIT_HOSTS, self._host, f"{cause}: set it to one value on every host")
            connection.send("ended", **outcome_fields(outcome))
            self._finish(outcome)
            return
        self._lost_reason = ""
        self._prober = Prober(self._loop, self._host, connection, self._limits.heartbeat)
        self._events.log(f"joined {self._control.leader}")
        self._events.welcome(self._public_key, connection.address, connection.local_address)
        if self._stopped:
            connection.send("stopping")
        if self._ssh_port >= 0:
            connection.send("ready", ssh_port=self._ssh_port)

    def _distrust(self, connection: Connection, reason: str) -> None:
        """What answers there is not the leader; the leader may be there later."""
        self._refused = self._refused or reason
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
        elif self._went or self._stopped or self._ended:
            self._lose(reason)
        else:
            # It may be a container that starts anew, as this one might. It has as long as one that is silent.
            limit = self._limits.heartbeat
            leader = self._control.leader
            self._events.log(f"{leader} left before the start: {reason}; it may come again within {limit:g} s")
            self._lost_reason, self._deadline = reason, time.monotonic() + limit
            self._again(reason)

    def _lose(self, reason: str) -> None:
        leader = self._control.leader
        self._finish(Outcome(FAILED, names.EXIT_HOSTS, leader, f"lost host {leader}: {reason}"))

    def _note(self, why: str) -> None:
        """Say once why this host is not let in; it may take the whole join limit."""
        if why not in self._reasons and len(self._reasons) < _LOGGED_REASONS:
            self._reasons[why] = None
            self._events.log(f"{self._control.leader} does not let this host in yet: {why}")

    def _beat(self) -> None:
        connection, limit = self._connection, self._limits.heartbeat
        after = heartbeat_interval(limit)
        if connection is not None and connection.open and connection.host:
            silent = connection.is_lost(limit)
            if silent:
                connection.close()
                if not self._finished:
                    self._lose(f"no message from it for {silent:.0f} s")
                elif self._leaving:
                    self._leave_now()
            else:
                connection.send("alive")
                if self._prober is not None:
                    self._prober.look()
                after = connection.next_look(limit)
        self._loop.after(after, self._beat)

    def _finish(self, outcome: Outcome) -> None:
        self._finished = outcome
        self._events.finish(outcome)

    def _leave_now(self) -> None:
        if not self._left:
            self._left = True
            self._events.left()
