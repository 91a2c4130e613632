"""The ranks of this host: each reports when it starts.

The launcher handles its output, its signals and its end.

``rank.py`` connects to a socket in the runtime directory (mode 0700: no other user reaches it) and
hands over the read ends of its standard output and error. So the output of a rank comes straight to
the launcher of its own host, whatever started it; its process id is the kernel's word
(SO_PEERCRED), and signals can go to the rank itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Callable

from trainworks_launcher.contract.json_values import decode, mapping, number, text
from trainworks_launcher.supervise.event_loop import READ, Loop
from trainworks_launcher.supervise.processes import processes
from trainworks_launcher.supervise.processes.output import Output, Stream, Tail

SOCKET = "ranks"
"""Name of the socket in the runtime directory."""

_HEADER_BYTES = 4096
_ERROR_BYTES = 1 << 20


class Rank:
    """One rank of this host. number: its global rank, local: its number on this host, -1 if it did
    not say. status: its exit status (negative after a signal), None as long as it is not known.
    began, ended_at: when its start and its end were seen (monotonic clock), 0.0 while it runs.
    error: what torch has written to the rank's error file, once it has ended.
    """

    def __init__(self, number: int, pid: int, local: int = -1, errors: str = "") -> None:
        """A process that runs. errors: its error file, which torchrun names and removes.

        "" for none.
        """
        self.number = number
        self.local = local
        self.pid = pid
        self.started = processes.stat(pid)[1]
        self.tail = Tail()
        self.status: int | None = None
        self.began = time.monotonic()
        self.ended_at = 0.0
        self.error = b""
        self._errors = errors
        self.streams: tuple[Stream, Stream] | None = None

    def end(self, status: int | None, at: float) -> None:
        """Its end was seen. status: negative after a signal, None if it is not known. at: when."""
        self.status = status
        self.ended_at = at
        if self._errors and status != 0:
            with contextlib.suppress(OSError), open(self._errors, "rb") as opened:  # noqa: PTH123
                self.error = opened.read(_ERROR_BYTES)

    def is_running(self) -> bool:
        """Return whether the process is there, and is still the one that reported."""
        return not self.ended_at and processes.stat(self.pid)[1] == self.started != ""


class Ranks:
    """Listens for the ranks of one host. Every method runs in the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        directory: Path,
        output: Output,
        prefix: Callable[[int], bytes | None],
        on_start: Callable[[Rank], None],
        on_end: Callable[[Rank], None],
    ) -> None:
        """Listen in ``directory``. prefix: of the lines of a rank, None for output as it is.
        on_start, on_end: called for each rank; an end is seen at once where the kernel has
        pidfd_open (Linux 5.3), else never.
        """
        self._loop = loop
        self._output = output
        self._prefix = prefix
        self._on_start = on_start
        self._on_end = on_end
        self._all: list[Rank] = []
        self._watched: dict[int, Rank] = {}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            # By way of the descriptor: a path of more than 107 bytes does not
            # fit into a socket's address.
            self._server.bind(f"/proc/self/fd/{place}/{SOCKET}")
        finally:
            os.close(place)
        self._server.listen(512)
        loop.watch(self._server, READ, self._accept)

    @property
    def all(self) -> tuple[Rank, ...]:
        """Every rank that ever reported, in order; after a restart a number comes again."""
        return tuple(self._all)

    def running(self) -> tuple[int, ...]:
        """Process ids of the ranks that still run."""
        return tuple(rank.pid for rank in self._all if rank.is_running())

    def latest(self, number: int) -> Rank | None:
        """Return the process that had this rank last."""
        return next((rank for rank in reversed(self._all) if rank.number == number), None)

    def take(self) -> None:
        """Read what the ranks have written until now, so that their tails have it."""
        self._output.take()

    def take_ends(self) -> None:
        """Note every end there is.

        Those that are seen at one look have one time: which came first is not known.
        """
        poll = select.poll()
        for descriptor in self._watched:
            poll.register(descriptor, select.POLLIN)
        now = time.monotonic()
        ended = [(descriptor, self._watched.pop(descriptor)) for descriptor, _ in poll.poll(0)]
        for descriptor, rank in ended:
            self._loop.unwatch(descriptor)
            rank.end(processes.exit_status_of(rank.pid, rank.started, descriptor), now)
            os.close(descriptor)
        for _, rank in ended:
            self._on_end(rank)

    def drain(self, seconds: float) -> None:
        """Wait, bounded, for the rest of the output of all ranks."""
        self._output.wait([rank.streams for rank in self._all if rank.streams is not None], seconds)

    def close(self) -> None:
        """Listen no more."""
        self._loop.unwatch(self._server)
        self._server.close()
        for descriptor in self._watched:
            self._loop.unwatch(descriptor)
            os.close(descriptor)
        self._watched.clear()

    def _accept(self, _: int) -> None:
        try:
            connection, _address = self._server.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._loop.watch(connection, READ, lambda _: self._reported(connection))

    def _reported(self, connection: socket.socket) -> None:
        """A rank says who it is.

        It waits for our answer, so that nothing is printed before we can read it.
        """
        self._loop.unwatch(connection)
        with connection:
            received: list[int] = []
            try:
                data, ancillary, _flags, _address = connection.recvmsg(
                    _HEADER_BYTES, socket.CMSG_SPACE(8), socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, rights in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        received += [
                            entry[0]
                            for entry in struct.iter_unpack("i", rights[: len(rights) // 4 * 4])
                        ]
                header = mapping(decode(data.decode("utf-8")))
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            except (OSError, ValueError):
                header, credentials = {}, b""
            if not header or len(received) != 2:
                for descriptor in received:
                    os.close(descriptor)
                return
            # The kernel's word, as this PID namespace has it.
            pid = struct.unpack("3i", credentials)[0]
            errors = text(header.get("errors"))
            rank = Rank(number(header.get("rank")), pid, number(header.get("local_rank")), errors)
            self._all.append(rank)
            rank.streams = self._output.copy(
                received[0], received[1], rank.tail, self._prefix(rank.number)
            )
            self._watch_end(rank)
            with contextlib.suppress(OSError):
                connection.send(b"1")
        self._on_start(rank)

    def _watch_end(self, rank: Rank) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(rank.pid)
        except OSError:
            return
        self._watched[descriptor] = rank
        self._loop.watch(descriptor, READ, lambda _: self.take_ends())
