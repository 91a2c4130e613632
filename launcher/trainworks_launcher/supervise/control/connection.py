"""TCP connections of the control channel: one end of a connection, a try to connect, and the
leader's listening socket.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Callable

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.supervise.control.messages import MESSAGE_LIMIT, Decoder, Message
from trainworks_launcher.supervise.event_loop import READ, WRITE, Loop

if TYPE_CHECKING:
    from trainworks_launcher.supervise.control.handshake import Transcript
    from trainworks_launcher.supervise.control.message_authentication import Seal

_SHORTEST_INTERVAL = 0.01
_HEARTBEATS_PER_LIMIT = 6
_READ_BYTES = 16384


def heartbeat_interval(limit: float) -> float:
    """Return the seconds between two heartbeats, for a limit of silence in seconds."""
    return min(names.HEARTBEAT_SECONDS, limit / _HEARTBEATS_PER_LIMIT)


class Connection:
    """One end of a TCP connection on the loop: sends and receives messages, and notices silence."""

    def __init__(
        self,
        loop: Loop,
        opened: socket.socket,
        on_message: Callable[[Connection, Message], None],
        on_lost: Callable[[Connection, str], None],
        limit: int = MESSAGE_LIMIT,
    ) -> None:
        """Take over a connected socket.

        Args:
            loop: The loop of the run.
            opened: The socket.
            on_message: Called for each message.
            on_lost: Called once with the reason when the connection is lost, unless ``close``
                came first.
            limit: Bytes of one message from the other end, until ``trust``.

        Raises:
            OSError: The socket is no longer connected.
        """
        self.host = ""
        self.transcript: Transcript | None = None  # the join that the other end has to prove
        self.seal: Seal | None = None
        self.probe_count = 0  # probes beside this connection, see ``keepalive``
        self.is_foreign = False  # the other end is another program than the launcher
        self.family = opened.family
        self.peer_address: tuple[Any, ...] = opened.getpeername()
        self.address = _without_ipv6_form(str(self.peer_address[0]))
        self.local_address = _without_ipv6_form(str(opened.getsockname()[0]))
        # The other end was heard on any connection, and spoke on this one.
        self.opened = self.heard_at = self.spoke_at = time.monotonic()
        self._loop = loop
        self._socket = opened
        self._decoder = Decoder(limit)
        self._outgoing = b""
        self._on_message = on_message
        self._on_lost = on_lost
        self._watched = READ
        self.open = True
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(opened, READ, self._ready)

    def use_seal(self, seal: Seal) -> None:
        """Use a seal for every message in both directions from now on."""
        self.seal = self._decoder.seal = seal

    def trust(self, host: str) -> None:
        """Accept the other end as this host of the job."""
        self.host = host
        self._decoder.limit = MESSAGE_LIMIT

    def hand_over(
        self,
        on_message: Callable[[Connection, Message], None],
        on_lost: Callable[[Connection, str], None],
    ) -> None:
        """Replace the handlers, because the other end has joined."""
        self._on_message = on_message
        self._on_lost = on_lost

    def send(self, kind: str, **fields: Json) -> None:
        """Queue a message and write what the kernel takes now."""
        if self.open:
            line = json.dumps({"type": kind, **fields}).encode()
            if self.seal is not None:
                line = self.seal.closed(line)
            self._outgoing += line + b"\n"
            self._write()

    def close(self) -> None:
        """Close without a message; the kernel still delivers earlier ones."""
        if self.open:
            self.open = False
            self._loop.unwatch(self._socket)
            self._socket.close()

    def silence(self, limit: float) -> float:
        """Return the seconds since the other end was heard, if they exceed the limit, else 0.

        First reads data that has come meanwhile, because this host itself may have been paused.
        0 too if the connection is lost in that read.
        """
        if time.monotonic() - self.heard_at > limit:
            self._read()
        silent = time.monotonic() - self.heard_at
        if not self.open or silent <= limit:
            return 0.0
        return silent

    def is_lost(self, limit: float) -> float:
        """Return the seconds of silence if the other end is lost, else 0.

        The limit begins at the heartbeat that did not come, so a shorter outage never ends a job.
        """
        return self.silence(limit + heartbeat_interval(limit))

    def next_look(self, limit: float) -> float:
        """Return the seconds to the next heartbeat, or to the limit if that comes first."""
        interval = heartbeat_interval(limit)
        left = limit + interval - (time.monotonic() - self.heard_at)
        return min(interval, max(_SHORTEST_INTERVAL, left))

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
            self._lose(f"connection lost: {error.strerror or error}")
            return
        events = READ | WRITE if self._outgoing else READ
        if events != self._watched:
            self._watched = events
            self._loop.watch(self._socket, events, self._ready)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"connection lost: {error.strerror or error}")
            return
        if not data:
            self._lose("it closed the connection")
            return
        try:
            messages = self._decoder.feed(data)
        except ValueError as error:
            self.is_foreign = True
            self._lose(f"it does not speak the launcher's protocol: {one_reason(error)}")
            return
        # With a seal, only a complete message shows that the other end itself has sent something.
        if messages or self.seal is None:
            self.heard_at = self.spoke_at = time.monotonic()
        for message in messages:
            if self.open:
                self._on_message(self, message)


class Attempt:
    """A try to connect, without waiting for the result."""

    def __init__(
        self,
        loop: Loop,
        family: int,
        address: Any,
        seconds: float,
        done: Callable[[socket.socket | None, str], None],
    ) -> None:
        """Begin.

        Args:
            loop: The loop of the run.
            family: Address family.
            address: Socket address, as ``socket.getaddrinfo`` returns it for the family.
            seconds: Limit of the try.
            done: Called once with the connected socket, or with None and the reason; not after
                ``cancel``.
        """
        self._loop = loop
        self._done = done
        self._socket: socket.socket | None = None
        self.running = True
        try:
            self._socket = opened = socket.socket(family, socket.SOCK_STREAM)
            opened.setblocking(False)
            opened.connect(address)
        except BlockingIOError:
            pass
        except OSError as error:
            reason = str(error.strerror or error)
            loop.after(0.0, lambda: self._end(reason))
            return
        loop.watch(opened, WRITE, lambda _: self._answered())
        loop.after(seconds, lambda: self._end("it does not answer"))

    def cancel(self) -> None:
        """End the try without a result."""
        self.running = False
        if self._socket is not None:
            self._loop.unwatch(self._socket)
            self._socket.close()
            self._socket = None

    def _end(self, reason: str) -> None:
        if self.running:
            self.cancel()
            self._done(None, reason)

    def _answered(self) -> None:
        opened = self._socket
        if opened is None:
            return
        code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._end(os.strerror(code))
            return
        self._loop.unwatch(opened)
        self.running, self._socket = False, None
        self._done(opened, "")


def one_reason(error: ValueError) -> str:
    """Describe why bytes are not a message, without the bytes themselves."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return str(error)[:100]


def listen(port: int) -> socket.socket:
    """Listen on every address of this host, IPv6 and IPv4 if the kernel has both.

    Raises OSError if the port is taken.
    """
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


def _without_ipv6_form(address: str) -> str:
    """Return an IPv4 address without the prefix that a dual-stack socket adds.

    >>> _without_ipv6_form("::ffff:10.0.0.1")
    '10.0.0.1'
    """
    if address.startswith("::ffff:"):
        return address[len("::ffff:") :]
    return address
