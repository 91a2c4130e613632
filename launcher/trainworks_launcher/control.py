"""The control channel between the hosts of one job: messages, connections, and the two roles.

The leader listens, every other host joins. Messages are JSON objects, one per line, of bounded size:

====================  =========  =====================================================================================
message               direction  meaning
====================  =========  =====================================================================================
join                  to leader  host, digest of the job, fresh ssh host key and port (empty unless the mode needs ssh)
welcome               to host    the leader's fresh public key
ready                 to leader  code and requirements are prepared, ssh serves on ``ssh_port``
go                    to all     every host is ready: start
ended                 to leader  this host's own command ended, with its outcome
stopping              to leader  a stop signal came to this host
stop                  to all     some host was stopped: forward the signal to the processes
finish                to all     the outcome of the whole job, the same on every host
bye                   to leader  outcome known, processes ended, files written
alive                 both       heartbeat
====================  =========  =====================================================================================

The first failure anywhere, or a lost host, is the outcome of the job. After a stop signal all hosts are given their
grace before the outcome is told. What comes from a stranger is dropped with one line in the log.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from typing import Callable, Mapping, Sequence

from trainworks_launcher import names
from trainworks_launcher.errors import Problem, RefusalError
from trainworks_launcher.job import Limits
from trainworks_launcher.loop import READ, WRITE, Loop
from trainworks_launcher.outcome import FAILED, STOPPED, SUCCEEDED, Outcome
from trainworks_launcher.plan import Control
from trainworks_launcher.values import Json, decode, number, text

MESSAGE_LIMIT = 65536
"""Bytes of one message; a longer line ends its connection."""

_STRANGERS_LIMIT = 64  # connections that have not joined yet; more are closed at once
_JOIN_MESSAGE_SECONDS = 10.0
_LOGGED_STRANGERS = 5

Message = Mapping[str, Json]


@dataclass(frozen=True)
class Peer:
    """A host that joined: where ssh finds it, and the key it proved to have. Empty and 0 where no ssh is needed."""

    host: str
    address: str
    ssh_port: int
    ssh_host_key: str


@dataclass
class Events:
    """What a role tells the supervisor. welcome: the channel stands; on a worker with the leader's public key, the
    leader's address and this host's own, as the connection has them. peers: all hosts are ready, before
    ``go``. go: start. stop: forward a stop signal. finish: the outcome of the job. left: everybody knows it."""

    welcome: Callable[[str, str, str], None]
    peers: Callable[[Sequence[Peer]], None]
    go: Callable[[], None]
    stop: Callable[[], None]
    finish: Callable[[Outcome], None]
    left: Callable[[], None]
    log: Callable[[str], None]


def digest(control: Control, mode: str) -> str:
    """What the hosts of one job have in common, as a short text: two jobs on one network do not mix."""
    import hashlib  # slow to load, and only jobs of several hosts need it

    words = json.dumps([mode, list(control.hosts), control.leader])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


class Decoder:
    """Bytes in, messages out; raises ValueError for anything that is not one bounded JSON object per line."""

    def __init__(self) -> None:
        """Start empty."""
        self._buffer = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes, in order."""
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > MESSAGE_LIMIT:
            raise ValueError("a message is too long")
        messages: list[Message] = []
        for line in lines:
            if len(line) > MESSAGE_LIMIT:
                raise ValueError("a message is too long")
            value = decode(line.decode("utf-8"))
            if not isinstance(value, dict):
                raise ValueError("a message is not an object")  # noqa: TRY004  (bad input, not a bad call)
            messages.append(value)
        return messages


class Connection:
    """One end of a TCP connection on the loop: sends and receives messages, and notices silence."""

    def __init__(
        self,
        loop: Loop,
        opened: socket.socket,
        on_message: Callable[[Connection, Message], None],
        on_lost: Callable[[Connection, str], None],
    ) -> None:
        """Take over a connected socket. ``on_lost`` is called once, with the reason, unless ``close`` came first."""
        self.host = ""
        self.address = _plain(str(opened.getpeername()[0]))
        self.local_address = _plain(str(opened.getsockname()[0]))
        self.heard = time.monotonic()
        self._loop = loop
        self._socket = opened
        self._decoder = Decoder()
        self._outgoing = b""
        self._on_message = on_message
        self._on_lost = on_lost
        self.open = True
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(opened, READ, self._ready)

    def send(self, kind: str, **fields: Json) -> None:
        """Queue a message and write what the kernel takes now."""
        if self.open:
            self._outgoing += json.dumps({"type": kind, **fields}).encode() + b"\n"
            self._write()

    def close(self) -> None:
        """Close without a word."""
        if self.open:
            self.open = False
            self._loop.unwatch(self._socket)
            self._socket.close()

    def _lose(self, reason: str) -> None:
        if self.open:
            self.close()
            self._on_lost(self, reason)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._write()
        if events & READ and self.open:
            self._read()

    def _write(self) -> None:
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(f"the connection broke: {error.strerror or error}")
            return
        self._loop.watch(self._socket, READ | WRITE if self._outgoing else READ, self._ready)

    def _read(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the connection broke: {error.strerror or error}")
            return
        if not data:
            self._lose("it closed the connection")
            return
        self.heard = time.monotonic()
        try:
            messages = self._decoder.feed(data)
        except ValueError as error:
            self._lose(f"it does not speak the launcher's protocol: {error}")
            return
        for message in messages:
            if self.open:
                self._on_message(self, message)


def outcome_fields(outcome: Outcome) -> dict[str, Json]:
    """An outcome as the fields of a message."""
    return {"outcome": outcome.kind, "status": outcome.status, "host": outcome.host, "text": outcome.text}


def read_outcome(message: Message) -> Outcome:
    """The outcome in a message; an unreadable one is a failure."""
    kind = text(message.get("outcome"), FAILED)
    status = number(message.get("status")) & 0xFF
    if kind not in (SUCCEEDED, FAILED, STOPPED) or (kind == FAILED and not status):
        kind, status = FAILED, status or names.EXIT_LAUNCHER
    return Outcome(kind, status, text(message.get("host")), text(message.get("text")))


class Alone:
    """The role of the only host of a job: everything it reports comes back at once."""

    def __init__(self, events: Events) -> None:
        """Nothing to connect to."""
        self._events = events
        self._finished = False

    def begin(self) -> None:
        """There is nobody to wait for."""
        self._events.welcome("", "", "")

    def ready(self, ssh_port: int) -> None:
        """Prepared: start. No other host needs to know the port."""
        del ssh_port
        self._events.peers(())
        if not self._finished:
            self._events.go()

    def stopping(self) -> None:
        """A stop signal came; the supervisor has forwarded it itself."""

    def ended(self, outcome: Outcome) -> None:
        """The command's outcome is the job's."""
        if not self._finished:
            self._finished = True
            self._events.finish(outcome)

    def leave(self) -> None:
        """Nobody to say goodbye to."""
        self._events.left()

    def close(self) -> None:
        """Nothing is open."""


class Leader:
    """The role of the first host: gathers the others, decides the outcome, tells everybody."""

    def __init__(
        self, loop: Loop, control: Control, limits: Limits, mode: str, public_key: str, events: Events
    ) -> None:
        """Nothing is opened before ``begin``."""
        self._loop = loop
        self._control = control
        self._limits = limits
        self._digest = digest(control, mode)
        self._public_key = public_key
        self._events = events
        self._server: socket.socket | None = None
        self._strangers: list[Connection] = []
        self._strangers_logged = 0
        self._joined: dict[str, Connection] = {}
        self._keys: dict[str, str] = {}
        self._ready: dict[str, int] = {}
        self._self_ready = False
        self._gone = False
        self._ended: dict[str, Outcome] = {}
        self._stopping = False
        self._finished: Outcome | None = None
        self._byes: set[str] = set()
        self._left = False

    def begin(self) -> None:
        """Listen. Raises RefusalError if the port is taken."""
        try:
            self._server = _listen(self._control.port)
        except OSError as error:
            advice = f"free the port, or set {names.CONTROL_PORT_VARIABLE} on every host"
            problem = Problem(f"cannot listen on port {self._control.port}: {error}", "control channel", advice)
            raise RefusalError([problem], names.EXIT_HOSTS) from error
        self._loop.watch(self._server, READ, self._accept)
        self._events.log(f"waiting for {len(self._workers())} other host(s) on port {self._control.port}")
        self._loop.after(self._limits.join, self._join_time_out)
        self._loop.after(names.HEARTBEAT_SECONDS, self._beat)
        self._events.welcome("", "", "")

    def ready(self, ssh_port: int) -> None:
        """This host is prepared. Nobody reaches the leader by ssh."""
        del ssh_port
        self._self_ready = True
        self._maybe_go()

    def stopping(self) -> None:
        """A stop signal came to this host."""
        self._stop_all()

    def ended(self, outcome: Outcome) -> None:
        """This host's command ended, or it could not start."""
        self._note_ended(self._control.leader, outcome)

    def leave(self) -> None:
        """This host is done; wait, bounded, until the others are."""
        self._byes.add(self._control.leader)
        self._loop.after(names.LEAVE_LIMIT_SECONDS, self._leave_now)
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
        return self._control.hosts[1:]

    def _accept(self, _: int) -> None:
        if self._server is None:
            return
        try:
            opened, _address = self._server.accept()
        except OSError:
            return
        if len(self._strangers) >= _STRANGERS_LIMIT:
            opened.close()
            return
        try:
            connection = Connection(self._loop, opened, self._message, self._lost)
        except OSError:
            opened.close()
            return
        self._strangers.append(connection)
        self._loop.after(_JOIN_MESSAGE_SECONDS, lambda: self._drop_stranger(connection, "it never joined"))

    def _drop_stranger(self, connection: Connection, reason: str) -> None:
        if connection in self._strangers:
            self._strangers.remove(connection)
            connection.close()
            self._strangers_logged += 1
            if self._strangers_logged <= _LOGGED_STRANGERS:
                self._events.log(f"dropped a connection from {connection.address}: {reason}")

    def _message(self, connection: Connection, message: Message) -> None:
        kind = message.get("type")
        if not connection.host:
            self._join(connection, message)
        elif kind == "ready":
            self._ready[connection.host] = number(message.get("ssh_port"))
            self._maybe_go()
        elif kind == "ended":
            self._note_ended(connection.host, read_outcome(message))
        elif kind == "stopping":
            self._stop_all()
        elif kind == "bye":
            self._byes.add(connection.host)
            self._maybe_leave()

    def _join(self, connection: Connection, message: Message) -> None:
        host = text(message.get("host"))
        if message.get("type") != "join" or host not in self._workers():
            self._drop_stranger(connection, f"it is not one of the job's hosts: {host[:64]!r}")
            return
        if message.get("digest") != self._digest:
            self._drop_stranger(connection, f"{host} belongs to another job, or has another list of hosts or mode")
            return
        if host in self._joined:
            self._drop_stranger(connection, f"{host} has already joined")
            return
        self._strangers.remove(connection)
        connection.host = host
        self._joined[host] = connection
        self._keys[host] = text(message.get("ssh_host_key"))
        connection.send("welcome", public_key=self._public_key)
        if self._finished:
            connection.send("finish", **outcome_fields(self._finished))
        elif self._stopping:
            connection.send("stop")
        if len(self._joined) == len(self._workers()):
            self._loop.after(self._limits.prepare, self._prepare_time_out)

    def _maybe_go(self) -> None:
        if self._gone or self._finished or not self._self_ready or set(self._ready) != set(self._workers()):
            return
        self._gone = True
        peers = [
            Peer(host, self._joined[host].address, self._ready[host], self._keys[host]) for host in self._workers()
        ]
        self._events.peers(peers)
        if self._finished:
            return
        for connection in self._joined.values():
            connection.send("go")
        self._events.go()

    def _join_time_out(self) -> None:
        absent = [host for host in self._workers() if host not in self._joined]
        if absent and not self._finished:
            self._fail_hosts(f"did not join within {self._limits.join:g} s: {_some(absent)}")

    def _prepare_time_out(self) -> None:
        late = [host for host in self._workers() if host not in self._ready]
        if late and not self._finished:
            self._fail_hosts(f"were not prepared within {self._limits.prepare:g} s: {_some(late)}")

    def _fail_hosts(self, reason: str) -> None:
        self._finish(Outcome(FAILED, names.EXIT_HOSTS, self._control.leader, f"hosts that {reason}"))

    def _beat(self) -> None:
        now = time.monotonic()
        for connection in list(self._joined.values()):
            silent = now - connection.heard
            if connection.open and silent > self._limits.heartbeat:
                connection.close()
                self._lost(connection, f"nothing was heard from it for {silent:.0f} s")
            else:
                connection.send("alive")
        self._loop.after(names.HEARTBEAT_SECONDS, self._beat)

    def _lost(self, connection: Connection, reason: str) -> None:
        if not connection.host:
            self._drop_stranger(connection, reason)
            return
        if self._finished:
            self._byes.add(connection.host)
            self._maybe_leave()
            return
        text_ = f"lost host {connection.host}: {reason}"
        # A host may have reported success before: its part is done, or (in MPI jobs) it has no command of its own. Lost
        # is lost all the same, for nobody can say any more what became of the ranks there.
        self._ended.pop(connection.host, None)
        self._note_ended(connection.host, Outcome(FAILED, names.EXIT_HOSTS, connection.host, text_))

    def _stop_all(self) -> None:
        if not self._stopping and not self._finished:
            self._stopping = True
            for connection in self._joined.values():
                connection.send("stop")
            self._events.stop()

    def _note_ended(self, host: str, outcome: Outcome) -> None:
        # A server beside a host's command may still fail after the command has ended well.
        if host not in self._ended or self._ended[host].kind == SUCCEEDED:
            self._ended[host] = outcome
        if self._finished:
            return
        failures = [entry for entry in self._ended.values() if entry.kind != SUCCEEDED]
        if self._stopping:
            # Everybody has the grace to save something; the processes are bounded by it on every host.
            if all(name in self._ended for name in (self._control.leader, *self._joined)):
                status = failures[0].status if failures else 0
                cause = failures[0].text if failures else "stopped by a signal; every process ended with status 0"
                self._finish(Outcome(STOPPED, status, host, cause))
        elif failures:
            self._finish(failures[0])
        elif len(self._ended) == len(self._control.hosts):
            self._finish(Outcome(SUCCEEDED, 0, self._control.leader, ""))

    def _finish(self, outcome: Outcome) -> None:
        self._finished = outcome
        for connection in self._joined.values():
            connection.send("finish", **outcome_fields(outcome))
        self._events.finish(outcome)

    def _maybe_leave(self) -> None:
        present = {host for host, connection in self._joined.items() if connection.open}
        if self._control.leader in self._byes and present <= self._byes:
            self._leave_now()

    def _leave_now(self) -> None:
        if not self._left:
            self._left = True
            self._events.left()


class Worker:
    """The role of every other host: joins, reports, and ends as the leader says."""

    def __init__(
        self, loop: Loop, control: Control, limits: Limits, mode: str, host: str, host_key: str, events: Events
    ) -> None:
        """Nothing is opened before ``begin``."""
        self._loop = loop
        self._control = control
        self._limits = limits
        self._digest = digest(control, mode)
        self._host = host
        self._host_key = host_key
        self._events = events
        self._connection: Connection | None = None
        self._connecting: socket.socket | None = None
        self._deadline = 0.0
        self._pause = 0.1
        self._why = "no try was made"
        self._stopped = False
        self._finished: Outcome | None = None
        self._left = False

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

    def ended(self, outcome: Outcome) -> None:
        """This host's command ended. Without a leader its outcome is all there is."""
        if self._connection is not None and self._connection.open:
            self._connection.send("ended", **outcome_fields(outcome))
        elif not self._finished:
            self._finish(outcome)

    def leave(self) -> None:
        """Say goodbye, and go when the leader goes."""
        self._send("bye")
        if self._connection is None or not self._connection.open:
            self._leave_now()
        else:
            self._loop.after(names.LEAVE_LIMIT_SECONDS, self._leave_now)

    def close(self) -> None:
        """Close everything at once."""
        if self._connecting is not None:
            self._loop.unwatch(self._connecting)
            self._connecting.close()
            self._connecting = None
        if self._connection is not None:
            self._connection.close()

    def _send(self, kind: str, **fields: Json) -> None:
        if self._connection is not None:
            self._connection.send(kind, **fields)

    def _try(self) -> None:
        """One try to connect, without waiting for it here (except for the name's resolution)."""
        if self._finished:
            return
        if time.monotonic() >= self._deadline:
            reason = (
                f"the leader {self._control.leader} did not answer on port {self._control.port} within"
                f" {self._limits.join:g} s: {self._why}"
            )
            self._finish(Outcome(FAILED, names.EXIT_HOSTS, self._host, reason))
            return
        try:
            found = socket.getaddrinfo(self._control.leader, self._control.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            opened = socket.socket(family, kind, protocol)
        except OSError as error:
            self._again(f"its name cannot be resolved: {error.strerror or error}")
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
        self._loop.after(5.0, lambda: self._give_up(opened))

    def _give_up(self, opened: socket.socket) -> None:
        if self._connecting is opened:
            self._failed(TimeoutError("it does not answer"))

    def _failed(self, error: OSError) -> None:
        if self._connecting is not None:
            self._loop.unwatch(self._connecting)
            self._connecting.close()
            self._connecting = None
        self._again(str(error.strerror or error))

    def _again(self, why: str) -> None:
        self._why = why
        self._loop.after(self._pause, self._try)
        self._pause = min(self._pause * 1.5, 1.0)

    def _connected(self, _: int) -> None:
        opened = self._connecting
        if opened is None:
            return
        code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            import os

            self._failed(OSError(code, os.strerror(code)))
            return
        self._connecting = None
        self._loop.unwatch(opened)
        try:
            self._connection = Connection(self._loop, opened, self._message, self._lost)
        except OSError as error:
            opened.close()
            self._again(str(error))
            return
        self._connection.send("join", host=self._host, digest=self._digest, ssh_host_key=self._host_key)
        if self._stopped:
            self._connection.send("stopping")

    def _message(self, connection: Connection, message: Message) -> None:
        kind = message.get("type")
        if kind == "welcome":
            connection.host = self._control.leader
            self._events.log(f"joined {self._control.leader}")
            key = text(message.get("public_key"))
            self._events.welcome(key, connection.address, connection.local_address)
        elif kind == "go":
            self._events.go()
        elif kind == "stop":
            self._events.stop()
        elif kind == "finish" and not self._finished:
            self._finish(read_outcome(message))

    def _lost(self, connection: Connection, reason: str) -> None:
        if self._finished:
            self._leave_now()
        elif not connection.host:
            # Not welcomed: the leader is still starting, or refuses this host and has said so in its log.
            self._again(f"{reason} before it let this host in")
        else:
            reason = f"lost host {self._control.leader}: {reason}"
            self._finish(Outcome(FAILED, names.EXIT_HOSTS, self._control.leader, reason))

    def _beat(self) -> None:
        connection = self._connection
        if connection is not None and connection.open:
            silent = time.monotonic() - connection.heard
            if silent > self._limits.heartbeat:
                connection.close()
                self._lost(connection, f"nothing was heard from it for {silent:.0f} s")
            else:
                connection.send("alive")
        self._loop.after(names.HEARTBEAT_SECONDS, self._beat)

    def _finish(self, outcome: Outcome) -> None:
        self._finished = outcome
        self._events.finish(outcome)

    def _leave_now(self) -> None:
        if not self._left:
            self._left = True
            self._events.left()


def _listen(port: int) -> socket.socket:
    """A listening socket on every address of this host, IPv6 and IPv4 where the kernel has both."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        opened.bind(("", port))
        opened.listen(1024)
        opened.setblocking(False)
    except OSError:
        opened.close()
        raise
    return opened


def _plain(address: str) -> str:
    """An address without the form that a dual-stack socket gives to IPv4."""
    return address[len("::ffff:") :] if address.startswith("::ffff:") else address


def _some(hosts: Sequence[str]) -> str:
    """Host names for a sentence, the first ten."""
    return ", ".join(hosts[:10]) + (f" and {len(hosts) - 10} more" if len(hosts) > 10 else "")
