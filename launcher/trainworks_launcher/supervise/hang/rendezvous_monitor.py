"""Watch whether the ranks of a job find each other: after a minute without that, the log has the
place of each rank.

torch repeats a failed connection for half an hour, and warns each second; the warnings are not
progress. The leader asks every host for the places of its ranks. While a rank is still looking for
the others, all places are logged, once. Then the leader asks again and again, until the ranks have
found each other. If the job ends before, its failure has the places.

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

_SHOWN = 8
_LONGEST = 400
_AGAIN_SECONDS = 15.0
"""Between two questions while ranks search. The places at the end of the job are older than this by
the time of a sample at most.
"""

_SYN_SENT = "02"  # Linux, include/net/tcp_states.h

_RENDEZVOUS = re.compile(
    r"/torch/distributed/(rendezvous\.py|elastic/rendezvous/\w+\.py)$|/mpi4py/MPI\b"
)
_JOINS = ("init_process_group", "init_rpc", "initialize_runtime")
"""Files and functions in which a rank looks for the others, before its first collective."""


class RendezvousMonitor:
    """The monitor of one host, at the start of a job.

    Every method runs in the loop's thread; samples are taken in a thread of their own.

    Attributes:
        searching: Whether a rank of this host looked for the others in the last sample.
    """

    def __init__(
        self, loop: Loop, sampler: Sampler, context: DetectorContext, started: float
    ) -> None:
        """Take no sample before ``ask``. started: start of the program (monotonic clock)."""
        self._loop = loop
        self._sampler = sampler
        self._context = context
        self._started = started
        self._lines: dict[str, Sequence[str]] = {}
        self._some_search = False
        self._is_question_open = False
        self._over = False
        self._is_logged = False
        self._turn = 0
        self._last_words = ""
        self.searching = False

    @property
    def last_words(self) -> str:
        """The sentence about ranks that had not found each other, as of the last look; leader only.

        ``""`` if they had, or if no look has come yet.
        """
        return self._last_words

    def end(self) -> None:
        """Stop: the job ends."""
        self._over = True

    def ask(self) -> None:
        """Ask every host for the places of its ranks, on the leader."""
        if self._over:
            return
        self._is_question_open = True
        self._lines.clear()
        self._some_search = False
        self._turn += 1
        turn = self._turn
        self._context.tell({"what": "start"})
        self._take_sample()
        self._loop.after(LONGEST_SECONDS, lambda: self._conclude(turn))

    def receive(self, host: str, message: Mapping[str, Json]) -> None:
        """Handle the leader's question, or a host's answer."""
        if self._over:
            return
        if message.get("what") == "start" and not self._context.leader:
            self._take_sample()
        elif message.get("what") == "started" and self._context.leader:
            rows = [one_line(row, _LONGEST) for row in texts(message.get("rows"))]
            self._note_answer(host, rows, message.get("searching") is True)

    # --- this host --------------------------------------------------------------------------------
    def _take_sample(self) -> None:
        roots = self._context.roots()
        host = self._context.host
        reader, writer = os.pipe()
        results: list[Places] = []

        def take() -> None:
            try:
                results.append(places_of(roots, host, self._sampler))
            finally:
                os.close(writer)

        def taken(_: int) -> None:
            self._loop.unwatch(reader)
            os.close(reader)
            # The thread has failed if there is no result.
            places = results[0] if results else Places([], False)
            self.searching = places.searching
            if self._over:
                return
            if self._context.leader:
                self._note_answer(self._context.member, places.rows, self.searching)
            else:
                rows: list[Json] = [*places.rows[:_SHOWN]]
                self._context.tell({"what": "started", "rows": rows, "searching": self.searching})

        self._loop.watch(reader, READ, taken)
        thread = threading.Thread(target=take, name="trainworks-start", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this host can start no further thread
            os.close(writer)

    # --- the leader -------------------------------------------------------------------------------
    def _note_answer(self, host: str, rows: Sequence[str], searching: bool) -> None:
        self._lines[host] = rows
        self._some_search |= searching
        if set(self._lines) >= {self._context.member, *self._context.others()}:
            self._conclude(self._turn)

    def _conclude(self, turn: int) -> None:
        """Log the places of the ranks, when all hosts have answered or their time is over.

        A later answer counts for the next question.

        Args:
            turn: Number of the question.
        """
        if self._over or not self._is_question_open or turn != self._turn:
            return
        self._is_question_open = False
        self._last_words = ""
        if not self._some_search:
            return
        silent = sorted({self._context.member, *self._context.others()} - set(self._lines))
        rows: list[str] = []
        for host_rows in self._lines.values():
            rows += host_rows
        rows += [f"{host} did not answer" for host in silent]
        places = "; ".join(rows[:_SHOWN])
        if len(rows) > _SHOWN:
            places += f"; and {len(rows) - _SHOWN} more"
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
    """Take a sample, and describe the places of the ranks of this host."""
    sample = sampler.sample(roots)
    sentences, searching = [], False
    for root, row in zip(roots, sampler.rows(roots, host, sample, {})):
        pids = sampler.descendants(root)
        stacks = [sample.processes[pid].stack for pid in pids if pid in sample.processes]
        addresses = sorted(set(connecting(pids)))
        searching |= bool(addresses) or any(looks_for_others(stack) for stack in stacks)
        name = f"rank {root.rank}" if root.rank >= 0 else "the program"
        sentence = f"{name} on {host} {row.words()}"
        if addresses:
            tried = ", ".join(addresses[:3])
            sentence += f" and connects to {tried}, which does not answer"
        sentences.append(sentence)
    return Places(sentences, searching)


def looks_for_others(threads: Sequence[Thread]) -> bool:
    """Return whether the main thread is in the rendezvous of a distributed library."""
    main = main_thread(threads)
    if main is None:
        return False
    return any(frame.name in _JOINS or _RENDEZVOUS.search(frame.file) for frame in main.frames)


def connecting(pids: Iterable[int]) -> Iterator[str]:
    """Yield the address of each TCP connection that is not answered yet (proc(5), net/tcp).

    For example ``10.0.0.1 port 29500``.

    Args:
        pids: Processes that hold the connections.
    """
    inodes = {inode for pid in pids for inode in inodes_of(pid)}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in text_of(f"/proc/self/net/{name}").splitlines()[1:]:
            with contextlib.suppress(ValueError, IndexError):
                fields = line.split()
                if fields[3] == _SYN_SENT and int(fields[9]) in inodes:
                    address, _, port = fields[2].partition(":")
                    yield f"{_address(address, family)} port {int(port, 16)}"


def _address(digits: str, family: int) -> str:
    """Return an address of proc(5), net/tcp.

    The kernel writes words of four bytes, in the machine's order, as hexadecimal digits: for
    example ``0100007F`` for 127.0.0.1.
    """
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    address = socket.inet_ntop(family, b"".join(words))
    if address.startswith("::ffff:"):  # IPv4 in IPv6
        return address[len("::ffff:") :]
    return address
