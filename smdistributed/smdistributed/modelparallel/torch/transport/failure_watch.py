"""End a job when one of its ranks fails: every rank ends, and the cause is printed once.

Every rank has a connection with rank 0, which passes messages on. A rank that fails sends a message
before it ends. The connection of a rank that is killed ends without a farewell. The other ranks
print one line that names the failed rank. A rank in a collective, or in a computation, cannot
raise an error: after `GRACE` seconds its process ends with status 1. The failed rank ends in the
same way, if its exit functions take longer.

A rank that stays in one call reports its calls to rank 0. Rank 0 asks all other ranks for theirs,
and compares them: a call that other ranks do not make never ends (job/collective_calls.py).

A rank that ends well sends a farewell, and the other ranks go on: rank 0 tells them that its script
is over. If a collective breaks after that, the rank that waited in it is not the cause. Rank 0
waits at its end until all others have ended, because its process has the job's store.
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

LOOK_SECONDS = 5.0
"""Seconds after which a rank that is still in the same call asks for the calls of the others."""

LONGEST_LOOK_SECONDS = 60.0
"""Longest time in seconds between two such requests, because a step may be long."""

_SIZE = struct.Struct("<I")
"""The size of a message in bytes, which stands before it."""

_LONGEST_MESSAGE = 1 << 16
"""Largest size of a message in bytes. A longer one is not from a rank of this job."""

_LONGEST_REASON = 2000
"""Characters of a cause that are sent."""

_FLUSH_SECONDS = 1.0
"""Seconds that the end of the process waits for its output to be written."""


class Failure(NamedTuple):
    """The first failure of the job.

    Attributes:
        rank: Global rank that failed.
        reason: The cause, in one line.
    """

    rank: int
    reason: str


class Watch:
    """The watch of one rank: a thread that reads the messages of other ranks.

    A message is a JSON object with one of these keys: "failed" (a rank, with the "reason"), "over"
    (a rank with a script that is over), "farewell" (the rank that ends), "calls" (a report, with
    "asks": whether others shall report, too) and "report" (a request for a report).

    Attributes:
        failure: The first failure of another rank that this rank has heard of, or None.
        over: The first rank with a script that is over, as far as this rank has heard, or None.
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

        A daemon thread is started. The watch shuts the sockets down when it leaves.

        Args:
            rank: Global rank of this process.
            connections: Global rank -> socket: on rank 0 for each other rank, on the others for
                rank 0.
            name: Returns words for a global rank.
            grace: Seconds between the message of a failure and the end of this process.
            calls: The calls of this rank; None: calls are not compared.
        """
        self.rank, self.name, self.grace, self.calls = rank, name, grace, calls
        self._reports: dict[int, Report] = {}
        self._requested_at = -math.inf  # time of the last request for reports
        self._call_since, self._patience = 0.0, LOOK_SECONDS
        self.failure: Failure | None = None
        self.over: int | None = None
        self._has_failure = threading.Event()  # `failure` is set
        self._may_end = threading.Event()  # on rank 0: no other rank is left, or the job fails
        self._has_heard_failure = False
        self._has_left = False
        self._own_failure: str | None = None
        self._has_printed = False
        self._lock = threading.Lock()
        self._sockets = dict(connections)
        if not self._sockets:
            self._may_end.set()
        self._thread = threading.Thread(target=self._run, name="smp-watch", daemon=True)
        self._thread.start()

    def fail(self, reason: str, rank: int | None = None) -> None:
        """Tell all ranks, once, that this rank or another one fails.

        The process ends after `grace` seconds in any case, because a process group may wait for
        ranks that are gone.

        Later calls do nothing. A peer that is gone is passed over.

        Args:
            reason: The cause, in one line.
            rank: Global rank that failed; None: this rank.
        """
        if self._own_failure is not None:
            return  # told already
        self._own_failure = reason
        rank = self.rank if rank is None else rank
        self._send_to_peers({"failed": rank, "reason": reason[:_LONGEST_REASON]})
        late = (
            f"what runs at the end of its process had not ended {self.grace:g} s after its failure"
        )
        self._after_grace(late)

    @property
    def failed(self) -> bool:
        """Whether this rank has failed, or has heard of a failure."""
        return self._own_failure is not None or self._has_heard_failure

    def wait_for_failure(self, seconds: float) -> Failure | None:
        """Wait for the failure of another rank, and return it.

        Args:
            seconds: The longest wait. None is returned after it.

        Returns:
            The failure, or None if there is none after that time.
        """
        self._has_failure.wait(seconds)
        return self.failure

    def say(self, line: str) -> None:
        """Print the reason for which this rank ends to standard error, once in this process.

        An output that is closed is passed over.

        Args:
            line: The reason, in one line.
        """
        with self._lock:
            if self._has_printed:
                return
            self._has_printed = True
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"smp: {self.name(self.rank)} ends: {line}\n")
            sys.stderr.flush()

    def leave(self) -> None:
        """Send a farewell at the end of this process, and end all connections.

        Rank 0 waits for the others first, without limit: its process has the job's store. The
        process ends with status 1 if another rank has failed.

        A second call does nothing. The thread of the watch is waited for at most a second.
        """
        if self._has_left:
            return
        self._has_left = True
        if self._own_failure is None:
            if self.rank == 0:
                self._send_to_peers({"over": 0})
                self._may_end.wait()
            if self.failure is not None:
                self._end_process(self.words(self.failure))
            self._send_to_peers({"farewell": self.rank})
        for connection in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(1)

    def words(self, failure: Failure) -> str:
        """Return a failure in one line."""
        return f"{self.name(failure.rank)} failed: {failure.reason}"

    def _send_to_peers(self, message: Mapping[str, Any], except_peer: int | None = None) -> None:
        """Send a message to rank 0; on rank 0 to all other ranks but one.

        A peer that is gone is passed over.

        Args:
            message: What JSON can write.
            except_peer: Global rank that does not get the message; None: all get it.

        Raises:
            TypeError: JSON cannot write the message.
        """
        data = json.dumps(message).encode()
        for peer, connection in list(self._sockets.items()):
            if peer != except_peer:
                # Several threads send: one message must not be cut by another.
                with contextlib.suppress(OSError), self._lock:
                    connection.sendall(_SIZE.pack(len(data)) + data)

    def _run(self) -> None:
        """Read messages until all connections have ended. The body of the watch's thread.

        A connection that ends without a farewell is recorded as a failure of its rank, unless this
        rank leaves or has failed. While no message comes, calls are compared every 5 s.
        """
        selector = selectors.DefaultSelector()
        for other, connection in self._sockets.items():
            selector.register(connection, selectors.EVENT_READ, other)
        while selector.get_map():
            ready = selector.select(LOOK_SECONDS)
            if not ready:
                # Only the ranks that have answered. Others may run code that holds the lock of
                # their interpreter.
                self._compare_reports()
                self._look_at_own_call()
            for key, _ in ready:
                peer: int = key.data
                message = _receive(self._sockets[peer])
                if message is not None and self._handle_message(peer, message):
                    continue
                # A farewell, or the end of the connection.
                selector.unregister(key.fileobj)
                self._sockets.pop(peer)
                if message is not None and "farewell" in message:
                    self._record_script_over(peer)
                if message is None and not self._has_left and self._own_failure is None:
                    self._record_failure(
                        peer, "it was killed, or its host or connection was lost", peer
                    )
                if not self._sockets:
                    self._may_end.set()
        selector.close()

    def _handle_message(self, peer: int, message: Mapping[str, Any]) -> bool:
        """Handle a message.

        Args:
            peer: Global rank that sent it.
            message: The message.

        Returns:
            Whether more messages may come from the peer: not after a farewell.

        Raises:
            KeyError: A message lacks an item that belongs to its kind.
        """
        if "failed" in message:
            self._record_failure(int(message["failed"]), str(message["reason"]), peer)
        elif "calls" in message:
            if message["asks"]:
                self._request_reports()
            self._take_report(peer, Report.from_json(message["calls"]))
        elif "over" in message:
            self._record_script_over(int(message["over"]))
        elif "report" in message:
            self._report_calls(asks=False)
        else:
            return False
        return True

    def _look_at_own_call(self) -> None:
        """Ask all ranks, by way of rank 0, for their calls if this rank stays in the same call.

        The first request is after `LOOK_SECONDS`, the next after twice that time, and so on.

        A request goes to all ranks; on rank 0 a difference may end the job.
        """
        if self.calls is None:
            return
        since = self.calls.since()
        if since is None or self.failed:
            return
        if since != self._call_since:
            self._call_since, self._patience = since, LOOK_SECONDS
        if time.monotonic() - since >= self._patience:
            self._patience = min(2 * self._patience, self._patience + LONGEST_LOOK_SECONDS)
            self._report_calls(asks=True)

    def _report_calls(self, *, asks: bool) -> None:
        """Report the calls of this rank to rank 0.

        Without recorded calls nothing is sent. On rank 0 the report is stored, and a difference may
        end the job.

        Args:
            asks: Whether rank 0 asks the other ranks for theirs, too.
        """
        if self.calls is None:
            return
        report = self.calls.report()
        if self.rank != 0:
            self._send_to_peers({"calls": report.as_json(), "asks": asks})
            return
        if asks:
            self._request_reports()
        self._take_report(0, report)

    def _request_reports(self) -> None:
        """On rank 0: ask every rank for its calls, unless it did within `LOOK_SECONDS`.

        Reports that have come before are dropped.
        """
        now = time.monotonic()
        if self.calls is None or now - self._requested_at < LOOK_SECONDS:
            return
        self._requested_at = now
        self._reports = {0: self.calls.report()}
        self._send_to_peers({"report": True})

    def _take_report(self, rank: int, report: Report) -> None:
        """On rank 0: store the report of a rank, and compare when all ranks have answered.

        Ranks that have ended do not answer, and are not waited for.

        A difference ends the job.
        """
        self._reports[rank] = report
        if self._reports.keys() >= {0, *self._sockets}:
            self._compare_reports()

    def _compare_reports(self) -> None:
        """On rank 0: compare the reports that are here, and end the job if two ranks can never go
        on. The reports are dropped.

        The higher of the two ranks is recorded as failed.
        """
        reports, self._reports = self._reports, {}
        difference = first_difference(reports)
        if difference is not None and not self.failed:
            self._record_failure(difference.rank, difference.words, origin=0)

    def _record_script_over(self, rank: int) -> None:
        """Record the first rank with a script that is over; rank 0 tells the others."""
        if self.over is None:
            self.over = rank
        if self.rank == 0:
            self._send_to_peers({"over": rank}, except_peer=rank)

    def _record_failure(self, rank: int, reason: str, origin: int) -> None:
        """Record a failure, pass it on, and end this process after the grace period.

        Only the first failure counts. `failure` is not set if this rank itself is the one: another
        rank has noticed it.

        Args:
            rank: Global rank that failed.
            reason: The cause, in one line.
            origin: The rank that sent the message: it knows already.
        """
        if self.rank == 0:
            self._send_to_peers({"failed": rank, "reason": reason}, except_peer=origin)
        if self._has_heard_failure or self._own_failure is not None:
            return
        self._has_heard_failure = True
        failure = Failure(rank, reason)
        # Another rank may be the first to notice that this rank fails. Then an error that this rank
        # raises later is a consequence, and not the cause.
        if rank != self.rank:
            self.failure = failure
            self._has_failure.set()
        self._may_end.set()
        self._after_grace(self.words(failure))

    def _after_grace(self, line: str) -> None:
        """End this process with status 1 after the grace period, from a thread of its own.

        Args:
            line: The reason to print.
        """
        ender = threading.Timer(self.grace, self._end_process, [line])
        ender.daemon = True
        ender.start()

    def _end_process(self, line: str) -> None:
        """Print the reason, and end this process with status 1, without its exit functions.

        A collective or a computation would let no exception through.

        The output is flushed for at most a second. The call does not return.
        """
        self.say(line)
        # From another thread, because the main thread may hold the lock of its output for ever.
        flusher = threading.Thread(target=_flush, daemon=True)
        flusher.start()
        flusher.join(_FLUSH_SECONDS)
        os._exit(1)


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Read a message, and return it: a JSON object.

    None at the end of the connection, and for an invalid message.

    The call waits for the whole message.
    """
    try:
        (size,) = _SIZE.unpack(exactly(connection, _SIZE.size))
        if size > _LONGEST_MESSAGE:
            return None
        message = json.loads(exactly(connection, size))
    except (OSError, ValueError):
        return None
    if not isinstance(message, dict):
        return None
    return message


def _flush() -> None:
    """Write the buffered output of this process. A closed output is passed over."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
