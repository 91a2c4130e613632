"""How mpirun's daemons start on other hosts: its agent asks the leader's launcher, and that the launcher of the host.

Messages between launchers (``control``): ``daemon`` to a host, with a line for sh; ``daemon_lost`` to the leader: what
was started has ended before it had a rank, and mpirun may wait for it for ever. A worker obeys the leader alone, and
the leader no one: its socket is in the runtime directory, which no other user reaches.

An agent does not wait for the end of what it has started. So mpirun on the leader has a few of them at once, however
many hosts there are; what they started ends with mpirun, when the launchers end the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Callable, Mapping, Sequence

from trainworks_launcher.contract.values import Json, decode, mapping, text
from trainworks_launcher.supervise.children.processes import Child
from trainworks_launcher.supervise.loop import READ, Loop

SOCKET = "agents"
"""Name of the socket in the runtime directory."""

START, LOST = "daemon", "daemon_lost"

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
        self._open: set[socket.socket] = set()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            server.bind(f"/proc/self/fd/{place}/{SOCKET}")
        finally:
            os.close(place)
        server.listen(512)
        self._watch(server, lambda _: self._accept(server))

    def close(self) -> None:
        """Listen no more; agents that still ask see that."""
        for opened in tuple(self._open):
            self._close(opened)

    def _watch(self, opened: socket.socket, ready: Callable[[int], None]) -> None:
        self._open.add(opened)
        self._loop.watch(opened, READ, ready)

    def _close(self, opened: socket.socket) -> None:
        self._open.discard(opened)
        self._loop.unwatch(opened)
        opened.close()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _address = server.accept()
            connection.setblocking(False)
            said = bytearray()
            self._watch(connection, lambda _: self._read(connection, said))

    def _read(self, connection: socket.socket, said: bytearray) -> None:
        try:
            data = connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        if said.endswith(b"\n"):
            why = self._ask(bytes(said))
            with contextlib.suppress(OSError):
                connection.send(json.dumps({"status": _FAILED if why else 0, "text": why}).encode() + b"\n")
        elif data and len(said) <= 2 * _READ_BYTES:
            return
        self._close(connection)

    def _ask(self, said: bytes) -> str:
        """Tell the launcher of the host. Returns why that is not done, or ``""``."""
        try:
            asked = mapping(decode(said.decode("utf-8")))
        except ValueError:
            asked = {}
        host = text(asked.get("host"))
        if host not in self._others():
            return f"trainworks: {host!r} is not another host of this job, or mpirun has ended\n"
        if len(said) > LINE_LIMIT:
            return f"trainworks: mpirun's command has more than {LINE_LIMIT} bytes\n"
        self._tell(START, host, line=text(asked.get("line")))
        return ""


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
        self._running: list[Child] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of those that run."""
        return tuple(child.pid for child in self._running)

    def start(self, _: str, message: Mapping[str, Json]) -> None:
        """The leader asks for one."""
        try:
            child = self._start(("/bin/sh", "-c", text(message.get("line"))))
        except OSError as error:
            self._lost(_FAILED, f"/bin/sh: {error.strerror or error}", certain=True)
            return
        if child is not None:
            self._running.append(child)

    def reap(self) -> None:
        """Tell of those that have ended."""
        for child in tuple(self._running):
            if child.has_just_ended():
                self._running.remove(child)
                if child.returncode:
                    child.drain()
                    said = child.tail.read().decode("utf-8", "replace")[-_TEXT_CHARACTERS:]
                    self._lost(child.returncode, said, certain=True)
                self._left = self._left or not child.returncode

    def orphans_ended(self, statuses: Sequence[int]) -> None:
        """A daemon leaves its parent when it has started: its end is that of an orphan."""
        if self._left and any(statuses):
            self._lost(next(filter(None, statuses)), "", certain=False)

    def _lost(self, code: int, said: str, *, certain: bool) -> None:
        if not self._has_ranks():
            self._tell(LOST, status=code, text=said or _UNREACHED, certain=certain)

    def end(self) -> None:
        """End those that run."""
        for child in self._running:
            child.kill()
        self._running.clear()
