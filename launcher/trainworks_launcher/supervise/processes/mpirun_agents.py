"""How mpirun's daemons start on other hosts: its agent asks the leader's launcher, and that the
launcher of the host.

Messages between launchers (``control``): ``daemon`` to a host, with a line for sh; ``daemon_lost``
to the leader: what was started has ended before it had a rank, and mpirun may wait for it for ever.
A worker obeys the leader alone, and
the leader no one: its socket is in the runtime directory, which no other user reaches.

An agent of our mpirun does not wait for the end of what it has started. So there are a few of them
at once, however many hosts there are; what they started ends with mpirun, when the launchers end
the job.

An agent of a mpirun that the user's program calls waits, as ssh does: what is done about a daemon
that fails is for that program to say. ``daemon`` has a number then, and ``daemon_ended`` brings it
back with the status.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Callable, Mapping, Sequence

from trainworks_launcher.contract.json_values import Json, decode, mapping, number, text
from trainworks_launcher.supervise.event_loop import READ, Loop
from trainworks_launcher.supervise.outcome.outcome import describe_status
from trainworks_launcher.supervise.processes.processes import Child

SOCKET = "agents"
"""Name of the socket in the runtime directory."""

START, LOST, ENDED = "daemon", "daemon_lost", "daemon_ended"

LINE_LIMIT = 60000
"""Bytes of a command as JSON: a message of the control channel holds no more
(``messages.MESSAGE_LIMIT``).
"""

_UNREACHED = (
    "perhaps it could not reach mpirun: the hosts of a job have to reach each other on all ports"
)
_FAILED = 255
_READ_BYTES = 65536
_TEXT_CHARACTERS = 4000

Tell = Callable[..., None]


class Agents:
    """The agents of mpirun, on the leader, and where they only wait.

    Every method runs in the loop's thread.
    """

    def __init__(
        self,
        loop: Loop,
        directory: Path,
        others: Callable[[], Mapping[str, str]],
        tell: Tell,
        *,
        wait: bool = False,
        copied: Callable[[], None] | None = None,
    ) -> None:
        """Listen in ``directory``.

        Args:
            loop: Waits for the agents.
            directory: The job's runtime directory.
            others: Returns the hosts that may be asked, each with its address.
            tell: As ``Role.tell``.
            wait: Whether an agent is answered when what it started has ended.
            copied: On a host that may not ask: called when its program does, as the first host's
                copy of it does, too. Its agents wait for the end of the job.
        """
        self._loop = loop
        self._others = others
        self._tell = tell
        self._wait = wait
        self._copied = copied
        self._waiting: dict[int, socket.socket] = {}
        self._copies: list[socket.socket] = []
        self._number = 0
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
        """Listen no more.

        Agents that still ask see that, and those of a copy end without a word.
        """
        for connection in self._copies:
            if connection in self._open:
                self._answer(connection, {"status": _FAILED, "text": ""})
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
        if not data or len(said) > 2 * _READ_BYTES:
            self._close(connection)
        elif said.endswith(b"\n"):
            answer = self._ask(bytes(said), connection)
            if answer:
                self._answer(connection, answer)

    def _answer(self, connection: socket.socket, answer: Mapping[str, Json]) -> None:
        with contextlib.suppress(OSError):
            connection.send(json.dumps(answer).encode() + b"\n")
        self._close(connection)

    def _ask(self, said: bytes, connection: socket.socket) -> Mapping[str, Json]:
        """Tell the launcher of the host. Returns the answer; {} if it comes later."""
        try:
            request = mapping(decode(said.decode("utf-8")))
        except ValueError:
            request = {}
        host, others = text(request.get("host")), self._others()
        if self._copied is not None:
            self._copies.append(connection)
            self._copied()
            return {}
        if host not in others:
            why = f"{host!r} is not another host of this job, or mpirun has ended"
            return {"status": _FAILED, "text": f"trainworks: {why}\n", "others": dict(others)}
        if len(said) > LINE_LIMIT:
            return {
                "status": _FAILED,
                "text": f"trainworks: mpirun's command has more than {LINE_LIMIT} bytes\n",
            }
        if not self._wait:
            self._tell(START, host, line=text(request.get("line")))
            return {"status": 0, "text": ""}
        self._number += 1
        self._waiting[self._number] = connection
        self._tell(START, host, line=text(request.get("line")), number=self._number)
        return {}

    def ended(self, host: str, message: Mapping[str, Json]) -> None:
        """What an agent waits for has ended on a host."""
        connection = self._waiting.pop(number(message.get("number")), None)
        if connection is None or connection not in self._open:  # the agent was ended before
            return
        status, output = number(message.get("status")), text(message.get("text"))
        why = ""
        if status:
            end = describe_status(status)
            why = f"trainworks: what mpirun started on {host} ended: {end}\n{output}"
        # A shell's way to tell of a signal: 128 and its number.
        exit_status = 128 - status if status < 0 else status
        self._answer(connection, {"status": exit_status, "text": why})


class Daemons:
    """What the leader's agents have started on this host.

    Every method runs in the loop's thread.
    """

    def __init__(
        self,
        start: Callable[[Sequence[str]], Child | None],
        has_ranks: Callable[[], bool],
        may_start_ranks: Callable[[], bool],
        tell: Tell,
    ) -> None:
        """None runs yet.

        Args:
            start: Starts a command; None if nothing may be started now. Raises OSError.
            has_ranks: Returns whether a rank has come.
            may_start_ranks: Returns whether a process of the job runs that is not known by itself:
                a daemon, or what a daemon has started.
            tell: As ``Role.tell``.
        """
        self._start = start
        self._has_ranks = has_ranks
        self._may_start_ranks = may_start_ranks
        self._left = False
        self._orphan = 0  # the status of the last orphan that failed
        self._asked = False
        self._tell = tell
        self._running: dict[Child, int] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of those that run."""
        return tuple(child.pid for child in self._running)

    @property
    def were_asked(self) -> bool:
        """Whether the leader has asked for one."""
        return self._asked

    def start(self, _: str, message: Mapping[str, Json]) -> None:
        """The leader asks for one."""
        self._asked = True
        awaited = number(message.get("number"))
        try:
            child = self._start(("/bin/sh", "-c", text(message.get("line"))))
        except OSError as error:
            self._over(awaited, _FAILED, f"/bin/sh: {error.strerror or error}")
            return
        if child is not None:
            self._running[child] = awaited

    def reap(self) -> None:
        """Tell of those that have ended."""
        for child in tuple(self._running):
            if child.has_just_ended():
                awaited = self._running.pop(child)
                child.drain()
                said = child.tail.read().decode("utf-8", "replace")[-_TEXT_CHARACTERS:]
                self._over(awaited, child.returncode, said)
                self._left = self._left or not (child.returncode or awaited)

    def _over(self, awaited: int, code: int, said: str) -> None:
        if awaited:
            self._tell(ENDED, number=awaited, status=code, text=said if code else "")
        elif code:
            self._lost(code, said, certain=True)

    def orphans_ended(self, statuses: Sequence[int]) -> None:
        """A daemon leaves its parent when it has started: its end is that of an orphan.

        So may be the end of what a start leaves behind. An orphan's status counts only while no
        rank has come, and when nothing is left that could still start one.
        """
        self._orphan = next(filter(None, statuses), self._orphan)
        if self._left and self._orphan and not self._running and not self._may_start_ranks():
            orphan, self._orphan = self._orphan, 0
            self._lost(orphan, "", certain=False)

    def _lost(self, code: int, said: str, *, certain: bool) -> None:
        if not self._has_ranks():
            self._tell(LOST, status=code, text=said or _UNREACHED, certain=certain)

    def end(self) -> None:
        """End those that run."""
        for child in self._running:
            child.kill()
        self._running.clear()
