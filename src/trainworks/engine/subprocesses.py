"""Child processes that end when we end them: own session, lines as they come, bounded waits,
nothing left behind.

Everything the engines start goes through ``run`` (short commands) or ``stream`` (builds). A child
gets a session of its own, so that a Ctrl-C at the terminal reaches only us and we decide in which
order things stop: SIGINT to its whole group (what docker and buildah clean up on), then SIGTERM,
one shared deadline, SIGKILL, reaped.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Final, cast

GRACE: Final = 10.0
"""Seconds between the first signal to a child and SIGKILL."""

_POLL: Final = 0.1
"""Seconds between two looks of a waiting thread at whether it was interrupted."""

_CHUNK: Final = 65536
_LONGEST_LINE: Final = 65536
_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
_TIMED_OUT: Final = 124
TOO_MUCH: Final = 125
"""The status of a command that was stopped because of how much it printed."""

_LINGER: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A child's end.

    Attributes:
        status: Its exit status; 128 + N when signal N ended it, and 124 (as ``timeout`` has it)
            when its time was up.
        output: Its stdout, or stdout and stderr together when they were merged.
        errors: Its stderr; empty when merged.
        timed_out: Whether it was stopped because its time was up.
    """

    status: int
    output: bytes
    errors: bytes
    timed_out: bool = False

    def over(self, limit: int) -> bool:
        """Return whether a stream had more than ``limit`` bytes, so that the rest was not read.

        0: no limit.
        """
        return 0 < limit < max(len(self.output), len(self.errors))

    @property
    def words(self) -> str:
        """Its output, for a message: stderr, else stdout, without empty lines at the ends."""
        return (self.errors or self.output).decode(errors="replace").strip()


def stopped_after_bytes(limit: int) -> bytes:
    """Return the last line of an output that was too long."""
    return f"\n(stopped after {limit} bytes of output)\n".encode()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM while a short, bounded piece of work is
    done, and deliver them after it.

    A second Ctrl-C from an impatient user must not tear down the very code that cleans up after the
    first. Only the main thread receives signals in Python; elsewhere it is an ``Interruption`` that
    is held back.
    """
    if threading.current_thread() is not threading.main_thread():
        _THREAD.held += 1
        try:
            yield
        finally:
            _THREAD.held -= 1
        return
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, hold)
    try:
        yield
    finally:
        for each, handler in before.items():
            # None is a handler that was not installed from Python. It cannot be restored; the
            # default is the nearest.
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        for number in dict.fromkeys(held):
            signal.raise_signal(number)


class Interruption:
    """Ctrl-C for threads that work side by side: the main thread receives the
    signal, and hands it on to them.
    """

    def __init__(self) -> None:
        """Start with no interruption."""
        self._requested = threading.Event()

    def request(self) -> None:
        """Raise ``KeyboardInterrupt``, once, in each thread that it reaches, where that waits.

        Returns at once.
        """
        self._requested.set()

    @property
    def requested(self) -> bool:
        """Whether it was requested."""
        return self._requested.is_set()

    @contextlib.contextmanager
    def reaches_this_thread(self) -> Iterator[None]:
        """Let it reach this thread while the ``with`` block runs."""
        _THREAD.interruption = self
        try:
            yield
        finally:
            _THREAD.interruption = None


class _Thread(threading.local):
    """What a thread can be interrupted by, and how many blocks of it hold an interruption back."""

    interruption: Interruption | None = None
    held: int = 0


_THREAD: Final = _Thread()


def check_interrupted() -> None:
    """Raise ``KeyboardInterrupt`` in a thread that an ``Interruption`` reaches,
    unless it is held back.
    """
    interruption = _THREAD.interruption
    if interruption is not None and interruption.requested and not _THREAD.held:
        # Once: what cleans up after it waits for children too.
        _THREAD.interruption = None
        raise KeyboardInterrupt


def wait_for(waits: Callable[[float | None], bool], timeout: float | None = None) -> bool:
    """Wait for something, so that an ``Interruption`` of this thread ends the wait.

    Args:
        waits: Waits for it, at most so many seconds (``None``: no limit), and
            returns whether it happened.
        timeout: How long to wait, in seconds; ``None``: no limit.

    Returns:
        Whether it happened in time.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while _THREAD.interruption is not None:
        check_interrupted()
        left = _POLL if deadline is None else min(_POLL, deadline - time.monotonic())
        if waits(max(0.0, left)):
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return False
    return waits(timeout)


def own_environment() -> dict[str, str]:
    """Return this process's environment.

    Another thread may change it meanwhile, as pytest does for each check.
    """
    environment = {}
    for name in os.environ:
        value = os.environ.get(name)
        if value is not None:
            environment[name] = value
    return environment


def emulation() -> dict[str, str]:
    """Return the variable that tells qemu which processor to emulate, if this machine sets it.

    qemu reads it in the environment of each program that it runs (``linux-user/main.c`` of its
    source), so a container must have it.
    """
    processor = os.environ.get("QEMU_CPU")
    return {"QEMU_CPU": processor} if processor else {}


class _OneInterrupt:
    """From the first SIGINT or SIGTERM on lets no further one through, until it is taken off.

    ``uninterrupted`` guards the code that ends a child; between the first interrupt and that code
    there are steps of Python's own, and a second one that falls there would leave the child
    running.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {}
        self._interrupted = False

    def put_on(self) -> None:
        """Take over the handlers; only the main thread has any."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            # A signal that Python does not handle ends the process or does nothing.
            if callable(handler):
                self._before[number] = handler
                signal.signal(number, self._first_only)

    def take_off(self) -> None:
        """Restore the handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _first_only(self, number: int, frame: FrameType | None) -> None:
        if not self._interrupted:
            self._interrupted = True
            self._before[signal.Signals(number)](number, frame)


Strays = Callable[[int], Iterable[int]]
"""Finds the processes that belong to a child, given its number."""


def no_strays(_child: int) -> Iterable[int]:
    """Find no processes."""
    return ()


class Child:
    """A child process in its own session. Leaving the ``with`` block ends it."""

    def __init__(
        self,
        argv: tuple[str, ...],
        *,
        environment: Mapping[str, str] | None = None,
        merge: bool = False,
        grace: float = GRACE,
        strays: Strays = no_strays,
    ) -> None:
        """Describe the child; ``__enter__`` starts it.

        Args:
            argv: Program and arguments; never a shell line.
            environment: The whole environment; ``None`` is this process's own.
            merge: Send stderr down the same pipe as stdout, so that the order of lines is kept.
            grace: Seconds between the first polite signal and SIGKILL.
            strays: Finds processes that belong to the child and left its group, given its number;
                asked before the first signal.
        """
        self._argv = argv
        self._strays = strays
        self._environment = environment
        self._merge = merge
        self._grace = grace
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupts = _OneInterrupt()

    def __enter__(self) -> Child:
        """Start the child; raises ``OSError`` if there is no such program."""
        self._interrupts.put_on()
        try:
            # An interrupt between fork and assignment would lose the child.
            with uninterrupted():
                self._process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT if self._merge else subprocess.PIPE,
                    env=None if self._environment is None else dict(self._environment),
                    start_new_session=True,
                )
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        """End the child and its process group, and close what is still open of its pipes."""
        self._end()

    def _end(self) -> None:
        try:
            self.stop()
            for pipe in self.pipes():
                pipe.close()
        finally:
            self._interrupts.take_off()

    @property
    def identifier(self) -> int:
        """The process id, which is also that of the group and the session."""
        return self._started.pid

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            message = "the child is not started"
            raise RuntimeError(message)
        return self._process

    def pipes(self) -> tuple[IO[bytes], ...]:
        """Return the reading ends of stdout and, unless it is merged into that, of stderr."""
        process = self._process
        if process is None:
            return ()
        return tuple(pipe for pipe in (process.stdout, process.stderr) if pipe is not None)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit status (128 + N for signal N), or ``None`` when it still runs after
        ``timeout`` seconds.
        """
        if not wait_for(self._exited, timeout):
            return None
        status = self._started.returncode
        return 128 - status if status < 0 else status

    def chunks(self, timeout: float | None = None, limit: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield bytes of stdout (0) and stderr (1) as they arrive, until both
        are closed or the time is up.

        A daemonised grandchild may hold a pipe: what comes ``_LINGER`` seconds
        after the child's end is not read.

        Args:
            limit: Bytes of a stream after which it is closed, which ends a
                child that writes on; 0: none.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        over = False
        sizes = [0, 0]
        with selectors.DefaultSelector() as selector:
            for number, pipe in enumerate(self.pipes()):
                if not pipe.closed:
                    selector.register(pipe, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select(_POLL):
                    chunk = os.read(key.fd, _CHUNK)
                    sizes[key.data] += len(chunk)
                    if not chunk or 0 < limit < sizes[key.data]:
                        selector.unregister(key.fileobj)
                        cast("IO[bytes]", key.fileobj).close()
                    if chunk:
                        yield key.data, chunk
                check_interrupted()
                if not over and self._exited(0):
                    over = True
                    deadline = min(deadline, time.monotonic() + _LINGER)
                if time.monotonic() >= deadline:
                    return

    def _exited(self, timeout: float | None) -> bool:
        try:
            self._started.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """End the whole group: SIGINT, SIGTERM at half time, SIGKILL at the deadline.

        Returns when it is reaped.
        """
        process = self._process
        if process is None:
            return
        with uninterrupted():
            # Descriptors, not numbers: a number may belong to another process
            # by the time of the kill.
            descriptors = [] if self._exited(0) else list(_opened(self._strays(process.pid)))
            deadline = time.monotonic() + self._grace
            for number, share in ((signal.SIGINT, 0.5), (signal.SIGTERM, 0.0)):
                if self._exited(0):
                    break
                self._signal(process, number)
                self._exited(max(0.0, deadline - time.monotonic() - self._grace * share))
            # Always: the leader may have ended and left members of its group behind.
            self._signal(process, signal.SIGKILL)
            for descriptor in descriptors:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
            # Bounded, because a process in uninterruptible sleep does not end after SIGKILL.
            self._exited(self._grace)

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def run(
    argv: tuple[str, ...],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    merge: bool = False,
    strays: Strays = no_strays,
    limit: int = 0,
) -> Finished:
    """Run a command to its end, or stop it after a time-out, and return its output.

    Args:
        limit: Bytes of each stream after which nothing more is read, so that
            the command fails writing; 0: none.

    Raises:
        OSError: There is no such program.
    """
    texts = [bytearray(), bytearray()]
    with Child(argv, environment=environment, merge=merge, strays=strays) as child:
        deadline = time.monotonic() + timeout
        for number, chunk in child.chunks(timeout, limit):
            texts[number] += chunk
        status = child.wait(max(0.0, deadline - time.monotonic()))
        if status is None:
            child.stop()
            for number, chunk in child.chunks(_LINGER):
                texts[number] += chunk
    return Finished(
        status=_TIMED_OUT if status is None else status,
        output=bytes(texts[0]),
        errors=bytes(texts[1]),
        timed_out=status is None,
    )


def stream(
    argv: tuple[str, ...],
    on_line: Callable[[str], None],
    *,
    environment: Mapping[str, str] | None = None,
    grace: float = GRACE,
    strays: Strays = no_strays,
) -> int:
    """Run a command and hand each line it prints (stdout and stderr merged) to
    ``on_line`` as it comes.

    Any exception, from ``on_line`` or from a signal handler, ends the child before it propagates.

    Returns:
        The exit status; 128 + N when signal N ended the child.

    Raises:
        OSError: There is no such program.
    """
    splitter = LineSplitter()
    with Child(argv, environment=environment, merge=True, grace=grace, strays=strays) as child:
        for _, chunk in child.chunks():
            for line in splitter.feed(chunk):
                on_line(line)
        for line in splitter.finish():
            on_line(line)
        status = child.wait()
    assert status is not None
    return status


@contextlib.contextmanager
def piped(
    argv: tuple[str, ...], environment: Mapping[str, str], timeout: float
) -> Iterator[tuple[IO[bytes], Callable[[], str]]]:
    """Give a command's stdout, and a function for the reason of its failure.

    The function is called after stdout was read; it returns ``""`` for a command that succeeded.
    """
    with Child(argv, environment=environment) as child:
        output, errors = child.pipes()

        def failed() -> str:
            status = child.wait(timeout)
            if not status:
                return ""
            text = errors.read().decode(errors="replace").strip()
            return text or f"exit status {status}"

        yield output, failed


class LineSplitter:
    """Splits a byte stream into lines of text, without terminal escapes, and
    with the last state of redrawn lines.
    """

    def __init__(self) -> None:
        """Start with an empty buffer."""
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines that this chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            yield clean(line)
        # A tool may redraw one line endlessly, or write binary data: limit the memory.
        while len(self._rest) > _LONGEST_LINE:
            head, self._rest = self._rest[:_LONGEST_LINE], self._rest[_LONGEST_LINE:]
            yield clean(head)

    def finish(self) -> Iterator[str]:
        """Yield the text after the last newline."""
        rest, self._rest = self._rest, b""
        if rest:
            yield clean(rest)


def clean(line: bytes) -> str:
    """Return a line as text, without escapes, and with the text that a terminal
    would show after carriage returns.
    """
    text = _ESCAPE.sub("", line.decode(errors="replace"))
    pieces = [piece for piece in text.split("\r") if piece]
    return pieces[-1] if pieces else ""


def programs(name: str, path: str | None) -> tuple[str, ...]:
    """Return every executable of this name on ``path`` (the value of ``PATH``),
    in order, each file once.
    """
    found: dict[Path, str] = {}
    for folder in (path or "").split(os.pathsep):
        candidate = Path(folder or ".") / name
        # `Path.is_file` raises for a folder that cannot be read (root's, after
        # `su` without `-`): skip it.
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):  # noqa: PTH113
            found.setdefault(candidate.resolve(), str(candidate.absolute()))
    return tuple(found.values())


def _opened(identifiers: Iterable[int]) -> Iterator[int]:
    """Yield a process descriptor for each process that still exists."""
    for identifier in identifiers:
        with contextlib.suppress(OSError):
            yield os.pidfd_open(identifier)
