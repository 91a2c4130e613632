"""The role of the first host: it gathers the others, decides the outcome, tells everybody."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from typing import Collection, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.values import Json, mapping, number, text
from trainworks_launcher.job.network import Limits
from trainworks_launcher.plan.plan import Control
from trainworks_launcher.supervise.control import Events, Peer, identity, probe, proof
from trainworks_launcher.supervise.control.connection import Connection, heartbeat_interval, listen
from trainworks_launcher.supervise.control.messages import (
    STRANGERS_MESSAGE_LIMIT,
    Message,
    one_line,
    outcome_fields,
    read_outcome,
    read_suspect,
)
from trainworks_launcher.supervise.control.seal import LEADER, WORKER, Seal
from trainworks_launcher.supervise.control.strangers import ROOM, Strangers
from trainworks_launcher.supervise.loop import READ, Loop
from trainworks_launcher.supervise.outcome.outcome import FAILED, STOPPED, SUCCEEDED, Outcome, Suspect

_ACCEPTS = 32
"""Connections taken in at once, before others of the loop have their turn."""

_OTHER_DESCRIPTORS = 256
"""Files that the launcher has open besides connections of the control channel; its ranks' pipes are most of them."""


class Leader:
    """Gathers the hosts of the job and decides how it ends."""

    def __init__(
        self,
        loop: Loop,
        control: Control,
        limits: Limits,
        job: Mapping[str, Json],
        public_key: str,
        secret: str,
        events: Events,
    ) -> None:
        """Nothing is opened before ``begin``. job: its identity. secret: of the job, "" if it has none."""
        self._loop = loop
        self._control = control
        self._limits = limits
        self._job = job
        self._public_key = public_key
        self._secret = secret
        self._events = events
        self._server: socket.socket | None = None
        self._others = frozenset(control.hosts[1:])
        self._strangers = Strangers(events.log, ROOM + len(self._others))
        self._refused: dict[str, str] = {}
        self._joined: dict[str, Connection] = {}
        self._keys: dict[str, str] = {}
        self._ready: dict[str, int] = {}
        self._without: dict[str, str] = {}
        self._complete = 0
        self._self_ready = False
        self._gone = False
        self._ended: dict[str, Outcome] = {}
        self._failures: dict[str, Outcome] = {}  # those of ``_ended`` that are no success
        self._stopping = False
        self._finished: Outcome | None = None
        self._byes: set[str] = set()
        self._left = False
        self._late_until = 0.0
        self._came: set[str] = set()
        self._join_deadline = 0.0

    # -------------------------------------------------------------------------------------- what the supervisor calls
    def begin(self) -> None:
        """Listen. Raises RefusalError if the port is taken."""
        _allow_descriptors(2 * len(self._control.hosts) + ROOM + _OTHER_DESCRIPTORS)
        try:
            self._server = listen(self._control.port)
        except OSError as error:
            advice = f"free the port, or set {names.CONTROL_PORT_VARIABLE} on every host"
            problem = Problem(f"cannot listen on port {self._control.port}: {error}", "control channel", advice)
            raise RefusalError([problem], names.EXIT_HOSTS) from error
        self._loop.watch(self._server, READ, self._accept)
        self._events.log(f"waiting for {len(self._workers())} other host(s) on port {self._control.port}")
        self._join_deadline = time.monotonic() + self._limits.join
        self._loop.after(self._limits.join, self._join_time_out)
        self._loop.after(heartbeat_interval(self._limits.heartbeat), self._beat)
        self._events.welcome("", "", "")

    def ready(self, ssh_port: int) -> None:
        """This host is prepared. No host reaches the leader by ssh."""
        del ssh_port
        self._self_ready = True
        self._maybe_go()

    def stopping(self) -> None:
        """A stop signal came to this host."""
        self._stop_all()

    def suspect(self, suspect: Suspect) -> None:
        """A rank of this host ended."""
        self._events.suspect(suspect)

    def ended(self, outcome: Outcome) -> None:
        """This host's command ended, or it could not start."""
        self._note_ended(self._control.leader, outcome)

    def tell(self, kind: str, host: str = "", **fields: Json) -> None:
        """Tell one host, or all others."""
        for name in (host,) if host else tuple(self._joined):
            if name in self._joined:
                self._joined[name].send(kind, **fields)

    def others(self) -> tuple[str, ...]:
        """Return the other hosts that the job still has."""
        return self._workers()

    def leave(self) -> None:
        """This host is done; wait, bounded, until the others are."""
        self._byes.add(self._control.leader)
        late = self._seconds_for_late_hosts()
        self._late_until = time.monotonic() + late
        self._loop.after(late, self._maybe_leave)
        self._loop.after(late + names.LEAVE_LIMIT_SECONDS, self._leave_now)
        self._maybe_leave()

    def close(self) -> None:
        """Close everything at once."""
        for connection in (*self._strangers, *self._joined.values()):
            connection.close()
        if self._server is not None:
            self._loop.unwatch(self._server)
            self._server.close()
            self._server = None

    def _workers(self) -> tuple[str, ...]:
        """Return the other hosts that the job still has, joined or not."""
        return tuple(host for host in self._control.hosts[1:] if host not in self._without)

    def _count(self) -> int:
        """Return how many other hosts the job still has, without looking at each: it is asked for every message."""
        return len(self._others) - len(self._without)

    # ------------------------------------------------------------------------------------------------------ letting in
    def _accept(self, _: int) -> None:
        for _turn in range(_ACCEPTS):
            if self._server is None:
                return
            try:
                opened, _address = self._server.accept()
            except BlockingIOError:
                return
            except OSError:
                # The other end is gone already, or no descriptor is left: then a stranger has to make room.
                self._strangers.make_room()
                return
            try:
                connection = Connection(self._loop, opened, self._message, self._lost, STRANGERS_MESSAGE_LIMIT)
            except OSError:
                opened.close()
                continue
            self._strangers.add(connection)

    def _message(self, connection: Connection, message: Message) -> None:
        kind = message.get("type")
        if not connection.host:
            self._before_joining(connection, message)
        elif connection is not self._joined.get(connection.host):
            return  # a host that was lost says goodbye
        elif kind == "ready":
            self._ready[connection.host] = number(message.get("ssh_port")) & 0xFFFF
            self._maybe_go()
        elif kind == "ended":
            self._note_ended(connection.host, read_outcome(message, connection.host))
        elif kind == "suspect":
            self._events.suspect(read_suspect(message, connection.host, time.monotonic()))
        elif kind == "stopping":
            self._stop_all()
        elif kind == "bye":
            self._byes.add(connection.host)
            self._maybe_leave()
        elif kind != "alive":
            self._events.told(connection.host, text(kind), message)

    def _before_joining(self, connection: Connection, message: Message) -> None:
        kind = message.get("type")
        asked, connection.asked = connection.asked, None
        known = self._joined.get(text(message.get("host")))
        if kind == "join" and asked is None:
            self._join(connection, message)
        elif kind == "answer" and asked is not None:
            if proof.is_proof(self._secret, WORKER, asked, message.get("proof")):
                connection.use_seal(Seal(proof.make_key(self._secret, asked), LEADER))
                self._let_in(connection, asked.host, asked.host_key)
            else:
                self._refuse(connection, asked.host, f"it has another {names.JOB_SECRET_VARIABLE} than the leader")
        elif kind == "refused" and asked is not None:
            self._refuse(connection, asked.host, f"it has another {names.JOB_SECRET_VARIABLE} than the leader")
        elif kind == "probe" and known is not None and probe.answer(known, connection, message):
            self._strangers.remove(connection)
            connection.close()
        else:
            self._strangers.drop(connection, "it is not one of the job's hosts")

    def _join(self, connection: Connection, message: Message) -> None:
        host = text(message.get("host"))
        key, nonce = text(message.get("ssh_host_key")), proof.read_nonce(message.get("nonce"))
        different = identity.differences(self._job, message.get("job"))
        if host not in self._others:
            self._strangers.drop(connection, f"it is not one of the job's hosts: {one_line(host, 64)!r}")
        elif different or not nonce:
            self._refuse(connection, host, f"it belongs to another job: different {different or 'launcher version'}")
        elif host in self._joined and self._joined[host].open:
            self._refuse(connection, host, "it has already joined")
        elif self._gone and host not in self._without:
            self._refuse(connection, host, "it was lost")
        elif self._secret and message.get("secret") is not True:
            self._refuse(connection, host, f"it has no {names.JOB_SECRET_VARIABLE}, and the leader has one")
        else:
            said = identity.as_text(mapping(message.get("job")))
            asked = proof.Transcript(said, host, nonce, proof.make_nonce(), key, self._public_key)
            connection.asked = asked
            shown = proof.make_proof(self._secret, LEADER, asked)
            known = bool(self._secret)
            connection.send(
                "challenge", nonce=asked.leader_nonce, public_key=self._public_key, proof=shown, secret=known
            )

    def _refuse(self, connection: Connection, host: str, reason: str) -> None:
        """Do not let in the connection that claims to be this host, and tell it why."""
        self._refused[host] = reason
        connection.send("refused", reason=reason)
        self._strangers.drop(connection, f"as {host}, {reason}")

    def _let_in(self, connection: Connection, host: str, ssh_host_key: str) -> None:
        if host in self._without:
            self._dismiss(connection, host)
            self._strangers.drop(connection, f"{host} came back after it was lost")
            return
        if host in self._joined or self._gone:
            # Two proofs of one host at the same time.
            self._refuse(connection, host, "it has already joined")
            return
        self._strangers.remove(connection)
        connection.trust(host)
        self._refused.pop(host, None)
        self._joined[host] = connection
        self._came.add(host)
        self._keys[host] = ssh_host_key
        connection.send("welcome")
        if self._finished:
            connection.send("finish", **outcome_fields(self._finished))
        elif self._stopping:
            connection.send("stop")
        self._maybe_complete()

    def _maybe_complete(self) -> None:
        """All have joined: from now on they have the time to prepare themselves."""
        if len(self._joined) == self._count():
            self._complete += 1
            number_ = self._complete
            self._loop.after(self._limits.prepare, lambda: self._prepare_time_out(number_))

    def _maybe_go(self) -> None:
        ready = self._self_ready and len(self._joined) == len(self._ready) == self._count()
        if not ready or self._gone or self._finished:
            return
        self._gone = True
        self._events.peers(
            [Peer(host, self._joined[host].address, self._ready[host], self._keys[host]) for host in self._workers()]
        )
        self._go()

    def _go(self) -> None:
        if self._finished:  # what ``peers`` started has failed
            return
        for connection in list(self._joined.values()):
            connection.send("go")
        self._events.go()

    def _join_time_out(self) -> None:
        self._lose_or_fail(
            [host for host in self._workers() if host not in self._joined], "did not join", self._limits.join
        )

    def _prepare_time_out(self, number_: int) -> None:
        # A host that came again has its own time from then on.
        if number_ == self._complete:
            late = [host for host in self._workers() if host not in self._ready]
            self._lose_or_fail(late, "were not prepared", self._limits.prepare)

    def _lose_or_fail(self, hosts: Sequence[str], reason: str, seconds: float) -> None:
        """Hosts that are late: the job goes on without them if it may."""
        if not hosts or self._finished:
            return
        text_ = f"{reason} within {seconds:g} s"
        if self._may_go_on_without(len(hosts)):
            for host in hosts:
                self._go_on_without(host, text_)
            return
        shown = [host + (f" (refused: {self._refused[host]})" if host in self._refused else "") for host in hosts]
        cause = f"hosts that {text_}: {some(shown)}"
        self._finish(Outcome(FAILED, names.EXIT_HOSTS, self._control.leader, cause))

    # ---------------------------------------------------------------------------------------------------------- losing
    def _beat(self) -> None:
        limit = self._limits.heartbeat
        for connection in list(self._joined.values()):
            silent = connection.is_lost(limit)
            if silent:
                self._lost(connection, f"no message from it for {silent:.0f} s")
            else:
                connection.send("alive", silent=round(time.monotonic() - connection.spoke, 1))
        self._strangers.sweep()
        looks = [connection.next_look(limit) for connection in self._joined.values() if connection.open]
        self._loop.after(min(looks, default=heartbeat_interval(limit)), self._beat)

    def _lost(self, connection: Connection, reason: str) -> None:
        host = connection.host
        if not host:
            self._strangers.drop(connection, reason)
            return
        if connection is not self._joined.get(host):
            return
        if self._finished:
            connection.close()
            self._byes.add(host)
            self._maybe_leave()
        elif self._gone or self._stopping or connection.open:
            self._lose(host, reason)
        else:
            # It may be a container that starts anew. It has as long as one that is silent.
            connection.close()
            self._forget(host)
            limit = self._limits.heartbeat
            self._events.log(f"{host} left before the start: {reason}; it may come again within {limit:g} s")
            self._loop.after(limit, lambda: self._still_gone(host, reason))

    def _still_gone(self, host: str, reason: str) -> None:
        if host in self._workers() and host not in self._joined and not self._finished:
            self._lose(host, reason)

    def _may_go_on_without(self, count: int) -> bool:
        left = len(self._workers()) + 1 - count
        return 0 < self._control.minimum_hosts <= left and not self._stopping

    def _forget(self, host: str) -> None:
        for known in (self._joined, self._keys, self._ready, self._ended, self._failures):
            known.pop(host, None)

    def _lose(self, host: str, reason: str) -> None:
        """A host is lost: the job goes on without it if it may, else this is its end."""
        if self._may_go_on_without(1):
            self._go_on_without(host, reason)
            return
        if host in self._joined:
            self._joined[host].close()
        # A host may have reported success before: its part is done, or (in MPI jobs) it has no command of its own. Lost
        # is lost all the same, because no host knows any more what became of its ranks.
        self._ended.pop(host, None)
        self._note_ended(host, Outcome(FAILED, names.EXIT_HOSTS, host, f"lost host {host}: {reason}"))

    def _go_on_without(self, host: str, reason: str) -> None:
        self._without[host] = f"lost host {host}: {reason}"
        told = f"{self._without[host]}; going on with {len(self._workers()) + 1} of {len(self._control.hosts)} hosts"
        self._events.log(told)
        connection = self._joined.get(host)
        self._forget(host)
        if connection is not None and connection.open:
            # It is silent, and reads this only if it wakes again.
            self._dismiss(connection, host)
            connection.close()
        for other in list(self._joined.values()):
            other.send("without", text=told)
        if self._gone:
            self._events.restart()
            self._maybe_finish()
        else:
            self._maybe_complete()
            self._maybe_go()

    def _dismiss(self, connection: Connection, host: str) -> None:
        """Tell a host that the job goes on without it."""
        why = f"{self._without[host]}; the job goes on without it"
        connection.send("finish", **outcome_fields(Outcome(FAILED, names.EXIT_HOSTS, host, why)))

    # ---------------------------------------------------------------------------------------------------------- ending
    def _stop_all(self) -> None:
        if not self._stopping and not self._finished:
            self._stopping = True
            for connection in list(self._joined.values()):
                connection.send("stop")
            self._events.stop()

    def _note_ended(self, host: str, outcome: Outcome) -> None:
        # A server beside a host's command may still fail after the command has ended well.
        if host not in self._ended or self._ended[host].kind == SUCCEEDED:
            self._ended[host] = outcome
            if outcome.kind != SUCCEEDED:
                self._failures[host] = outcome
        self._maybe_finish()

    def _maybe_finish(self) -> None:
        """The outcome, once the ends that are known decide it."""
        if self._finished or not self._ended:
            return
        failures = list(self._failures.values())
        if self._stopping:
            # Everybody has the grace to save something; the processes are bounded by it on every host.
            if self._have_ended((*self._joined, self._control.leader)):
                well = Outcome(
                    STOPPED, 0, self._control.leader, "stopped by a signal; every process ended with status 0"
                )
                first = next((outcome for outcome in failures if outcome.status), well)
                self._finish(self._events.judge(first._replace(kind=STOPPED)))
        elif failures:
            self._finish(self._events.judge(failures[0]))
        elif len(self._ended) > self._count() and self._have_ended((self._control.leader, *self._workers())):
            self._finish(Outcome(SUCCEEDED, 0, self._control.leader, ""))

    def _have_ended(self, hosts: Collection[str]) -> bool:
        return len(self._ended) >= len(hosts) and all(host in self._ended for host in hosts)

    def _finish(self, outcome: Outcome) -> None:
        self._finished = outcome
        for connection in list(self._joined.values()):
            connection.send("finish", **outcome_fields(outcome))
        self._events.finish(outcome)

    def _seconds_for_late_hosts(self) -> float:
        """Return how long to stay for hosts that never joined: they would wait for us until the join time-out."""
        failed = self._finished is not None and self._finished.kind == FAILED
        if self._server is None or not failed or set(self._workers()) <= self._came:
            return 0.0
        return max(0.0, min(names.REFUSAL_LIMIT_SECONDS, self._join_deadline - time.monotonic()))

    def _maybe_leave(self) -> None:
        if time.monotonic() < self._late_until and not set(self._workers()) <= self._came:
            return
        present = {host for host, connection in self._joined.items() if connection.open}
        if self._control.leader in self._byes and present <= self._byes:
            self._leave_now()

    def _leave_now(self) -> None:
        if not self._left:
            self._left = True
            self._events.left()


def _allow_descriptors(count: int) -> None:
    """Raise this process's own limit of open files where it is too low for the job's connections, as far as it may.

    The limit stays as it is where it suffices: what is started inherits it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < count:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard < 0 else min(count, hard), hard))


def some(hosts: Sequence[str]) -> str:
    """Host names for a sentence, the first ten."""
    return ", ".join(hosts[:10]) + (f" and {len(hosts) - 10} more" if len(hosts) > 10 else "")
