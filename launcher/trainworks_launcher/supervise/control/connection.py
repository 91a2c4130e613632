"""One end of a TCP connection of the control channel, one try to make one, and
the leader's listening socket.
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

_SOON = 0.01
_BEATS = 6
_READ_BYTES = 16384


def heartbeat_interval(limit: float) -> float:
    """Return the seconds between two signs of life where silence of ``limit``
    seconds is too long.
    """
    return min(names.HEARTBEAT_SECONDS, limit / _BEATS)


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

        ``on_lost`` is called once, with the reason, unless ``close`` came first.

        limit: bytes of one message from the other end, until ``trust``. Raises
        OSError if it is connected no more.
        """
        self.host = ""
        self.asked: Transcript | None = None  # what the leader asked it to prove
        self.seal: Seal | None = None
        self.probes = 0  # questions beside this connection, see ``keepalive``
        self.strange = (
            False  # the other end is another program: what it said is no message of a launcher
        )
        self.family, self.there = opened.family, opened.getpeername()
        self.address = _plain(str(self.there[0]))
        self.local_address = _plain(str(opened.getsockname()[0]))
        self.opened = self.heard = self.spoke = time.monotonic()  # spoke: on this connection
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
        """Close and open every message with a seal from now on."""
        self.seal = self._decoder.seal = seal

    def trust(self, host: str) -> None:
        """The other end is this host of the job."""
        self.host = host
        self._decoder.limit = MESSAGE_LIMIT

    def hand_over(
        self,
        on_message: Callable[[Connection, Message], None],
        on_lost: Callable[[Connection, str], None],
    ) -> None:
        """The other end has joined: what it says, and its loss, go elsewhere from now on."""
        self._on_message = on_message
        self._on_lost = on_lost

    def send(self, kind: str, **fields: Json) -> None:
        """Queue a message and write what the kernel takes now."""
        if self.open:
            line = json.dumps({"type": kind, **fields}).encode()
            self._outgoing += (self.seal.closed(line) if self.seal is not None else line) + b"\n"
            self._write()

    def close(self) -> None:
        """Close without a word; what was sent before is still delivered."""
        if self.open:
            self.open = False
            self._loop.unwatch(self._socket)
            self._socket.close()

    def silence(self, limit: float) -> float:
        """Seconds since the other end was heard, where that is more than ``limit``, else 0.

        0 too if it is lost now.

        What lies unread counts as heard: this host itself may have been paused.
        """
        if time.monotonic() - self.heard > limit:
            self._read()
        silent = time.monotonic() - self.heard
        return silent if self.open and silent > limit else 0.0

    def is_lost(self, limit: float) -> float:
        """Return the seconds of silence if they are too many, else 0.

        They count from the heartbeat that did not come: an outage that is
        shorter than the limit never ends a job.
        """
        return self.silence(limit + heartbeat_interval(limit))

    def next_look(self, limit: float) -> float:
        """Seconds until one has to look again: for the next heartbeat, or
        because it is lost then.
        """
        interval = heartbeat_interval(limit)
        left = limit + interval - (time.monotonic() - self.heard)
        return min(interval, max(_SOON, left))

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
        wanted = READ | WRITE if self._outgoing else READ
        if wanted != self._watched:
            self._watched = wanted
            self._loop.watch(self._socket, wanted, self._ready)

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
            self.strange = True
            self._lose(f"it does not speak the launcher's protocol: {one_reason(error)}")
            return
        if messages or self.seal is None:
            self.heard = self.spoke = time.monotonic()
        for message in messages:
            if self.open:
                self._on_message(self, message)


class Attempt:
    """One try to connect, without waiting for it."""

    def __init__(
        self,
        loop: Loop,
        family: int,
        address: Any,
        seconds: float,
        done: Callable[[socket.socket | None, str], None],
    ) -> None:
        """Begin. done: called once, with the connected socket, or with None and the reason.

        Not after ``cancel``.

        address: As ``socket.getaddrinfo`` gives it for the family. seconds:
        after which it is given up.
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
        """Forget it."""
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
        code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if opened is not None else 0
        if code:
            self._end(os.strerror(code))
        elif opened is not None:
            self._loop.unwatch(opened)
            self.running, self._socket = False, None
            self._done(opened, "")


def one_reason(error: ValueError) -> str:
    """Return why bytes are not a message, without the bytes themselves."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return str(error)[:100]


def listen(port: int) -> socket.socket:
    """Return a listening socket on every address of this host, IPv6 and IPv4
    where the kernel has both.
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


def _plain(address: str) -> str:
    """Return an address without the form that a dual-stack socket gives to IPv4."""
    return address[len("::ffff:") :] if address.startswith("::ffff:") else address
