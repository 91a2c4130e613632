"""A job whose ranks do not find each other: after a minute the log says what
each of them waits for.

torch repeats a failed connection for half an hour, and warns each second; the warnings are not
progress. The leader asks every host where its ranks are. Where one of them is still looking for the
others, all places are told, once. From then on it asks again and again, until they have found each
other; if the job ends before, its failure has the places.

=======  =========  ==========================================================================
what     direction  fields
=======  =========  ==========================================================================
start    to host    the question
started  to leader  rows: where each rank is; searching: whether one looks for the others still
=======  =========  ==========================================================================
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from typing import Iterable, Iterator, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.files import text_of
from trainworks_launcher.contract.json_values import Json, texts
from trainworks_launcher.supervise.control.messages import one_line
from trainworks_launcher.supervise.event_loop import READ, Loop
from trainworks_launcher.supervise.hang.connections import inodes_of
from trainworks_launcher.supervise.hang.detector import Surroundings
from trainworks_launcher.supervise.hang.sampling import LONGEST_SECONDS, Eyes, Root
from trainworks_launcher.supervise.hang.stacks import Thread, main_thread

_SHOWN = 8
_LONGEST = 400
_AGAIN_SECONDS = 15.0
"""Between two looks at ranks that search: what is said at the end is so old at
most, but for the look itself.
"""

_SYN_SENT = "02"  # Linux, include/net/tcp_states.h

_RENDEZVOUS = re.compile(
    r"/torch/distributed/(rendezvous\.py|elastic/rendezvous/\w+\.py)$|/mpi4py/MPI\b"
)
_JOINS = ("init_process_group", "init_rpc", "initialize_runtime")
"""Files and functions in which a rank looks for the others, before its first collective."""


class Start:
    """The look at the start of a job.

    Every method runs in the loop's thread; looks are in a thread of their own.

    Attributes:
        searching: Whether a rank of this host looked for the others at the last look.
    """

    def __init__(self, loop: Loop, eyes: Eyes, around: Surroundings, started: float) -> None:
        """Nothing is looked at before ``ask``.

        started: when the program was started (monotonic clock).
        """
        self._loop = loop
        self._eyes = eyes
        self._around = around
        self._started = started
        self._lines: dict[str, Sequence[str]] = {}
        self._some_search = False
        self._asked = False
        self._over = False
        self._was_said = False
        self._turn = 0
        self._last_words = ""
        self.searching = False

    @property
    def last_words(self) -> str:
        """Where the ranks were that have not found each other, on the leader.

        ``""``: they have, or were not asked.
        """
        return self._last_words

    def end(self) -> None:
        """The job ends: look no more."""
        self._over = True

    def ask(self) -> None:
        """Ask every host, on the leader."""
        if self._over:
            return
        self._asked = True
        self._lines.clear()
        self._some_search = False
        self._turn += 1
        turn = self._turn
        self._around.tell({"what": "start"})
        self._look()
        self._loop.after(LONGEST_SECONDS, lambda: self._say(turn))

    def told(self, host: str, message: Mapping[str, Json]) -> None:
        """Take the leader's question, or a host's answer."""
        if self._over:
            return
        if message.get("what") == "start" and not self._around.leader:
            self._look()
        elif message.get("what") == "started" and self._around.leader:
            rows = [one_line(row, _LONGEST) for row in texts(message.get("rows"))]
            self._answered(host, rows, message.get("searching") is True)

    # --- this host --------------------------------------------------------------------------------
    def _look(self) -> None:
        roots = self._around.roots()
        host = self._around.host
        reader, writer = os.pipe()
        found: list[tuple[list[str], bool]] = []

        def look() -> None:
            try:
                found.append(places_of(roots, host, self._eyes))
            finally:
                os.close(writer)

        def looked(_: int) -> None:
            self._loop.unwatch(reader)
            os.close(reader)
            rows, self.searching = found[0] if found else ([], False)
            if self._over:
                return
            if self._around.leader:
                self._answered(self._around.member, rows, self.searching)
            else:
                self._around.tell(
                    {"what": "started", "rows": [*rows[:_SHOWN]], "searching": self.searching}
                )

        self._loop.watch(reader, READ, looked)
        thread = threading.Thread(target=look, name="trainworks-start", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no further thread may be started on this host
            os.close(writer)

    # --- the leader -------------------------------------------------------------------------------
    def _answered(self, host: str, rows: Sequence[str], searching: bool) -> None:
        self._lines[host] = rows
        self._some_search |= searching
        if set(self._lines) >= {self._around.member, *self._around.others()}:
            self._say(self._turn)

    def _say(self, turn: int) -> None:
        """Say where the ranks are, once all hosts have answered or have had the
        time to. turn: the question's number.

        What one host does not answer in time it answers to the next question.
        """
        if self._over or not self._asked or turn != self._turn:
            return
        self._asked = False
        self._last_words = ""
        if not self._some_search:
            return
        silent = sorted({self._around.member, *self._around.others()} - set(self._lines))
        rows = [row for host_rows in self._lines.values() for row in host_rows]
        rows += [f"{host} did not answer" for host in silent]
        more = f"; and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        seconds = time.monotonic() - self._started
        places = f"{'; '.join(rows[:_SHOWN])}{more}"
        self._last_words = (
            f"{seconds:.0f} s after the start the ranks had not found each other: {places}"
        )
        if not self._was_said:
            self._was_said = True
            after = f"{names.START_LOOK_SECONDS:g} s after the start"
            self._around.log(f"warning: {after} the ranks have not found each other: {places}")
        self._loop.after(_AGAIN_SECONDS, self.ask)


def places_of(roots: Sequence[Root], host: str, eyes: Eyes) -> tuple[list[str], bool]:
    """Return where the ranks of this host are, a sentence each, and whether one
    still looks for the others.
    """
    seen = eyes.look(roots)
    rows, searching = [], False
    for root, row in zip(roots, eyes.rows(roots, host, seen, {})):
        below = eyes.below(root)
        stacks = [seen.processes[pid].stack for pid in below if pid in seen.processes]
        tried = sorted(set(connecting(below)))
        searching |= bool(tried) or any(looks_for_others(stack) for stack in stacks)
        who = f"rank {root.rank} on {host}" if root.rank >= 0 else f"the program on {host}"
        to = f" and connects to {', '.join(tried[:3])}, which does not answer" if tried else ""
        rows.append(f"{who} {row.words()}{to}")
    return rows, searching


def looks_for_others(threads: Sequence[Thread]) -> bool:
    """Return whether the main thread is in the rendezvous of a distributed library."""
    main = main_thread(threads)
    frames = main.frames if main is not None else ()
    return any(frame.name in _JOINS or _RENDEZVOUS.search(frame.file) for frame in frames)


def connecting(pids: Iterable[int]) -> Iterator[str]:
    """Yield ``ADDRESS port PORT`` of each TCP connection that one of the
    processes waits for (proc(5), net/tcp).
    """
    held = {inode for pid in pids for inode in inodes_of(pid)}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in text_of(f"/proc/self/net/{name}").splitlines()[1:]:
            with contextlib.suppress(ValueError, IndexError):
                fields = line.split()
                if fields[3] == _SYN_SENT and int(fields[9]) in held:
                    address, _, port = fields[2].partition(":")
                    yield f"{_address(address, family)} port {int(port, 16)}"


def _address(digits: str, family: int) -> str:
    """Return an address of proc(5), net/tcp: words of four bytes in the
    machine's order, as hexadecimal digits.
    """
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    shown = socket.inet_ntop(family, b"".join(words))
    return shown[len("::ffff:") :] if shown.startswith("::ffff:") else shown
