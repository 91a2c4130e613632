"""Child processes and what PID 1 owes to all others: start, signal, drain, reap."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import struct
import subprocess
import time
from pathlib import Path
from typing import Iterable, Mapping, Sequence

from trainworks_launcher.supervise.outcome.outcome import returncode_of
from trainworks_launcher.supervise.processes.output import Output, Tail

_DRAIN_SECONDS = 0.7
REAP_SECONDS = 5.0
"""How long the end of a process is waited for after KILL, where nothing depends on it."""


class Child:
    """One running command in a session of its own, with its output being copied."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        output: Output,
        prefix: bytes | None = None,
    ) -> None:
        """Start it; ``prefix`` is what ``output.Copier.add`` takes.

        Raises OSError if it cannot be started.

        A text without ``#!`` is run by sh, as a shell does it (execvp(3), ENOEXEC).
        """
        self.tail = Tail()
        self._output = output
        try:
            self._process = _start(argv, env, cwd)
        except OSError as error:
            if error.errno != errno.ENOEXEC or not _is_text(Path(cwd, argv[0])):
                raise
            self._process = _start(("/bin/sh", *argv), env, cwd)
        self.pid = self._process.pid
        descriptors = []
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                descriptors.append(os.dup(stream.fileno()))
                stream.close()
        self._streams = output.copy(descriptors[0], descriptors[1], self.tail, prefix)

    @property
    def running(self) -> bool:
        """Whether its end has not been noted yet."""
        return self._process.returncode is None

    @property
    def returncode(self) -> int:
        """Its return code, negative after a signal; 0 while it runs."""
        return self._process.returncode or 0

    def has_just_ended(self) -> bool:
        """Return whether it has ended since it was last looked at; its status is taken then."""
        return self._process.returncode is None and self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        if self.running:
            send(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to everything in the command's process group, gone or not."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def drain(self) -> None:
        """Wait, bounded, for the rest of the output.

        Then end what the child left behind and take its last words.

        Waiting comes first: ``script > >(tee log)`` leaves a process behind
        that is about to write what matters.
        """
        self._output.wait((self._streams,), _DRAIN_SECONDS)
        self.signal_group(signal.SIGKILL)
        self._output.wait((self._streams,), _DRAIN_SECONDS)

    def kill(self) -> None:
        """KILL it with its group and wait, bounded."""
        self.signal_group(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS)
        self.drain()


def _start(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        tuple(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )


def _is_text(program: Path) -> bool:
    """Return whether a file is a text without an interpreter of its own:
    nothing that another machine runs.
    """
    try:
        with program.open("rb") as opened:
            first = opened.read(_FIRST_LINE)
    except OSError:
        return False
    return bool(first) and b"\0" not in first and not first.startswith(b"#!")


def why_not_started(program: str, cwd: str, error: OSError) -> str:
    """Return why the kernel could not start a program, in its own words and,
    where they mislead, with what is wrong.

    ``No such file`` is also said of a script whose interpreter does not exist (execve(2), ENOENT).
    """
    said = error.strerror or str(error)
    if error.errno == errno.E2BIG:
        return (
            f"{said}; one argument or variable is longer than the kernel's 128 KiB,"
            " or all together are too long"
        )
    if error.errno == errno.EAGAIN:
        from trainworks_launcher.environment.cgroups import of_processes  # only a failure needs it

        return f"{said}{of_processes()}"
    first = b""
    with contextlib.suppress(OSError), Path(cwd, program).open("rb") as opened:
        first = opened.readline(_FIRST_LINE)
    if error.errno != errno.ENOENT or not first.startswith(b"#!"):
        return said
    if first.endswith(b"\r\n"):
        return (
            f"{said}; its lines end with CR LF, as on Windows:"
            " convert them, for example with dos2unix"
        )
    interpreter = first[2:].decode("utf-8", "replace").split()[:1]
    return (
        f"{said}; its first line names the interpreter"
        f" {''.join(interpreter)!r}, which does not exist"
    )


_FIRST_LINE = 256
"""Bytes of a first line that the kernel looks at. Source: execve(2), since Linux 5.1."""


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def stat(pid: int) -> tuple[int, str]:
    """Return (parent, start time) of a process from proc(5); (0, "") if it is gone."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return 0, ""
    return int(fields[1]), fields[19]


def children_of(parent: int) -> tuple[int, ...]:
    """Direct children of a process, in the kernel's own list where it has one
    (proc(5), children).
    """
    try:
        lists = [
            path.read_text(encoding="ascii")
            for path in Path(f"/proc/{parent}/task").glob("*/children")
        ]
    except OSError:
        lists = []
    if lists:
        return tuple(int(pid) for pid in " ".join(lists).split())
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  (names, not paths)
    return tuple(pid for pid in pids if stat(pid)[0] == parent)


def takers(pid: int, number: int) -> list[int]:
    """Return who in a process's tree a signal is for: the topmost ones with a
    handler, or that wait for it (SigBlk).

    Starters and shells without a handler would die of it. Below a process that has one, the workers
    of its data loaders have inherited it (proc(5), status).
    """
    bit = 1 << (number - 1)
    try:
        lines = (
            Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return []
    if any(
        line.startswith(("SigCgt:", "SigBlk:")) and int(line.split()[1], 16) & bit for line in lines
    ):
        return [pid]
    return [found for child in children_of(pid) for found in takers(child, number)]


def exit_status_of(pid: int, started: str, descriptor: int) -> int | None:
    """Return the exit status (negative after a signal) of another's child that has ended.

    None if it is not known.

    Until the parent has taken it, it is in proc(5), field ``exit_code``; after
    that the pidfd tells it (Linux 6.15).
    """
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        fields = []
    if fields and fields[0] == "Z" and fields[19] == started:
        return returncode_of(int(fields[49]))
    import fcntl  # only jobs with ranks need it

    information = bytearray(struct.pack("Q56x", _PIDFD_INFO_EXIT))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, information)
    except OSError:
        return None
    mask, code = struct.unpack("Q52xi", information)
    return returncode_of(code) if mask & _PIDFD_INFO_EXIT else None


# linux/pidfd.h; struct pidfd_info, its first 64 bytes.
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3


class Family:
    """The orphans of the job: processes that left our sessions and lost their parents.

    Process 1 gets them from the kernel. Any other process asks for them (PR_SET_CHILD_SUBREAPER,
    prctl(2)), so that nothing that the job started outlives it, whatever its session and its
    environment.
    """

    def __init__(self) -> None:
        """Ask for them. What is a child of this process before that is not of the job."""
        self._first = os.getpid() == 1
        self._strangers = frozenset(children_of(os.getpid()))
        self._asked = not self._first and _adopt(True)

    def reap(self, known: Iterable[int]) -> list[int]:
        """Take the status of every ended process that became ours, and return them.

        Negative after a signal.

        ``known`` are waited for elsewhere; they must have been looked at just before, or they hide
        what ended after them.
        """
        ours = frozenset(known) if self._first else self._strangers.union(known)
        statuses: list[int] = []
        while self._first or self._asked:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None or found.si_pid in ours:
                break
            statuses.append(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
            with contextlib.suppress(
                ChildProcessError
            ):  # the thread that started it was first (hang.looking)
                os.waitpid(found.si_pid, 0)
        return statuses

    def has_others(self, known: Iterable[int]) -> bool:
        """Return whether a process of the job runs that is none of the known
        ones, and not below one of them.
        """
        return bool(_below(os.getpid(), self._strangers.union(known)))

    def end(self, known: Iterable[int], seconds: float) -> tuple[int, ...]:
        """KILL all that the job has started, and wait so long until none of it is left.

        That is every process below this one: who loses its parent comes here. Only proc(5), stat,
        is read for it. A process that hangs in a driver may hold the lock of its memory, for which
        a read of its environment waits.

        Args:
            known: Children of this process that are not of the job.
            seconds: How long the ends are waited for.

        Returns:
            The processes that do not end.
        """
        deadline = time.monotonic() + seconds
        kept = self._strangers.union(known)
        while True:
            found = _below(os.getpid(), kept)
            for pid in found:
                send(pid, signal.SIGKILL)
            for pid in found:
                _wait_for_end(pid, deadline)
            for pid in set(children_of(os.getpid())) - kept:
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG if hasattr(os, "pidfd_open") else 0)
            if not found or time.monotonic() >= deadline:
                break
        if self._asked:
            _adopt(False)
        return tuple(_below(os.getpid(), kept)) if found else ()


def _below(top: int, kept: Iterable[int]) -> list[int]:
    """Return the processes below one that have not ended.

    Without those that are kept, and what is below them.
    """
    below: dict[int, list[int]] = {}
    ended: set[int] = set()
    for entry in os.listdir("/proc"):  # noqa: PTH208  (names, not paths)
        if entry.isdecimal():
            parent, state = _parent_and_state(int(entry))
            below.setdefault(parent, []).append(int(entry))
            if state in "ZX":
                ended.add(int(entry))
    found: list[int] = []
    waiting = [top]
    while waiting:
        children = [pid for pid in below.get(waiting.pop(), ()) if pid not in kept]
        waiting += children
        found += [pid for pid in children if pid not in ended]
    return found


def _parent_and_state(pid: int) -> tuple[int, str]:
    """Return a process's parent and state of proc(5); (0, "X") if it is gone."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return 0, "X"
    return int(fields[1]), fields[0]


def _wait_for_end(pid: int, deadline: float) -> None:
    """Wait, bounded, for the end of a process; not at all before Python 3.9."""
    with contextlib.suppress(OSError):
        if hasattr(os, "pidfd_open"):
            descriptor = os.pidfd_open(pid)
            select.select((descriptor,), (), (), max(0.0, deadline - time.monotonic()))
            os.close(descriptor)


_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def _adopt(wanted: bool) -> bool:
    """Ask the kernel for the orphans of our descendants, or no longer; whether it agrees."""
    import ctypes  # takes milliseconds, and process 1, which every container has, does not need it

    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False
