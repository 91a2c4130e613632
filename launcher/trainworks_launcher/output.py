"""What leaves the launcher: the user's output byte for byte, our own log lines, and the files failure and success."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from trainworks_launcher import names
from trainworks_launcher.outcome import FAILED, STOPPED, SUCCEEDED, Outcome, shorten

TAIL_BYTES = 65536
"""How much of the end of a command's output is kept for the failure text."""


def log(message: str) -> None:
    """One line of ours on standard error; a closed standard error is nobody's problem."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"trainworks: {message}\n")
        sys.stderr.flush()


class Tail:
    """The last TAIL_BYTES bytes of what was added, from several threads, in constant memory."""

    def __init__(self, limit: int = TAIL_BYTES) -> None:
        """Start empty."""
        self._limit = limit
        self._lock = threading.Lock()
        self._kept = bytearray()

    def add(self, data: bytes) -> None:
        """Append; the oldest bytes fall out."""
        with self._lock:
            self._kept += data
            if len(self._kept) > 2 * self._limit:
                del self._kept[: -self._limit]

    def read(self) -> bytes:
        """What is kept."""
        with self._lock:
            return bytes(self._kept[-self._limit :])


class Pump:
    """A thread that copies one descriptor to another, unchanged, until its end, and keeps the tail.

    A thread and not the event loop: whoever reads our log may be slow, and the heartbeats must not wait for him.
    """

    def __init__(self, source: int, target: int, tail: Tail) -> None:
        """Start to copy; the pump owns ``source`` and closes it."""
        self._source = source
        self._target = target
        self._tail = tail
        self._thread = threading.Thread(target=self._run, name="trainworks-pump", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait, bounded, until everything is copied: a process left behind may hold the other end open for ever."""
        self._thread.join(seconds)

    def _run(self) -> None:
        writable = True
        while True:
            try:
                chunk = os.read(self._source, 65536)
            except OSError:
                break
            if not chunk:
                break
            self._tail.add(chunk)
            rest = memoryview(chunk)
            while rest and writable:
                try:
                    rest = rest[os.write(self._target, rest) :]
                except OSError:  # noqa: PERF203  (a retry after each short write is the point)
                    # Nobody reads any more. Reading goes on, or the user's program would block for ever.
                    writable = False
        with contextlib.suppress(OSError):
            os.close(self._source)


def clear_outcome_files(base_directory: str) -> None:
    """Remove failure and success of an earlier run, which would speak for this one."""
    for name in (names.FAILURE_FILE, names.SUCCESS_FILE):
        with contextlib.suppress(OSError):
            Path(base_directory, name).unlink()


def users_own_failure(base_directory: str) -> str:
    """The failure text that the user's program wrote itself, "" if it wrote none."""
    try:
        return shorten(Path(base_directory, names.FAILURE_FILE).read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return ""


def write_outcome_files(base_directory: str, outcome: Outcome) -> None:
    """Write output/failure or output/success. A failure text of the user's own is kept. Errors are logged only."""
    failure, success = Path(base_directory, names.FAILURE_FILE), Path(base_directory, names.SUCCESS_FILE)
    try:
        failure.parent.mkdir(parents=True, exist_ok=True)
        if outcome.kind == SUCCEEDED:
            success.touch()
            return
        with contextlib.suppress(FileNotFoundError):
            success.unlink()
        failed = outcome.kind == FAILED or (outcome.kind == STOPPED and outcome.status != 0)
        if failed and not users_own_failure(base_directory):
            failure.write_text(shorten(outcome.text), encoding="utf-8")
    except OSError as error:
        log(f"cannot write below {failure.parent}: {error}")
