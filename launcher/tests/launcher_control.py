"""Roles of the control channel in this process, on a loop, and a test's own end
of a connection to them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from launcher_support import TIME_OUT

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.job.network import Limits
from trainworks_launcher.plan.plan import Control
from trainworks_launcher.supervise.control import Events, handshake, identity
from trainworks_launcher.supervise.control.leader import Leader
from trainworks_launcher.supervise.control.message_authentication import LEADER as LEADERS
from trainworks_launcher.supervise.control.message_authentication import WORKER as WORKERS
from trainworks_launcher.supervise.control.message_authentication import Seal
from trainworks_launcher.supervise.control.messages import PROTOCOL, Decoder
from trainworks_launcher.supervise.control.worker import Worker
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.outcome.outcome import Outcome
from trainworks_testing.ports import free_port

LEADER, WORKER, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
JOB: Mapping[str, Json] = {"job name": "0", "mode": "1"}


def encode(messages: list[dict[str, Json]]) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


@dataclass
class Heard:
    """Events that a role told its supervisor."""

    calls: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    messages: list[tuple[str, str, dict[str, Json]]] = field(default_factory=list)

    def events(self) -> Events:
        return Events(
            welcome=lambda *_: self.calls.append("welcome"),
            go=lambda: self.calls.append("go"),
            stop=lambda: self.calls.append("stop"),
            restart=lambda: self.calls.append("restart"),
            suspect=lambda suspect: self.calls.append(f"suspect {suspect.outcome.rank}"),
            inquire=lambda _, then: then(),
            judge=lambda outcome: outcome,
            finish=self.outcomes.append,
            left=lambda: self.calls.append("left"),
            told=lambda host, kind, message: self.messages.append((host, kind, dict(message))),
            log=self.log.append,
        )


def in_turns(loop: Loop, seconds: float = 0.01) -> None:
    """Let the loop run for a moment."""
    run_loop = Loop.run
    loop.after(seconds, loop.stop)
    run_loop(loop)
    loop._stopped = False


@contextlib.contextmanager
def leader_on_a_loop(
    secret: str = "",
    minimum_hosts: int = 0,
    limits: Limits | None = None,
    hosts: tuple[str, ...] = (LEADER, WORKER),
) -> Iterator[tuple[Loop, Control, Leader, Heard]]:
    loop, heard = Loop(), Heard()
    control = Control(LEADER, hosts, free_port(), minimum_hosts)
    role = Leader(
        loop,
        control,
        limits or Limits(),
        handshake.Credentials(LEADER, JOB, secret),
        heard.events(),
    )
    try:
        role.begin()
        yield loop, control, role, heard
    finally:
        role.close()
        loop.close()


def send(opened: socket.socket, data: bytes) -> None:
    """Send as many bytes as the other end still takes."""
    with contextlib.suppress(OSError):
        opened.sendall(data)


def join(**changes: Json) -> bytes:
    message: dict[str, Json] = {
        "type": "join",
        "host": WORKER,
        "job": dict(JOB),
        "nonce": "c" * 64,
        "protocol": PROTOCOL,
    }
    return encode([{**message, **changes}])


class Peer:
    """The other end of a connection, in the hands of a test: a host that has joined, and may send
    any message.
    """

    def __init__(self, loop: Loop, opened: socket.socket, seal: Seal) -> None:
        self.loop, self.opened, self.seal = loop, opened, seal
        self.decoder = Decoder()
        self.decoder.seal = seal
        self.first: Mapping[str, Json] = {}

    def lines(self, messages: list[dict[str, Json]]) -> list[bytes]:
        return [self.seal.closed(json.dumps(message).encode()) + b"\n" for message in messages]

    def say(self, *messages: dict[str, Json]) -> None:
        send(self.opened, b"".join(self.lines(list(messages))))
        in_turns(self.loop)

    def hear(self) -> list[Mapping[str, Json]]:
        """Return the messages that came; waits for at least one."""
        return self.decoder.feed(receive(self.loop, self.opened))


def receive(loop: Loop, opened: socket.socket) -> bytes:
    """Return the next bytes of the other end, on this loop; b"" if it closed."""
    opened.setblocking(False)
    deadline = time.monotonic() + TIME_OUT
    while time.monotonic() < deadline:
        in_turns(loop)
        with contextlib.suppress(BlockingIOError):
            return opened.recv(65536)
    raise AssertionError("nothing came")


def until(loop: Loop, condition: Callable[[], object]) -> None:
    """Let the loop run until a condition holds."""
    deadline = time.monotonic() + TIME_OUT
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        in_turns(loop)


@contextlib.contextmanager
def joined(loop: Loop, control: Control, secret: str = "", **changes: Json) -> Iterator[Peer]:
    """A host that joins the leader."""
    with socket.create_connection((LEADER, control.port)) as opened:
        nonce = handshake.make_nonce()
        send(opened, join(nonce=nonce, secret=bool(secret), **changes))
        (challenge,) = Decoder().feed(receive(loop, opened))
        transcript = handshake.Transcript(
            identity.as_text(JOB), WORKER, nonce, str(challenge["nonce"])
        )
        assert handshake.is_proof(secret, LEADERS, transcript, challenge["proof"])
        send(
            opened,
            encode(
                [{"type": "answer", "proof": handshake.make_proof(secret, WORKERS, transcript)}]
            ),
        )
        peer = Peer(loop, opened, Seal(handshake.make_key(secret, transcript), WORKERS))
        peer.first = peer.hear()[0]
        yield peer


class FakeLeader:
    """A leader in the hands of a test, and the worker that looks for it; both on one loop."""

    def __init__(
        self, stack: contextlib.ExitStack, secret: str = "", limits: Limits | None = None
    ) -> None:
        self.loop, self.heard, self.secret = Loop(), Heard(), secret
        self.server = stack.enter_context(socket.create_server((LEADER, 0)))
        self.control = Control(LEADER, (LEADER, WORKER), self.server.getsockname()[1])
        self.role = Worker(
            self.loop,
            self.control,
            limits or Limits(),
            handshake.Credentials(WORKER, JOB, secret),
            self.heard.events(),
        )
        stack.callback(self.loop.close)
        stack.callback(self.role.close)
        self.role.begin()

    def accept(self, stack: contextlib.ExitStack) -> socket.socket:
        self.server.setblocking(False)
        connections: list[socket.socket] = []

        def try_it() -> bool:
            with contextlib.suppress(BlockingIOError):
                connections.append(stack.enter_context(self.server.accept()[0]))
            return bool(connections)

        until(self.loop, try_it)
        return connections[0]

    def prove(self, stack: contextlib.ExitStack) -> Peer:
        """The next connection; both ends have proved that they are of the job."""
        opened = self.accept(stack)
        (leader_challenge,) = Decoder().feed(receive(self.loop, opened))
        transcript = handshake.Transcript(
            identity.as_text(JOB), WORKER, str(leader_challenge["nonce"]), handshake.make_nonce()
        )
        shown = handshake.make_proof(self.secret, LEADERS, transcript)
        challenge: dict[str, Json] = {
            "type": "challenge",
            "nonce": transcript.leader_nonce,
            "proof": shown,
        }
        challenge["protocol"] = PROTOCOL
        send(opened, encode([{**challenge, "secret": bool(self.secret)}]))
        assert b'"answer"' in receive(self.loop, opened)
        return Peer(self.loop, opened, Seal(handshake.make_key(self.secret, transcript), LEADERS))

    def let_in(self, stack: contextlib.ExitStack) -> Peer:
        """Prove the secret as ``prove`` does, and welcome the worker."""
        peer = self.prove(stack)
        peer.say({"type": "welcome"})
        return peer
