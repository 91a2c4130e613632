"""How mpirun's daemons start on other hosts: its agent asks the leader's launcher, and that the launcher of the host.

Messages between launchers (``control``): ``daemon`` to a host, with a number and a line for sh; ``daemon_over`` to it,
when the agent has gone; ``daemon_ended`` to the leader, with the exit status and last words. A worker obeys the leader
alone, and the leader no one: its socket is in the runtime directory, which no other user reaches.

``daemon_lost`` to the leader: a daemon of a host has ended before it started a rank. mpirun may wait for it for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
from pathlib import Path
from typing import Callable, Mapping, Sequence

from trainworks_launcher.contract.values import Json, decode, mapping, number, text
from trainworks_launcher.supervise.children.processes import Child
from trainworks_launcher.supervise.loop import READ, Loop

SOCKET = "agents"
"""Name of the socket in the runtime directory."""

START, OVER, ENDED, LOST = "daemon", "daemon_over", "daemon_ended", "daemon_lost"

LINE_LIMIT = 60000
"""Bytes of a command as JSON: a message of the control channel holds no more (``messages.MESSAGE_LIMIT``)."""

_UNREACHED = "perhaps it could not reach mpirun: the hosts of a job have to reach each other on all ports"
_FAILED = 255
_READ_BYTES = 65536
_TEXT_CHARACTERS = 4000

Tell = Callable[..., None]


class Agents:
    """The agents of mpirun, on the leader. Every method runs in the loop's thread."""

    def __init__(self, loop: Loop, directory: Path, others: Callable[[], Sequence[str]], tell: Tell) -> None:
        """Listen in ``directory``. others: returns the hosts that may be asked. tell: as ``Role.tell``."""
        self._loop = loop
        self._others = others
        self._tell = tell
        self._count = itertools.count(1)
        self._asked: dict[int, tuple[str, socket.socket]] = {}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            self._server.bind(f"/proc/self/fd/{place}/{SOCKET}")
        finally:
            os.close(place)
        self._server.listen(512)
        loop.watch(self._server, READ, self._accept)

    def ended(self, host: str, message: Mapping[str, Json]) -> None:
        """What an agent started on another host has ended."""
        asked, connection = self._asked.pop(number(message.get("number")), ("", None))
        if connection is not None and asked == host:
            self._answer(connection, number(message.get("status")) & 0xFF, text(message.get("text")))

    def close(self) -> None:
        """Listen no more; agents that still wait see that."""
        for connection in (self._server, *(connection for _, connection in self._asked.values())):
            self._loop.unwatch(connection)
            connection.close()
        self._asked.clear()

    def _accept(self, _: int) -> None:
        with contextlib.suppress(OSError):
            connection, _address = self._server.accept()
            connection.setblocking(False)
            count, said = next(self._count), bytearray()
            self._loop.watch(connection, READ, lambda _: self._read(connection, count, said))

    def _read(self, connection: socket.socket, count: int, said: bytearray) -> None:
        try:
            data = connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        if not data or len(said) > 2 * _READ_BYTES:
            self._loop.unwatch(connection)
            connection.close()
            host, _connection = self._asked.pop(count, ("", None))
            if host:
                self._tell(OVER, host, number=count)
        elif said.endswith(b"\n") and count not in self._asked:
            self._ask(connection, count, bytes(said))

    def _ask(self, connection: socket.socket, count: int, said: bytes) -> None:
        try:
            asked = mapping(decode(said.decode("utf-8")))
        except ValueError:
            asked = {}
        host = text(asked.get("host"))
        if host not in self._others():
            self._answer(
                connection, _FAILED, f"trainworks: {host!r} is not another host of this job, or mpirun has ended\n"
            )
        elif len(said) > LINE_LIMIT:
            self._answer(connection, _FAILED, f"trainworks: mpirun's command has more than {LINE_LIMIT} bytes\n")
        else:
            self._asked[count] = (host, connection)
            self._tell(START, host, number=count, line=text(asked.get("line")))

    def _answer(self, connection: socket.socket, status: int, said: str) -> None:
        self._loop.unwatch(connection)
        with connection, contextlib.suppress(OSError):
            connection.send(json.dumps({"status": status, "text": said}).encode() + b"\n")


class Daemons:
    """What the leader's agents have started on this host. Every method runs in the loop's thread."""

    def __init__(
        self, start: Callable[[Sequence[str]], Child | None], has_ranks: Callable[[], bool], tell: Tell
    ) -> None:
        """None runs yet.

        Args:
            start: Starts a command; None if nothing may be started now. Raises OSError.
            has_ranks: Returns whether a rank has come.
            tell: As ``Role.tell``.
        """
        self._start = start
        self._has_ranks = has_ranks
        self._left = False
        self._tell = tell
        self._running: dict[int, Child] = {}
        self._unwanted: set[int] = set()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of those that run."""
        return tuple(child.pid for child in self._running.values())

    def start(self, _: str, message: Mapping[str, Json]) -> None:
        """The leader asks for one."""
        count = number(message.get("number"))
        try:
            child = self._start(("/bin/sh", "-c", text(message.get("line"))))
        except OSError as error:
            self._tell(ENDED, number=count, status=_FAILED, text=f"trainworks: /bin/sh: {error.strerror or error}\n")
            return
        if child is None:
            self._tell(ENDED, number=count, status=_FAILED, text="trainworks: this host is ending its part\n")
        else:
            self._running[count] = child

    def over(self, _: str, message: Mapping[str, Json]) -> None:
        """The agent that had asked for one has gone."""
        count = number(message.get("number"))
        child = self._running.get(count)
        if child is not None:
            self._unwanted.add(count)
            child.signal_group(signal.SIGKILL)

    def reap(self) -> None:
        """Tell of those that have ended."""
        for count, child in tuple(self._running.items()):
            if child.has_just_ended():
                del self._running[count]
                code, said = child.returncode, ""
                if code and count not in self._unwanted:
                    child.drain()
                    said = child.tail.read().decode("utf-8", "replace")[-_TEXT_CHARACTERS:]
                    self._lost(code, said, certain=True)
                self._left = self._left or not code
                self._tell(ENDED, number=count, status=128 - code if code < 0 else code, text=said)

    def orphans_ended(self, statuses: Sequence[int]) -> None:
        """A daemon leaves its parent when it has started: its end is that of an orphan."""
        if self._left and any(statuses):
            self._lost(next(filter(None, statuses)), "", certain=False)

    def _lost(self, code: int, said: str, *, certain: bool) -> None:
        if not self._has_ranks():
            self._tell(LOST, status=code, text=said or _UNREACHED, certain=certain)

    def end(self) -> None:
        """End those that run."""
        for child in self._running.values():
            child.kill()
        self._running.clear()
