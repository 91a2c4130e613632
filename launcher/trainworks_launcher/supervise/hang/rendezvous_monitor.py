"""Watch whether the ranks of a job find each other: after a minute without that, the log has the
place of each rank.

torch repeats a failed connection for half an hour, and warns each second; the warnings are not
progress. The leader asks every host for the places of its ranks. While a rank is still looking for
the others, all places are logged, once. Then the leader asks again and again, until the ranks have
found each other. If the job ends before, its failure has the places.

The place of a rank is a sentence about the call in which the rank is. A rank searches while it
looks for the other ranks. The messages are about the start of the job, so the answer to ``start``
is called ``started``; it does not say that something has been started.

=======  =========  ==========================================================================
what     direction  fields
=======  =========  ==========================================================================
start    to host    the question
started  to leader  rows: the place of each rank; searching: whether a rank looks for others
=======  =========  ==========================================================================
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from typing import Iterable, Iterator, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.files import text_of
from trainworks_launcher.contract.json_values import Json, texts
from trainworks_launcher.supervise.control.messages import one_line
from trainworks_launcher.supervise.event_loop import READ, Loop
from trainworks_launcher.supervise.hang.connections import inodes_of
from trainworks_launcher.supervise.hang.detector import DetectorContext
from trainworks_launcher.supervise.hang.sampling import LONGEST_SECONDS, Root, Sampler
from trainworks_launcher.supervise.hang.stacks import Thread, main_thread

_MAX_SHOWN_RANKS = 8
"""Number of ranks whose places a message and a line of the log have."""

_MAX_SHOWN_ADDRESSES = 3
"""Number of addresses in the place of one rank."""

_LONGEST_ROW = 400
"""Characters of a rank's sentence from another host."""

_AGAIN_SECONDS = 15.0
"""Seconds between two questions while ranks search. The places at the end of the job are older than
this by the time of a sample at most.
"""

_SYN_SENT = "02"
"""State of a connection that has asked and has no answer. Source: Linux, net/tcp_states.h."""

# Places of columns in proc(5), net/tcp.
_TCP_REMOTE, _TCP_STATE, _TCP_INODE = 2, 3, 9

_RENDEZVOUS_FILES = re.compile(
    r"/torch/distributed/(rendezvous\.py|elastic/rendezvous/\w+\.py)$|/mpi4py/MPI\b"
)
_RENDEZVOUS_FUNCTIONS = ("init_process_group", "init_rpc", "initialize_runtime")
"""Functions in which a rank looks for the others, before its first collective."""


class RendezvousMonitor:
    """The monitor of one host, at the start of a job.

    Every method runs in the loop's thread; samples are taken in a thread of their own.

    Attributes:
        searching: Whether a rank of this host looked for the others in the last sample.
    """

    def __init__(
        self, loop: Loop, sampler: Sampler, context: DetectorContext, started: float
    ) -> None:
        """Take no sample before ``ask``, or a question of the leader.

        Args:
            loop: The loop of the run.
            sampler: Takes the samples.
            context: The host and the job.
            started: Start of the program (monotonic clock).
        """
        self._loop = loop
        self._sampler = sampler
        self._context = context
        self._started = started
        self._is_ended = False  # the job ends: ``end`` was called
        self.searching = False
        # Of the leader: the answers to its last question, by host.
        self._rows_by_host: dict[str, Sequence[str]] = {}
        self._some_search = False  # a rank in these answers searches
        self._is_question_open = False
        self._is_logged = False  # the one line of the log has been written
        self._turn = 0  # number of the last question
        self._last_words = ""

    @property
    def last_words(self) -> str:
        """The sentence about ranks that had not found each other, as of the last look; leader only.

        ``""`` if they had, or if no look has come yet.
        """
        return self._last_words

    def end(self) -> None:
        """Take no more samples and ask nothing more: the job ends."""
        self._is_ended = True

    def ask(self) -> None:
        """Ask every host for the places of its ranks, on the leader; do nothing after ``end``.

        Sends the question, starts a sample of this host, and sets a limit of time for the answers.
        Returns at once. If a rank still searches then, the places are logged, the first time only,
        and the hosts are asked again after ``_AGAIN_SECONDS``.
        """
        if self._is_ended:
            return
        self._is_question_open = True
        self._rows_by_host.clear()
        self._some_search = False
        self._turn += 1
        turn = self._turn
        self._context.tell({"what": "start"})
        self._take_sample()
        self._loop.after(LONGEST_SECONDS, lambda: self._conclude(turn))

    def receive(self, host: str, message: Mapping[str, Json]) -> None:
        """Handle the leader's question, or on the leader a host's answer.

        Args:
            host: The sender.
            message: With ``what``: ``start`` (the question), or ``started`` with ``rows`` and
                ``searching``.
        """
        if self._is_ended:
            return
        if message.get("what") == "start" and not self._context.leader:
            self._take_sample()
        elif message.get("what") == "started" and self._context.leader:
            rows = [one_line(row, _LONGEST_ROW) for row in texts(message.get("rows"))]
            self._note_answer(host, rows, message.get("searching") is True)

    # --- this host --------------------------------------------------------------------------------
    def _take_sample(self) -> None:
        """Sample the ranks of this host in a thread, and send the leader their places.

        Returns at once; the loop calls ``answer`` when the thread ends. ``answer`` sets
        ``searching``: whether a rank of this host looks for the others. Then it hands the places
        (a sentence about each rank) to the leader: on another host as a message ``started``, which
        answers the leader's ``start``. After ``end`` nothing is handed on. If the sample fails, or
        if no thread can be started, the answer has no places and ``searching`` is false.

        Raises OSError if no pipe can be made.
        """
        roots = self._context.roots()
        host = self._context.host
        reader, writer = os.pipe()
        results: list[Places] = []

        # In the thread.
        def take() -> None:
            try:
                results.append(places_of(roots, host, self._sampler))
            finally:
                # The reader's end becomes readable, which wakes the loop.
                os.close(writer)

        # In the loop's thread.
        def answer(_: int) -> None:
            self._loop.unwatch(reader)
            os.close(reader)
            places = Places([], False)
            if results:
                places = results[0]
            self.searching = places.searching
            # The job may have ended since the thread was started.
            if self._is_ended:
                return
            if self._context.leader:
                self._note_answer(self._context.member, places.rows, self.searching)
            else:
                rows: list[Json] = [*places.rows[:_MAX_SHOWN_RANKS]]
                self._context.tell({"what": "started", "rows": rows, "searching": self.searching})

        self._loop.watch(reader, READ, answer)
        thread = threading.Thread(target=take, name="trainworks-start", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # This host can start no further thread: it answers without places. The closed pipe
            # makes the loop call ``answer``.
            os.close(writer)

    # --- the leader -------------------------------------------------------------------------------
    def _note_answer(self, host: str, rows: Sequence[str], searching: bool) -> None:
        """Keep the answer of a host, also of this one; conclude when all have answered.

        Args:
            host: The host.
            rows: A sentence for each of its ranks.
            searching: Whether one of them still looks for the others.
        """
        self._rows_by_host[host] = rows
        self._some_search |= searching
        if set(self._rows_by_host) >= self._members():
            self._conclude(self._turn)

    def _members(self) -> set[str]:
        """Return all launchers that the job still has, with this one."""
        return {self._context.member, *self._context.others()}

    def _conclude(self, turn: int) -> None:
        """Log the places of the ranks and plan the next question, if a rank still searches.

        Sets ``last_words``; clears them if no rank searches. Called when all hosts have answered,
        or when their time is over: a later answer counts for the next question. Does nothing after
        ``end``.

        Args:
            turn: Number of the question; one that is over is ignored.
        """
        if self._is_ended or not self._is_question_open or turn != self._turn:
            return
        self._is_question_open = False
        self._last_words = ""
        if not self._some_search:
            return
        silent = sorted(self._members() - set(self._rows_by_host))
        rows: list[str] = []
        for host_rows in self._rows_by_host.values():
            rows += host_rows
        rows += [f"{host} did not answer" for host in silent]
        places = "; ".join(rows[:_MAX_SHOWN_RANKS])
        if len(rows) > _MAX_SHOWN_RANKS:
            places += f"; and {len(rows) - _MAX_SHOWN_RANKS} more"
        seconds = time.monotonic() - self._started
        self._last_words = (
            f"{seconds:.0f} s after the start the ranks had not found each other: {places}"
        )
        if not self._is_logged:
            self._is_logged = True
            after = f"{names.START_LOOK_SECONDS:g} s after the start"
            self._context.log(f"warning: {after} the ranks have not found each other: {places}")
        self._loop.after(_AGAIN_SECONDS, self.ask)


class Places(NamedTuple):
    """The places of a host's ranks.

    Attributes:
        rows: A sentence for each rank.
        searching: Whether a rank still looks for the others.
    """

    rows: Sequence[str]
    searching: bool


def places_of(roots: Sequence[Root], host: str, sampler: Sampler) -> Places:
    """Take a sample, and describe the places of the ranks of this host.

    Args:
        roots: The ranks.
        host: Name of this host for people.
        sampler: Takes the sample.

    Returns:
        The sentences, for example ``rank 3 on algo-1 waits in init_process_group (train.py:12)``.
    """
    sample = sampler.sample(roots)
    sentences: list[str] = []
    searching = False
    # A row is what a rank does; ``words`` makes the end of a sentence of it.
    for root, row in zip(roots, sampler.rows(roots, host, sample, {})):
        pids = sampler.descendants(root)
        # A connection that is not answered is a search, too: of a library that is not known here.
        addresses = sorted(set(connecting(pids)))
        if addresses:
            searching = True
        for pid in pids:
            process = sample.processes.get(pid)
            if process is not None and looks_for_others(process.stack):
                searching = True
        name = f"rank {root.rank}" if root.rank >= 0 else "the program"
        sentence = f"{name} on {host} {row.words()}"
        if addresses:
            shown = ", ".join(addresses[:_MAX_SHOWN_ADDRESSES])
            sentence += f" and connects to {shown}, which does not answer"
        sentences.append(sentence)
    return Places(sentences, searching)


def looks_for_others(threads: Sequence[Thread]) -> bool:
    """Return whether the main thread is in the rendezvous of a distributed library.

    False without threads: nothing is known then.
    """
    main = main_thread(threads)
    if main is None:
        return False
    for frame in main.frames:
        if frame.name in _RENDEZVOUS_FUNCTIONS or _RENDEZVOUS_FILES.search(frame.file):
            return True
    return False


def connecting(pids: Iterable[int]) -> Iterator[str]:
    """Yield the address of each TCP connection that is not answered yet (proc(5), net/tcp).

    For example ``10.0.0.1 port 29500``. Nothing for processes that are gone, and for tables of the
    kernel that cannot be read.

    Args:
        pids: Processes that hold the connections.
    """
    inodes = {inode for pid in pids for inode in inodes_of(pid)}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in text_of(f"/proc/self/net/{name}").splitlines()[1:]:
            with contextlib.suppress(ValueError, IndexError):
                # The columns: number, local address, remote address, state, ..., inode is the 10th.
                fields = line.split()
                if fields[_TCP_STATE] == _SYN_SENT and int(fields[_TCP_INODE]) in inodes:
                    address, _, port = fields[_TCP_REMOTE].partition(":")
                    yield f"{_parse_address(address, family)} port {int(port, 16)}"


def _parse_address(digits: str, family: int) -> str:
    """Parse an address of proc(5), net/tcp.

    The kernel writes words of four bytes, in the machine's order, as hexadecimal digits.

    >>> _parse_address("0100007F", socket.AF_INET)
    '127.0.0.1'
    """
    words = b""
    for start in range(0, len(digits), 8):
        # Reversed: the machines of all images are little-endian.
        words += bytes.fromhex(digits[start : start + 8])[::-1]
    address = socket.inet_ntop(family, words)
    # An IPv4 address on a socket for IPv6.
    if address.startswith("::ffff:"):
        return address[len("::ffff:") :]
    return address
