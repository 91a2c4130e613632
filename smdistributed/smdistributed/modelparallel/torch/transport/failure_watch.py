"""How a job ends when one of its ranks fails: every rank ends, and the cause is printed once.

Every rank has a connection with rank 0, which passes news on. A rank that fails says so before it
ends; the connection of a rank that is killed ends without a farewell. The others print one line
that names the failed rank. A rank that sits in a collective or computes cannot raise: after `GRACE`
seconds its process ends with status 1. So does the rank that failed, if what runs at the end of its
process takes longer.

A rank that is in one call for long reports its calls to rank 0, which asks all others, and
compares: a call that other ranks do not make never ends (job/collective_calls.py).

A rank that ends well says farewell, and the others go on: rank 0 tells them that its script is
over. A collective that breaks then is no failure of the rank that waited in it. Rank 0 waits at its
end until all others have ended, as it also keeps the job's store.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from smdistributed.modelparallel.torch.job.collective_calls import (
    CollectiveCalls,
    Report,
    first_difference,
)

from .connect import exactly

GRACE = 3.0
"""Seconds in which a rank may end by its own exception before its process is ended."""

LOOK = 5.0
"""Seconds after which a rank that is still in the same call asks for the calls of the others."""

LONGEST_LOOK = 60.0
"""Seconds between two such questions at most: a step may be long."""

_SIZE = struct.Struct("<I")
_LONGEST = 1 << 16
_LONGEST_REASON = 2000


class Failure(NamedTuple):
    """The first failure of the job: the global rank that failed, and what happened, in one line."""

    rank: int
    reason: str


class Watch:
    """The watch of one rank.

    Attributes:
        failure: The first failure of another rank that is known, or None.
        over: The first rank of which it is known that its script is over, or None.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        name: Callable[[int], str],
        grace: float = GRACE,
        calls: CollectiveCalls | None = None,
    ) -> None:
        """Start to watch.

        Args:
            rank: Global rank of this process.
            connections: Rank 0: a socket for each other rank. The others: one socket, to rank 0.
            name: Words for a global rank.
            grace: Seconds between the news of a failure and the end of this process.
            calls: The calls of this rank; None: they are not compared.
        """
        self.rank, self.name, self.grace, self.calls = rank, name, grace, calls
        self._reports: dict[int, Report] = {}
        self._asked_at = -math.inf
        self._call_since, self._patience = 0.0, LOOK
        self.failure: Failure | None = None
        self.over: int | None = None
        self._failed = threading.Event()
        self._alone = threading.Event()
        self._known = False
        self._left = False
        self._own: str | None = None
        self._said = False
        self._lock = threading.Lock()
        self._sockets = dict(connections)
        if not self._sockets:
            self._alone.set()
        self._thread = threading.Thread(target=self._run, name="smp-watch", daemon=True)
        self._thread.start()

    def fail(self, reason: str, rank: int | None = None) -> None:
        """Tell all ranks, once, that this rank fails, or that it noticed the failure of another.

        The process ends after `grace` seconds, whatever waits then: a process group can wait for
        ranks that are gone.
        """
        if self._own is not None:
            return
        self._own = reason
        rank = self.rank if rank is None else rank
        self._tell({"failed": rank, "reason": reason[:_LONGEST_REASON]})
        late = (
            f"what runs at the end of its process had not ended {self.grace:g} s after its failure"
        )
        self._after_grace(late)

    @property
    def failed(self) -> bool:
        """Whether this rank, or another as far as is known, has failed."""
        return self._own is not None or self._known

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """Return the failure of another rank, for which up to some seconds are waited."""
        self._failed.wait(seconds)
        return self.failure

    def say(self, line: str) -> None:
        """Print why this rank ends, once."""
        with self._lock:
            if self._said:
                return
            self._said = True
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"smp: {self.name(self.rank)} ends: {line}\n")
            sys.stderr.flush()

    def leave(self) -> None:
        """Say farewell at the end of this process; rank 0 waits for the others.

        Ends the process with status 1 if another rank has failed.
        """
        if self._left:
            return
        self._left = True
        if self._own is None:
            if self.rank == 0:
                self._tell({"over": 0})
                self._alone.wait()
            if self.failure is not None:
                self._end(self.words(self.failure))
            self._tell({"farewell": self.rank})
        for connection in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(1)

    def words(self, failure: Failure) -> str:
        """Return a failure in one line."""
        return f"{self.name(failure.rank)} failed: {failure.reason}"

    def _tell(self, news: Mapping[str, Any], but: int | None = None) -> None:
        data = json.dumps(news).encode()
        for peer, connection in list(self._sockets.items()):
            if peer != but:
                with contextlib.suppress(OSError), self._lock:
                    connection.sendall(_SIZE.pack(len(data)) + data)

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        for other, connection in self._sockets.items():
            selector.register(connection, selectors.EVENT_READ, other)
        while selector.get_map():
            ready = selector.select(LOOK)
            if not ready:
                # Only ranks that have answered: others may be in code that holds their interpreter.
                self._compare_reports()
                self._look_at_own_call()
            for key, _ in ready:
                peer: int = key.data
                news = _receive(self._sockets[peer])
                if news is not None and "failed" in news:
                    self._note(int(news["failed"]), str(news["reason"]), peer)
                    continue
                if news is not None and "calls" in news:
                    if news["asks"]:
                        self._ask_all()
                    self._take_report(peer, Report.from_json(news["calls"]))
                    continue
                if news is not None and "over" in news:
                    self._note_end(int(news["over"]))
                    continue
                if news is not None and "report" in news:
                    self._report_calls(asks=False)
                    continue
                selector.unregister(key.fileobj)
                self._sockets.pop(peer)
                if news is not None and "farewell" in news:
                    self._note_end(peer)
                if news is None and not self._left and self._own is None:
                    self._note(peer, "it was killed, or its host or connection was lost", peer)
                if not self._sockets:
                    self._alone.set()
        selector.close()

    def _look_at_own_call(self) -> None:
        """Ask all ranks for their calls if this one stays in the same call:
        after LOOK, then after twice as long ...
        """
        since = None if self.calls is None else self.calls.since()
        if since is None or self.failed:
            return
        if since != self._call_since:
            self._call_since, self._patience = since, LOOK
        if time.monotonic() - since >= self._patience:
            self._patience = min(2 * self._patience, self._patience + LONGEST_LOOK)
            self._report_calls(asks=True)

    def _report_calls(self, *, asks: bool) -> None:
        """Tell rank 0 the calls of this rank; ``asks``: the others are to tell theirs, too."""
        if self.calls is None:
            return
        report = self.calls.report()
        if self.rank != 0:
            self._tell({"calls": report.as_json(), "asks": asks})
            return
        if asks:
            self._ask_all()
        self._take_report(0, report)

    def _ask_all(self) -> None:
        """On rank 0: ask every rank for its calls, unless they have just been asked."""
        now = time.monotonic()
        if self.calls is None or now - self._asked_at < LOOK:
            return
        self._asked_at = now
        self._reports = {0: self.calls.report()}
        self._tell({"report": True})

    def _take_report(self, rank: int, report: Report) -> None:
        """On rank 0: keep the report of a rank.

        When all have answered, end the job if two ranks cannot go on.
        """
        self._reports[rank] = report
        if self._reports.keys() >= {0, *self._sockets}:
            self._compare_reports()

    def _compare_reports(self) -> None:
        reports, self._reports = self._reports, {}
        difference = first_difference(reports)
        if difference is not None and not self.failed:
            self._note(difference.rank, difference.words, origin=0)

    def _note_end(self, rank: int) -> None:
        """Keep that the script of a rank is over; rank 0 tells the others."""
        if self.over is None:
            self.over = rank
        if self.rank == 0:
            self._tell({"over": rank}, but=rank)

    def _note(self, rank: int, reason: str, origin: int) -> None:
        if self.rank == 0:
            self._tell({"failed": rank, "reason": reason}, but=origin)
        if self._known or self._own is not None:
            return
        self._known = True
        failure = Failure(rank, reason)
        if rank != self.rank:
            self.failure = failure
            self._failed.set()
        # Else another rank noticed first that this one fails: what follows from
        # it is not the cause.
        self._alone.set()
        self._after_grace(self.words(failure))

    def _after_grace(self, line: str) -> None:
        ender = threading.Timer(self.grace, self._end, [line])
        ender.daemon = True
        ender.start()

    def _end(self, line: str) -> None:
        self.say(line)
        flusher = threading.Thread(target=_flush, daemon=True)
        flusher.start()
        flusher.join(1)  # the main thread may hold the lock of its output
        os._exit(1)


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    try:
        size = _SIZE.unpack(exactly(connection, _SIZE.size))[0]
        if size > _LONGEST:
            return None
        news = json.loads(exactly(connection, size))
    except (OSError, ValueError):
        return None
    return news if isinstance(news, dict) else None


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
