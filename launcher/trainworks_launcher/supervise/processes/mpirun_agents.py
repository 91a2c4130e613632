"""Start of mpirun's daemons on other hosts: mpirun's agent asks the leader's launcher, which asks
the launcher of the other host.

Messages between launchers (``control``): ``daemon`` to a host, with a line for sh; ``daemon_lost``
to the leader: the process that was started has ended without a rank, and mpirun may wait for its
daemon for ever. A worker obeys only the leader. The leader obeys no host: its socket is in the
runtime directory, which no other user reaches.

An agent of our own mpirun does not wait for the end of the daemon. So only a few agents run at
once, on any number of hosts. The daemons end with mpirun, when the launchers end the job.

An agent of a mpirun that the user's program calls waits for the daemon, as ssh does: that program
decides what a failed daemon means. Such a ``daemon`` message has a number, and ``daemon_ended``
returns the number with the status.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Callable, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, decode, mapping, number, text
from trainworks_launcher.supervise.event_loop import READ, Loop
from trainworks_launcher.supervise.outcome.outcome import describe_status
from trainworks_launcher.supervise.processes.processes import Child

SOCKET = "agents"
"""Name of the socket in the runtime directory."""

START, LOST, ENDED = "daemon", "daemon_lost", "daemon_ended"

LINE_LIMIT = 60000
"""Bytes of a command as JSON: the limit of a message on the control channel
(``messages.MESSAGE_LIMIT``).
"""

_UNREACHED = (
    "perhaps it could not reach mpirun: the hosts of a job have to reach each other on all ports"
)
_FAILED = 255
"""Exit status of an agent whose daemon could not be started, as of ssh."""

_READ_BYTES = 65536
_BACKLOG = 512
"""Connections that may wait until they are accepted."""

_REQUEST_LIMIT = 2 * _READ_BYTES
"""Bytes of an agent's request. One above LINE_LIMIT gets an answer that says so."""

_TEXT_CHARACTERS = 4000
"""Length of the end of a daemon's output that is sent."""

Tell = Callable[..., None]


class AgentHandlers(NamedTuple):
    """The supervisor's handlers for requests of mpirun's agents.

    Attributes:
        others: Returns the addresses of the hosts on which daemons may be started.
        tell: As ``Role.tell``.
        copied: For a host other than the leader, on which a copy of the first host's program
            runs: called when that copy calls mpirun. Its agents wait for the end of the job.
    """

    others: Callable[[], Mapping[str, str]]
    tell: Tell
    copied: Callable[[], None] | None = None


class Agents:
    """The agents of mpirun on this host. Every method runs in the loop's thread."""

    def __init__(
        self, loop: Loop, directory: Path, handlers: AgentHandlers, *, wait: bool = False
    ) -> None:
        """Listen in a directory: make the socket SOCKET there.

        Args:
            loop: Watches the socket and the agents.
            directory: The job's runtime directory.
            handlers: The supervisor's handlers.
            wait: Whether an agent gets its answer at the end of the daemon, not at the start.

        Raises:
            OSError: The socket cannot be made, for example because it exists.
        """
        self._loop = loop
        self._handlers = handlers
        self._wait = wait
        self._waiting: dict[int, socket.socket] = {}  # number of a request -> its agent
        self._copies: list[socket.socket] = []  # agents of a copy of the program
        self._number = 0  # of the last request
        self._open: set[socket.socket] = set()  # the server, and all agents
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            server.bind(f"/proc/self/fd/{place}/{SOCKET}")
        finally:
            os.close(place)
        server.listen(_BACKLOG)
        self._watch(server, lambda _: self._accept(server))

    def close(self) -> None:
        """Close the socket and all connections.

        An agent with an open request gets an end of file, and an agent of a copy of the program
        the status ``_FAILED`` without a text.
        """
        for connection in self._copies:
            if connection in self._open:
                self._answer(connection, {"status": _FAILED, "text": ""})
        for opened in tuple(self._open):
            self._close(opened)

    def _watch(self, opened: socket.socket, ready: Callable[[int], None]) -> None:
        """Call ``ready`` whenever a socket can be read, until ``_close``."""
        self._open.add(opened)
        self._loop.watch(opened, READ, ready)

    def _close(self, opened: socket.socket) -> None:
        """Close a socket and watch it no more."""
        self._open.discard(opened)
        self._loop.unwatch(opened)
        opened.close()

    def _accept(self, server: socket.socket) -> None:
        """Accept the connection of one agent, and read its request in the loop."""
        with contextlib.suppress(OSError):
            connection, _address = server.accept()
            connection.setblocking(False)
            request = bytearray()
            self._watch(connection, lambda _: self._read(connection, request))

    def _read(self, connection: socket.socket, request: bytearray) -> None:
        """Read a part of an agent's request; handle the request when its line is complete.

        A request that is too long closes the connection, as does its end.

        Args:
            connection: The agent's connection.
            request: The parts that have come; this one is appended.
        """
        try:
            data = connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        request += data
        if not data or len(request) > _REQUEST_LIMIT:
            self._close(connection)
        elif request.endswith(b"\n"):
            answer = self._start_daemon(bytes(request), connection)
            if answer:
                self._answer(connection, answer)

    def _answer(self, connection: socket.socket, answer: Mapping[str, Json]) -> None:
        """Send an agent its answer, and close the connection."""
        with contextlib.suppress(OSError):
            connection.send(json.dumps(answer).encode() + b"\n")
        self._close(connection)

    def _start_daemon(self, line: bytes, connection: socket.socket) -> Mapping[str, Json]:
        """Send an agent's request to the launcher of the host that it names.

        Args:
            line: The request as JSON: ``host``, and ``line``, a command for sh.
            connection: The agent's connection, for an answer that comes later.

        Returns:
            The answer for the agent, ``status`` and ``text``; empty if the answer comes later.
        """
        try:
            request = mapping(decode(line.decode("utf-8")))
        except ValueError:
            request = {}
        host, others = text(request.get("host")), self._handlers.others()
        if self._handlers.copied is not None:
            # The leader's copy of the program starts the ranks: this mpirun waits.
            self._copies.append(connection)
            self._handlers.copied()
            return {}
        if host not in others:
            why = f"{host!r} is not another host of this job, or mpirun has ended"
            return {"status": _FAILED, "text": f"trainworks: {why}\n", "others": dict(others)}
        if len(line) > LINE_LIMIT:
            return {
                "status": _FAILED,
                "text": f"trainworks: mpirun's command has more than {LINE_LIMIT} bytes\n",
            }
        if not self._wait:
            self._handlers.tell(START, host, line=text(request.get("line")))
            return {"status": 0, "text": ""}
        self._number += 1
        self._waiting[self._number] = connection
        self._handlers.tell(START, host, line=text(request.get("line")), number=self._number)
        return {}

    def ended(self, host: str, message: Mapping[str, Json]) -> None:
        """Answer the agent that waits for a process on a host, if the agent still runs.

        Args:
            host: The host.
            message: With ``number`` of the request, ``status`` (negative after a signal) and
                ``text``, the end of the output.
        """
        connection = self._waiting.pop(number(message.get("number")), None)
        if connection is None or connection not in self._open:
            # The agent was ended before.
            return
        status, output = number(message.get("status")), text(message.get("text"))
        explanation = ""
        if status:
            end = describe_status(status)
            explanation = f"trainworks: what mpirun started on {host} ended: {end}\n{output}"
        # As a shell reports a signal: 128 and its number.
        exit_status = 128 - status if status < 0 else status
        self._answer(connection, {"status": exit_status, "text": explanation})


class Daemons:
    """The daemons that the leader's agents have started on this host.

    Every method runs in the loop's thread.
    """

    def __init__(
        self,
        start: Callable[[Sequence[str]], Child | None],
        has_ranks: Callable[[], bool],
        may_start_ranks: Callable[[], bool],
        tell: Tell,
    ) -> None:
        """Start none yet.

        Args:
            start: Starts a command; None if no process may be started now. Raises OSError.
            has_ranks: Returns whether a rank has reported.
            may_start_ranks: Returns whether the job has a process that the launcher did not
                start itself: a daemon, or a child of a daemon.
            tell: As ``Role.tell``.
        """
        self._start = start
        self._has_ranks = has_ranks
        self._may_start_ranks = may_start_ranks
        self._has_left = False  # a daemon has left its parent
        self._orphan_status = 0  # of the last orphan that failed
        self._was_requested = False
        self._tell = tell
        self._running: dict[Child, int] = {}  # process -> number of a request that waits, else 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the daemons that run."""
        return tuple(child.pid for child in self._running)

    @property
    def were_requested(self) -> bool:
        """Whether the leader has asked for a daemon."""
        return self._was_requested

    def start(self, _: str, message: Mapping[str, Json]) -> None:
        """Start a daemon for the leader; do nothing if no process may be started now.

        Args:
            message: With ``line``, a command for sh, and ``number`` if an agent waits for its end.
        """
        self._was_requested = True
        request = number(message.get("number"))
        try:
            child = self._start(("/bin/sh", "-c", text(message.get("line"))))
        except OSError as error:
            self._report_end(request, _FAILED, f"/bin/sh: {error.strerror or error}")
            return
        if child is not None:
            self._running[child] = request

    def reap(self) -> None:
        """Read the status of the daemons that have ended, and report them to the leader."""
        for child in tuple(self._running):
            if not child.has_just_ended():
                continue
            request = self._running.pop(child)
            child.drain()
            output = child.tail.read().decode("utf-8", "replace")[-_TEXT_CHARACTERS:]
            self._report_end(request, child.returncode, output)
            if not request and not child.returncode:
                # The daemon goes on in the background: its parent has ended with status 0.
                self._has_left = True

    def _report_end(self, request: int, code: int, output: str) -> None:
        """Report the end of a process to the leader.

        Without a waiting request only a failure is reported.

        Args:
            request: Number of the request that waits for the end; 0 for none.
            code: Return code, negative after a signal.
            output: End of its output, which is sent after a failure only.
        """
        if request:
            shown = output if code else ""
            self._tell(ENDED, number=request, status=code, text=shown)
        elif code:
            self._report_lost(code, output, certain=True)

    def orphans_ended(self, statuses: Sequence[int]) -> None:
        """Note the ends of orphans, one of which may be a daemon; report a lost daemon.

        A daemon leaves its parent when it has started, and so do other processes of a start. So
        an orphan's status counts only while no rank has reported, and only when no process is
        left that could still start one.

        Args:
            statuses: Negative after a signal.
        """
        for status in statuses:
            if status:
                self._orphan_status = status
                break
        if not self._has_left or not self._orphan_status:
            return
        if self._running or self._may_start_ranks():
            return
        status, self._orphan_status = self._orphan_status, 0
        self._report_lost(status, "", certain=False)

    def _report_lost(self, code: int, output: str, *, certain: bool) -> None:
        """Report to the leader that mpirun has lost a daemon, unless a rank has reported.

        Args:
            code: Return code of the daemon.
            output: End of its output; ``""`` if it is not known.
            certain: Whether the process was surely a daemon.
        """
        if not self._has_ranks():
            self._tell(LOST, status=code, text=output or _UNREACHED, certain=certain)

    def end(self) -> None:
        """End the daemons that run (SIGKILL), and wait for each, bounded."""
        for child in self._running:
            child.kill()
        self._running.clear()
