"""Child processes: own session, lines as they come, bounded waits, nothing left behind.

The engines start every program by ``run`` (short commands) or ``stream`` (builds). A child gets a
session of its own, so that a Ctrl-C at the terminal reaches only this process, which decides the
order of the end: SIGINT to the child's whole group (docker and buildah clean up then), SIGTERM,
one shared deadline, SIGKILL, and the child is reaped.
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
"""Seconds between two checks of a waiting thread for an interruption."""

_CHUNK: Final = 65536
"""Bytes that are read from a pipe at once."""

_LONGEST_LINE: Final = 65536
"""Bytes after which a line without an end is cut."""

_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
_TIMED_OUT: Final = 124
TOO_MUCH: Final = 125
"""The status of a command that was stopped because it printed too much."""

_LINGER: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of a child process.

    Attributes:
        status: The exit status; 128 + N when signal N ended the child, and 124 (as ``timeout`` has
            it) after a time-out.
        output: The child's stdout, or stdout and stderr together when they were merged.
        errors: The child's stderr; empty when merged.
        timed_out: Whether the child was stopped after a time-out.
    """

    status: int
    output: bytes
    errors: bytes
    timed_out: bool = False

    def over(self, limit: int) -> bool:
        """Return whether a stream had more than ``limit`` bytes; 0: no limit.

        The rest of such a stream was not read.
        """
        return 0 < limit < max(len(self.output), len(self.errors))

    @property
    def words(self) -> str:
        """The output for a message: stderr, else stdout, without empty lines at the ends."""
        return (self.errors or self.output).decode(errors="replace").strip()


def stopped_after_bytes(limit: int) -> bytes:
    """Return the last line of an output that was cut after ``limit`` bytes."""
    return f"\n(stopped after {limit} bytes of output)\n".encode()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM during a short, bounded block; deliver them after the block.

    A second Ctrl-C from an impatient user must not end the code that cleans up after the first.
    Only the main thread receives signals in Python; in other threads an ``Interruption`` is
    delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        _THREAD.delays += 1
        try:
            yield
        finally:
            _THREAD.delays -= 1
        return
    delayed: list[int] = []

    def delay(number: int, _frame: FrameType | None) -> None:
        delayed.append(number)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, delay)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            # None is a handler that was not installed from Python. It cannot be restored; the
            # default is the nearest.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for delayed_number in dict.fromkeys(delayed):
            signal.raise_signal(delayed_number)


class Interruption:
    """Ctrl-C for parallel threads: the main thread receives the signal, and interrupts them."""

    def __init__(self) -> None:
        """Start with no interruption."""
        self._requested = threading.Event()

    def request(self) -> None:
        """Make each thread of this interruption raise ``KeyboardInterrupt`` once, where it waits.

        Returns at once.
        """
        self._requested.set()

    @property
    def requested(self) -> bool:
        """Whether the interruption was requested."""
        return self._requested.is_set()

    @contextlib.contextmanager
    def reaches_this_thread(self) -> Iterator[None]:
        """Interrupt this thread, too, if the request comes during the ``with`` block."""
        _THREAD.interruption = self
        try:
            yield
        finally:
            _THREAD.interruption = None


class _Thread(threading.local):
    """The interruption of a thread, and the number of its blocks that delay the interruption."""

    interruption: Interruption | None = None
    delays: int = 0


_THREAD: Final = _Thread()


def check_interrupted() -> None:
    """Raise ``KeyboardInterrupt`` if an ``Interruption`` reaches this thread and is not delayed.

    It is raised once in each thread.
    """
    interruption = _THREAD.interruption
    if interruption is not None and interruption.requested and not _THREAD.delays:
        # Once: the code that cleans up waits for children too.
        _THREAD.interruption = None
        raise KeyboardInterrupt


def wait_for(waits: Callable[[float | None], bool], timeout: float | None = None) -> bool:
    """Wait for an event, so that an ``Interruption`` of this thread ends the wait.

    Args:
        waits: Waits for the event, at most so many seconds (``None``: no limit), and
            returns whether the event happened.
        timeout: The longest wait, in seconds; ``None``: no limit.

    Returns:
        Whether the event happened in time.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while _THREAD.interruption is not None:
        check_interrupted()
        seconds = min(_POLL, deadline - time.monotonic())
        if waits(max(0.0, seconds)):
            return True
        if time.monotonic() >= deadline:
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
    """Return the variable that tells qemu which processor to emulate, as name and value.

    Empty if this machine does not set the variable.

    qemu reads it in the environment of each program that it runs (``linux-user/main.c`` of its
    source), so a container must have it.
    """
    processor = os.environ.get("QEMU_CPU")
    return {"QEMU_CPU": processor} if processor else {}


class _OneInterrupt:
    """Delivers the first SIGINT or SIGTERM and ignores later ones, until the handlers are restored.

    ``uninterrupted`` guards the code that ends a child. Between the first interrupt and that code
    Python runs steps of its own: a second interrupt during these steps would leave the child
    running.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {}
        self._interrupted = False

    def replace_handlers(self) -> None:
        """Replace the handlers; only the main thread has handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            # A signal that Python does not handle ends the process or does nothing.
            if callable(handler):
                self._before[number] = handler
                signal.signal(number, self._first_only)

    def restore_handlers(self) -> None:
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
            environment: The complete environment; ``None`` is this process's own.
            merge: Send stderr down the same pipe as stdout, so that the order of lines is kept.
            grace: Seconds between the first polite signal and SIGKILL.
            strays: Finds processes that belong to the child and left its group; called with the
                child's number before the first signal.
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
        self._interrupts.replace_handlers()
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
        """End the child and its process group, and close its pipes."""
        self._end()

    def _end(self) -> None:
        """End the child if it runs, close its pipes, and restore the signal handlers."""
        try:
            self.stop()
            for pipe in self.pipes():
                pipe.close()
        finally:
            self._interrupts.restore_handlers()

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
        """Return the reading ends of stdout and, unless both are merged, of stderr."""
        process = self._process
        if process is None:
            return ()
        pipes = (process.stdout, process.stderr)
        return tuple(pipe for pipe in pipes if pipe is not None)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit status, or ``None`` if the child still runs after ``timeout`` seconds.

        The status is 128 + N if signal N ended the child.
        """
        if not wait_for(self._exited, timeout):
            return None
        status = self._started.returncode
        return 128 - status if status < 0 else status

    def chunks(self, timeout: float | None = None, limit: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield bytes of stdout (0) and stderr (1) as they arrive, until both are closed.

        Reading ends after the time-out, too. A daemonised grandchild may hold a pipe, so reading
        ends ``_LINGER`` seconds after the child's end.

        Args:
            timeout: Seconds; ``None``: no limit.
            limit: Bytes after which a stream is closed: a child that writes on fails; 0: no limit.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        has_exited = False
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
                if not has_exited and self._exited(0):
                    has_exited = True
                    deadline = min(deadline, time.monotonic() + _LINGER)
                if time.monotonic() >= deadline:
                    return

    def _exited(self, timeout: float | None) -> bool:
        """Wait for the child's end, at most some seconds; return whether it has ended."""
        try:
            self._started.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """End the whole group: SIGINT, SIGTERM at half time, SIGKILL at the deadline.

        Returns when the child is reaped.
        """
        process = self._process
        if process is None:
            return
        with uninterrupted():
            # Descriptors, not numbers: a number may belong to another process by the time of the
            # kill.
            descriptors = []
            if not self._exited(0):
                descriptors = list(_open_descriptors(self._strays(process.pid)))
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


@dataclass(frozen=True, kw_only=True)
class Capture:
    """The capture of a command's output.

    Attributes:
        merge: Whether stdout and stderr are one stream, so that the order of lines is kept.
        limit: Bytes of each stream after which reading ends, so that the command fails writing;
            0: no limit.
    """

    merge: bool = False
    limit: int = 0


SEPARATE: Final = Capture()
"""Reads all of stdout and of stderr."""


def run(
    argv: tuple[str, ...],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    capture: Capture = SEPARATE,
    strays: Strays = no_strays,
) -> Finished:
    """Run a command to its end, or stop it after a time-out, and return its output.

    Args:
        argv: The program and its arguments.
        timeout: Seconds.
        environment: The complete environment; ``None`` is this process's own.
        capture: The streams that are read, and their limit.
        strays: As of ``Child``.

    Raises:
        OSError: There is no such program.
    """
    texts = [bytearray(), bytearray()]
    with Child(argv, environment=environment, merge=capture.merge, strays=strays) as child:
        deadline = time.monotonic() + timeout
        for number, chunk in child.chunks(timeout, capture.limit):
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
    """Run a command, and call ``on_line`` with each line (stdout and stderr merged) as it comes.

    Any exception, from ``on_line`` or from a signal handler, ends the child before it propagates.

    Args:
        argv: The program and its arguments.
        on_line: Receives each line, without its end and without terminal escapes.
        environment: The complete environment; ``None`` is this process's own.
        grace: Seconds between the first signal and SIGKILL, if the child is ended.
        strays: As of ``Child``.

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
    """Start a command, and give its stdout and a function for the reason of its failure.

    The function is called after stdout was read; it returns ``""`` for a command that succeeded.
    The end of the ``with`` block ends the command.

    Args:
        argv: The program and its arguments.
        environment: The complete environment.
        timeout: Seconds that the function waits for the command's end.

    Raises:
        OSError: There is no such program.
    """
    with Child(argv, environment=environment) as child:
        output, errors = child.pipes()

        def read_failure() -> str:
            status = child.wait(timeout)
            if not status:
                return ""
            text = errors.read().decode(errors="replace").strip()
            return text or f"exit status {status}"

        yield output, read_failure


class LineSplitter:
    """Splits a byte stream into lines of text, without terminal escapes.

    Of a redrawn line, such as a progress bar, the last state is the line.
    """

    def __init__(self) -> None:
        """Start with an empty buffer."""
        self._buffer = b""

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines that a chunk of output completes, cleaned; keep the rest."""
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            yield clean(line)
        # A tool may redraw one line endlessly, or write binary data: limit the memory.
        while len(self._buffer) > _LONGEST_LINE:
            head, self._buffer = self._buffer[:_LONGEST_LINE], self._buffer[_LONGEST_LINE:]
            yield clean(head)

    def finish(self) -> Iterator[str]:
        """Yield the text after the last newline."""
        line, self._buffer = self._buffer, b""
        if line:
            yield clean(line)


def clean(line: bytes) -> str:
    """Return a line as a terminal shows it: without escapes, the text after carriage returns."""
    text = _ESCAPE.sub("", line.decode(errors="replace"))
    pieces = [piece for piece in text.split("\r") if piece]
    return pieces[-1] if pieces else ""


def programs(name: str, path: str | None) -> tuple[str, ...]:
    """Return every executable of this name on ``path``, in order, each file once.

    Args:
        name: For example ``docker``.
        path: The value of ``PATH``; ``None`` is as empty.
    """
    program_by_file: dict[Path, str] = {}
    for folder in (path or "").split(os.pathsep):
        candidate = Path(folder or ".") / name
        # `Path.is_file` raises for a folder that cannot be read (root's, after
        # `su` without `-`): skip it.
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):  # noqa: PTH113
            program_by_file.setdefault(candidate.resolve(), str(candidate.absolute()))
    return tuple(program_by_file.values())


def _open_descriptors(identifiers: Iterable[int]) -> Iterator[int]:
    """Yield a process descriptor for each process that still exists."""
    for identifier in identifiers:
        with contextlib.suppress(OSError):
            yield os.pidfd_open(identifier)
