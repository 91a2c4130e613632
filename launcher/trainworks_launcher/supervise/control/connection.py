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
"""Seconds."""

_HEARTBEATS_PER_LIMIT = 6
"""Heartbeats that a silent host has missed at least when it counts as lost."""

_READ_BYTES = 16384


def heartbeat_interval(limit: float) -> float:
    """Return the seconds between two heartbeats, for a limit of silence in seconds."""
    return min(names.HEARTBEAT_SECONDS, limit / _HEARTBEATS_PER_LIMIT)


class Connection:
    """One end of a TCP connection on the loop: sends and receives messages, and notices silence.

    Attributes:
        open: Whether the connection is neither closed nor lost.
        host: The host at the other end; ``""`` before ``trust``.
        transcript: The join that the other end has to prove; None outside of a handshake.
        seal: Authenticates each message; None before ``use_seal``.
        probe_count: Number of probes beside this connection, see ``keepalive``.
        is_foreign: Whether the other end has sent something that is not a message.
        family: Address family of the socket.
        peer_address: Socket address of the other end.
        address: Address of the other end as text, for example ``10.0.0.2``.
        local_address: Address of this end as text.
        opened: When the connection was made. This and the next two: seconds of the monotonic clock.
        heard_at: When the other end was last heard, on any connection.
        spoke_at: When the other end last spoke on this connection.
    """

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
        self.transcript: Transcript | None = None
        self.seal: Seal | None = None
        self.probe_count = 0
        self.is_foreign = False
        self.family = opened.family
        self.peer_address: tuple[Any, ...] = opened.getpeername()
        self.address = _without_ipv6_form(str(self.peer_address[0]))
        self.local_address = _without_ipv6_form(str(opened.getsockname()[0]))
        self.opened = self.heard_at = self.spoke_at = time.monotonic()
        self._loop = loop
        self._socket = opened
        self._decoder = Decoder(limit)
        self._outgoing = b""
        self._on_message = on_message
        self._on_lost = on_lost
        self._watched_events = READ
        self.open = True
        opened.setblocking(False)
        # A message is small, and must not wait for a next one (Nagle's algorithm).
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(opened, READ, self._ready)

    def use_seal(self, seal: Seal) -> None:
        """Authenticate every message from now on, in both directions."""
        self.seal = self._decoder.seal = seal

    def trust(self, host: str) -> None:
        """Note that the other end is this host of the job; allow it messages of full length."""
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
        """Send a message without blocking; do nothing on a closed connection.

        What the kernel does not take now is sent later, from the loop. The connection may be lost
        in this call: then ``on_lost`` is called before the call returns.

        Args:
            kind: Type of the message, for example ``welcome``.
            fields: Its other fields.
        """
        if not self.open:
            return
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
        """Return the seconds since the other end was heard; 0 if they are within the limit.

        Before it returns more than 0, it reads the data that has come, and calls ``on_message`` or
        ``on_lost``. The result is 0 if the connection is lost in that read.

        Args:
            limit: Seconds.
        """
        if time.monotonic() - self.heard_at > limit:
            # This host itself may have been paused, while data came.
            self._read()
        silent = time.monotonic() - self.heard_at
        if not self.open or silent <= limit:
            return 0.0
        return silent

    def is_lost(self, limit: float) -> float:
        """Return the seconds of silence if the other end is lost; 0 if it is not.

        Reads and calls handlers as ``silence`` does.

        Args:
            limit: Heartbeat limit in seconds.
        """
        # The limit begins at the heartbeat that did not come: an outage within the limit ends no
        # job.
        return self.silence(limit + heartbeat_interval(limit))

    def next_look(self, limit: float) -> float:
        """Return the seconds to the next heartbeat, or to the end of the limit if that is sooner.

        Args:
            limit: Heartbeat limit in seconds.
        """
        interval = heartbeat_interval(limit)
        left = limit + interval - (time.monotonic() - self.heard_at)
        return min(interval, max(_SHORTEST_INTERVAL, left))

    def _lose(self, reason: str) -> None:
        """Close the connection and call ``on_lost`` with the reason, unless it is closed."""
        if self.open:
            self.close()
            self._on_lost(self, reason)

    def _ready(self, events: int) -> None:
        """Write and read as the loop's events say."""
        if events & WRITE:
            self._write()
        # The connection may have been lost in the write.
        if events & READ and self.open:
            self._read()

    def _write(self) -> None:
        """Write what the kernel takes now, and let the loop call again for the rest.

        The connection is lost if the kernel reports an error.
        """
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(f"connection lost: {error.strerror or error}")
            return
        # A socket can nearly always be written: to watch for that without need would keep the loop
        # awake.
        events = READ | WRITE if self._outgoing else READ
        if events != self._watched_events:
            self._watched_events = events
            self._loop.watch(self._socket, events, self._ready)

    def _read(self) -> None:
        """Read the bytes that have come, and call ``on_message`` for each complete message.

        The connection is lost at its end, at an error of the kernel, and at bytes that are not a
        message.
        """
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
            # The handler of an earlier message may have closed the connection. Messages behind it
            # are dropped then.
            if self.open:
                self._on_message(self, message)


class Attempt:
    """An attempt to connect that does not block.

    Attributes:
        running: Whether the attempt has neither ended nor been cancelled.
    """

    def __init__(
        self,
        loop: Loop,
        family: int,
        address: Any,
        seconds: float,
        done: Callable[[socket.socket | None, str], None],
    ) -> None:
        """Begin to connect. Errors go to ``done``, none is raised.

        Args:
            loop: The loop of the run.
            family: Address family.
            address: Socket address, as ``socket.getaddrinfo`` returns it for the family.
            seconds: Limit of the attempt.
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
            # The usual case: the kernel connects in the background.
            pass
        except OSError as error:
            reason = str(error.strerror or error)
            # Not at once, because the caller has no object to cancel yet.
            loop.after(0.0, lambda: self._fail(reason))
            return
        loop.watch(opened, WRITE, lambda _: self._finish())
        loop.after(seconds, lambda: self._fail("it does not answer"))

    def cancel(self) -> None:
        """End the attempt and close the socket; ``done`` is not called."""
        self.running = False
        if self._socket is not None:
            self._loop.unwatch(self._socket)
            self._socket.close()
            self._socket = None

    def _fail(self, reason: str) -> None:
        """Close the socket and call ``done`` with the reason, unless the attempt has ended."""
        if self.running:
            self.cancel()
            self._done(None, reason)

    def _finish(self) -> None:
        """Take the kernel's result of the connect, and call ``done`` with it.

        A connected socket is no longer this object's.
        """
        opened = self._socket
        if opened is None:
            return
        # A socket that did not connect is ready for writing, too. The error is in an option.
        code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(os.strerror(code))
            return
        self._loop.unwatch(opened)
        self.running = False
        self._socket = None
        self._done(opened, "")


_BACKLOG = 1024
"""Connections that may wait until they are accepted: hosts of a job come at the same time."""

_REASON_CHARACTERS = 100
"""Length of a reason in the log: the other end may be any program."""


def one_reason(error: ValueError) -> str:
    """Describe why bytes are not a message, without the bytes themselves.

    Args:
        error: From ``Decoder.feed``.

    Returns:
        For example ``a message is too long``; at most 100 characters.
    """
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return str(error)[:_REASON_CHARACTERS]


def listen(port: int) -> socket.socket:
    """Listen on every address of this host, IPv6 and IPv4 if the kernel has both.

    Args:
        port: The TCP port; 0 for a free one.

    Returns:
        The listening socket, which does not block.

    Raises:
        OSError: The port is taken.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier launcher on this port may still be in TIME_WAIT.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        opened.bind(("", port))
        opened.listen(_BACKLOG)
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
