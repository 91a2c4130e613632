"""The ranks of this host: each reports to the launcher when it starts.

``rank.py`` connects to a socket in the runtime directory (mode 0700: no other user reaches the
socket) and sends the read ends of its standard output and error. So the launcher of a rank's own
host reads its output, whichever program started the rank. The kernel tells the rank's process id
(SO_PEERCRED), so the launcher can send signals to the rank itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Callable, NamedTuple

from trainworks_launcher.contract.json_values import decode, mapping, number, text
from trainworks_launcher.supervise.event_loop import READ, Loop
from trainworks_launcher.supervise.processes import processes
from trainworks_launcher.supervise.processes.output import Output, Stream, Tail

SOCKET = "ranks"
"""Name of the socket in the runtime directory."""

_BACKLOG = 512
"""Connections that may wait until they are accepted: the ranks of a host start together."""

_HEADER_BYTES = 4096
"""Size of a rank's report."""

_ERROR_BYTES = 1 << 20
"""Bytes of torch's error file that are read."""

# C types on the socket: a descriptor is an int; SO_PEERCRED has three of them (struct ucred in
# unix(7)): process id, user and group.
_INT_BYTES = 4
_DESCRIPTORS_BYTES = 2 * _INT_BYTES
_CREDENTIALS, _CREDENTIALS_BYTES = "3i", 3 * _INT_BYTES


class Rank:
    """One rank of this host.

    Attributes:
        number: Its global rank.
        local: Its number on this host; -1 if the rank did not report one.
        pid: Its process id.
        started: Its start time, as ``processes.stat`` returns it.
        tail: The end of its output.
        status: Its exit status, negative after a signal; None while it is not known.
        began: Time at which the rank reported (monotonic clock).
        ended_at: Time at which the launcher noticed its end; 0.0 while it runs.
        error: Content of torch's error file, read after the rank's end.
        restarts: Number of restarts of this host's ranks before this one started.
        streams: Its standard output and error.
    """

    def __init__(self, number: int, pid: int, local: int = -1, errors: str = "") -> None:
        """Note a rank that has reported, and read the start time of its process.

        Args:
            number: Its global rank.
            pid: Its process id.
            local: Its number on this host; -1 if the rank did not report one.
            errors: Path of torch's error file, which torchrun names and removes; ``""`` for none.
        """
        self.number = number
        self.local = local
        self.pid = pid
        self.started = processes.stat(pid).started
        self.tail = Tail()
        self.status: int | None = None
        self.began = time.monotonic()
        self.ended_at = 0.0
        self.error = b""
        self.restarts = 0
        self._errors = errors
        self.streams: tuple[Stream, Stream] | None = None

    def end(self, status: int | None, at: float) -> None:
        """Note the end of the rank; after a failure, read torch's error file.

        Args:
            status: Exit status, negative after a signal; None if it is not known.
            at: Time at which the end was noticed (monotonic clock).
        """
        self.status = status
        self.ended_at = at
        if self._errors and status != 0:
            with contextlib.suppress(OSError), open(self._errors, "rb") as opened:  # noqa: PTH123
                self.error = opened.read(_ERROR_BYTES)

    def is_running(self) -> bool:
        """Return whether the process that reported still exists."""
        if self.ended_at or not self.started:
            return False
        # The number may belong to a new process by now.
        return processes.stat(self.pid).started == self.started


class RankHandlers(NamedTuple):
    """The supervisor's handlers for the ranks of this host.

    Attributes:
        prefix: Returns the prefix for the lines of a rank; None to copy byte for byte.
        started: Called for each rank that reports.
        ended: Called for each end, at once where the kernel has pidfd_open (Linux 5.3), else never.
    """

    prefix: Callable[[int], bytes | None]
    started: Callable[[Rank], None]
    ended: Callable[[Rank], None]


class Ranks:
    """The socket to which the ranks of one host report. Methods run in the loop's thread."""

    def __init__(self, loop: Loop, directory: Path, output: Output, handlers: RankHandlers) -> None:
        """Listen in a directory: make the socket SOCKET there.

        Args:
            loop: Watches the socket and the ranks' ends.
            directory: The runtime directory.
            output: Copies the output of the ranks.
            handlers: The supervisor's handlers.

        Raises:
            OSError: The socket cannot be made, for example because it exists.
        """
        self._loop = loop
        self._output = output
        self._handlers = handlers
        self._all: list[Rank] = []
        self._watched: dict[int, Rank] = {}  # pidfd of a running rank -> the rank
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        runtime = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            # Through the descriptor, because a socket's address holds at most 107 bytes of path.
            self._server.bind(f"/proc/self/fd/{runtime}/{SOCKET}")
        finally:
            os.close(runtime)
        self._server.listen(_BACKLOG)
        loop.watch(self._server, READ, self._accept)

    @property
    def all(self) -> tuple[Rank, ...]:
        """All ranks that have reported, in order; a restarted rank has several entries."""
        return tuple(self._all)

    def running(self) -> tuple[int, ...]:
        """Return the process ids of the ranks that still run."""
        return tuple(rank.pid for rank in self._all if rank.is_running())

    def latest(self, number: int) -> Rank | None:
        """Return the last process with this global rank; None if none has reported."""
        return next((rank for rank in reversed(self._all) if rank.number == number), None)

    def take(self) -> None:
        """Read all that the ranks have written, so that their tails are complete."""
        self._output.take()

    def take_ends(self) -> None:
        """Note the ends of all ranks that have ended, and call ``handlers.ended`` for each.

        Ends that are seen together get the same time: their order is not known. Only ranks with a
        pidfd are noted (``_watch_end``). Does not wait.
        """
        # A pidfd can be read when its process has ended.
        poll = select.poll()
        for descriptor in self._watched:
            poll.register(descriptor, select.POLLIN)
        now = time.monotonic()
        ended = [(descriptor, self._watched.pop(descriptor)) for descriptor, _ in poll.poll(0)]
        # Note all ends before the first callback, which may compare them.
        for descriptor, rank in ended:
            self._loop.unwatch(descriptor)
            rank.end(processes.exit_status_of(rank.pid, rank.started, descriptor), now)
            os.close(descriptor)
        for _, rank in ended:
            self._handlers.ended(rank)

    def drain(self, seconds: float) -> None:
        """Wait, at most so many seconds, for the rest of the output of all ranks."""
        self._output.wait([rank.streams for rank in self._all if rank.streams is not None], seconds)

    def close(self) -> None:
        """Close the socket, and watch the ranks no more."""
        self._loop.unwatch(self._server)
        self._server.close()
        for descriptor in self._watched:
            self._loop.unwatch(descriptor)
            os.close(descriptor)
        self._watched.clear()

    def _accept(self, _: int) -> None:
        """Accept the connection of one rank, and read its report in the loop."""
        try:
            connection, _address = self._server.accept()
        except OSError:
            # The rank has ended.
            return
        connection.setblocking(False)
        self._loop.watch(connection, READ, lambda _: self._reported(connection))

    def _reported(self, connection: socket.socket) -> None:
        """Read the report of a rank, answer it, and call ``handlers.started``.

        The report is JSON with ``rank``, ``local_rank`` and ``errors``, and two descriptors: the
        read ends of the rank's output. They are copied from now on. The rank prints nothing before
        the answer, so no output is lost. A report in another form is dropped.
        """
        self._loop.unwatch(connection)
        with connection:
            received: list[int] = []
            try:
                data, ancillary, _flags, _address = connection.recvmsg(
                    _HEADER_BYTES, socket.CMSG_SPACE(_DESCRIPTORS_BYTES), socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, rights in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        whole_integers = rights[: len(rights) // _INT_BYTES * _INT_BYTES]
                        for (descriptor,) in struct.iter_unpack("i", whole_integers):
                            received.append(descriptor)
                header = mapping(decode(data.decode("utf-8")))
                credentials = connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS_BYTES
                )
            except (OSError, ValueError):
                header, credentials = {}, b""
            if not header or len(received) != 2:
                for descriptor in received:
                    os.close(descriptor)
                return
            # From the kernel, in numbers of this PID namespace.
            pid, _user, _group = struct.unpack(_CREDENTIALS, credentials)
            errors = text(header.get("errors"))
            rank = Rank(number(header.get("rank")), pid, number(header.get("local_rank")), errors)
            self._all.append(rank)
            out, error = received
            rank.streams = self._output.copy(
                out, error, rank.tail, self._handlers.prefix(rank.number)
            )
            self._watch_end(rank)
            with contextlib.suppress(OSError):
                connection.send(b"1")
        self._handlers.started(rank)

    def _watch_end(self, rank: Rank) -> None:
        """Notice the end of a rank in the loop, by a pidfd.

        Without a pidfd (an older kernel, or a rank that is gone) its end is seen from its starter.
        """
        try:
            descriptor = processes.open_pidfd(rank.pid)
        except OSError:
            return
        self._watched[descriptor] = rank
        self._loop.watch(descriptor, READ, lambda _: self.take_ends())
