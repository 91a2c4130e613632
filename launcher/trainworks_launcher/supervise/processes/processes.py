"""Child processes: start, signal, drain and reap. Orphans of the job: adopt, reap and end."""

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
from typing import Iterable, Mapping, NamedTuple, Sequence

from trainworks_launcher.supervise.outcome.outcome import returncode_of
from trainworks_launcher.supervise.processes.output import Output, Tail

_DRAIN_SECONDS = 0.7
"""Limit of the wait for the output of a process that has ended: children may hold its pipes."""

REAP_SECONDS = 5.0
"""Bound of the wait for a process after KILL, where nothing depends on its end."""


class Child:
    """A running command in a session of its own; its output is copied."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        output: Output,
        prefix: bytes | None = None,
    ) -> None:
        """Start the command in a session of its own, without input, and copy its output.

        A text file without ``#!`` is run by sh, as a shell does it (execvp(3), ENOEXEC).

        Args:
            argv: The command line.
            env: All variables of the command.
            cwd: The working directory.
            output: Copies both streams of the command.
            prefix: Prefix of its lines, as in ``output.Copier.add``.

        Raises:
            OSError: The command cannot be started.
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
        # Copies, because the copier closes its descriptors, and Popen closes its own.
        descriptors = []
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                descriptors.append(os.dup(stream.fileno()))
                stream.close()
        self._streams = output.copy(descriptors[0], descriptors[1], self.tail, prefix)

    @property
    def running(self) -> bool:
        """Whether the end of the command has not been noted yet."""
        return self._process.returncode is None

    @property
    def returncode(self) -> int:
        """Exit status of the command, negative after a signal; 0 while the command runs."""
        return self._process.returncode or 0

    def has_just_ended(self) -> bool:
        """Return whether the command has ended since the last call; this reads its status."""
        return self._process.returncode is None and self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Send a signal to the command itself, if it runs."""
        if self.running:
            send(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the command's process group, also after the command's own end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def drain(self) -> None:
        """Wait, bounded, for the rest of the output, then end the command's process group.

        Waiting comes first: ``script > >(tee log)`` leaves a process behind that still writes
        the last lines of the log.
        """
        self._output.wait((self._streams,), _DRAIN_SECONDS)
        self.signal_group(signal.SIGKILL)
        self._output.wait((self._streams,), _DRAIN_SECONDS)

    def kill(self) -> None:
        """End the command with its process group (SIGKILL), and wait for it, bounded."""
        self.signal_group(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS)
        self.drain()


def _start(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with pipes for its output and without input.

    Raises OSError if the process cannot be started.
    """
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
    """Return whether a program is a text file without ``#!``, which sh could run.

    False for a binary of another architecture, and for a file that cannot be read.
    """
    try:
        with program.open("rb") as opened:
            first = opened.read(_FIRST_LINE)
    except OSError:
        return False
    return bool(first) and b"\0" not in first and not first.startswith(b"#!")


def why_not_started(program: str, cwd: str, error: OSError) -> str:
    """Describe why the kernel could not start a program.

    Args:
        program: The program, argv[0].
        cwd: The working directory.
        error: The kernel's error.

    Returns:
        The kernel's words, with the cause where these mislead. ``No such file`` is also the error
        for a script whose interpreter does not exist (execve(2), ENOENT).
    """
    reason = error.strerror or str(error)
    if error.errno == errno.E2BIG:
        return (
            f"{reason}; one argument or variable is longer than the kernel's 128 KiB,"
            " or all together are too long"
        )
    if error.errno == errno.EAGAIN:
        from trainworks_launcher.environment.cgroups import process_limit  # only a failure needs it

        return f"{reason}{process_limit()}"
    first_line = b""
    with contextlib.suppress(OSError), Path(cwd, program).open("rb") as opened:
        first_line = opened.readline(_FIRST_LINE)
    if error.errno != errno.ENOENT or not first_line.startswith(b"#!"):
        return reason
    if first_line.endswith(b"\r\n"):
        return (
            f"{reason}; its lines end with CR LF, as on Windows:"
            " convert them, for example with dos2unix"
        )
    interpreter = first_line[2:].decode("utf-8", "replace").split()[:1]
    return (
        f"{reason}; its first line names the interpreter"
        f" {''.join(interpreter)!r}, which does not exist"
    )


_FIRST_LINE = 256
"""Bytes of a first line that the kernel looks at. Source: execve(2), since Linux 5.1."""


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class ProcessStat(NamedTuple):
    """The fields of ``/proc/PID/stat`` that say which process has a number (proc(5)).

    Attributes:
        parent: The parent's process id; 0 if the process is gone.
        started: Start time in clock ticks since boot, for example ``"83241"``; ``""`` if the
            process is gone. A number that was given to a new process has a new start time.
        state: For example ``"S"``, or ``"Z"`` for a process that has ended; ``"X"`` if gone.
    """

    parent: int
    started: str
    state: str


def stat(pid: int) -> ProcessStat:
    """Read the parent, the start time and the state of a process; see ``ProcessStat`` if gone."""
    fields = _stat_fields(pid)
    if not fields:
        return ProcessStat(parent=0, started="", state="X")
    return ProcessStat(
        parent=int(fields[_STAT_PARENT]), started=fields[_STAT_STARTED], state=fields[_STAT_STATE]
    )


# Places of fields in the list of ``_stat_fields``: three less than the numbers in proc(5), stat,
# because the list begins with the third field.
_STAT_STATE = 0
_STAT_PARENT = 1
_STAT_STARTED = 19
_STAT_EXIT_CODE = 49

HAS_ENDED = "Z"
"""State of a process that has ended, and whose status its parent has not read yet."""


def _stat_fields(pid: int) -> list[str]:
    """Split ``/proc/PID/stat`` behind the program's name; an empty list if the process is gone."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    # The name stands in parentheses, and may hold blanks and parentheses of its own.
    return content.rpartition(")")[2].split()


def children_of(parent: int) -> tuple[int, ...]:
    """Return the process ids of the direct children of a process; () if it has none or is gone."""
    # The kernel's own list, if the kernel was built with one (proc(5), children); else the parent
    # of every process.
    try:
        paths = Path(f"/proc/{parent}/task").glob("*/children")
        lists = [path.read_text(encoding="ascii") for path in paths]
    except OSError:
        lists = []
    if lists:
        return tuple(int(pid) for pid in " ".join(lists).split())
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  (names, not paths)
    return tuple(pid for pid in pids if stat(pid).parent == parent)


def signal_receivers(pid: int, number: int) -> list[int]:
    """Return the topmost processes of a tree that handle a signal, or wait for it (SigBlk).

    Starters and shells without a handler would die of the signal. Workers of a data loader
    inherit the handler of the process above them (proc(5), status), so the search ends there.

    Args:
        pid: The top of the tree.
        number: The signal.

    Returns:
        Their process ids; ``[]`` if no process of the tree has a handler.
    """
    if has_handler(pid, number):
        return [pid]
    receivers: list[int] = []
    for child in children_of(pid):
        receivers += signal_receivers(child, number)
    return receivers


def has_handler(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, or waits for it (SigBlk); False if it is gone."""
    bit = 1 << (number - 1)
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    for line in status.splitlines():
        # For example ``SigCgt:\t0000000000004a02``: a bit for each signal with a handler.
        if line.startswith(("SigCgt:", "SigBlk:")) and int(line.split()[1], 16) & bit:
            return True
    return False


def waits_for_a_child(pid: int) -> bool:
    """Return whether a process only waits for a child to end, as a shell for its command.

    False if that is not known: the process is gone, belongs to another user, or the kernel does not
    tell where it sleeps (proc_pid_wchan(5)).
    """
    try:
        sleeps_in = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return sleeps_in == "do_wait"


def open_pidfd(pid: int) -> int:
    """Open a pidfd of a process: it can be read from the end of the process on (pidfd_open(2)).

    Args:
        pid: The process.

    Returns:
        The descriptor. The caller closes it; programs that are started do not get it.

    Raises:
        OSError: The process is gone, or the kernel is older than Linux 5.3.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    # Python 3.8 has no function for it.
    import ctypes  # takes milliseconds

    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.syscall(_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return descriptor


_PIDFD_OPEN = 434
"""Number of the system call on every architecture (Linux, asm-generic/unistd.h)."""


def exit_status_of(pid: int, started: str, descriptor: int) -> int | None:
    """Return the exit status of a process that has ended and is not our child.

    Until its parent calls wait(2), the status is in proc(5), field ``exit_code``; afterwards the
    pidfd has the status (Linux 6.15). The process must have ended: this does not wait.

    Args:
        pid: The process.
        started: Its start time, as ``stat`` returned it while the process ran. A process with
            another start time is a new one with the same number.
        descriptor: Its pidfd, which stays open.

    Returns:
        The status, negative after a signal; None if the kernel does not tell it.
    """
    fields = _stat_fields(pid)
    is_same = bool(fields) and fields[_STAT_STARTED] == started
    if is_same and fields[_STAT_STATE] == HAS_ENDED:
        return returncode_of(int(fields[_STAT_EXIT_CODE]))
    import fcntl  # only jobs with ranks need it

    # The mask says what is asked for; the kernel replaces it by what it has filled in.
    information = bytearray(struct.pack(_PIDFD_REQUEST, _PIDFD_INFO_EXIT))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, information)
    except OSError:
        return None
    mask, wait_status = struct.unpack(_PIDFD_ANSWER, information)
    if not mask & _PIDFD_INFO_EXIT:
        return None
    return returncode_of(wait_status)


# linux/pidfd.h: the number of the request, and the bit of the mask for the exit status.
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
# struct pidfd_info, its first 64 bytes: the mask (8 bytes), 52 bytes of other facts, and the status
# as wait(2) has it (4 bytes).
_PIDFD_REQUEST, _PIDFD_ANSWER = "Q56x", "Q52xi"


class Orphans:
    """The orphans of the job: processes that left our sessions and lost their parents.

    The kernel gives orphans to process 1. Any other process has to ask for the orphans below it
    (PR_SET_CHILD_SUBREAPER, prctl(2)). So no process of the job outlives the job, even after a
    change of its session and its environment.
    """

    def __init__(self) -> None:
        """Ask the kernel to give the orphans below this process to this process.

        Children that this process has already are not of the job.
        """
        self._is_init = os.getpid() == 1
        self._strangers = frozenset(children_of(os.getpid()))
        self._is_subreaper = not self._is_init and _set_subreaper(True)

    def reap(self, known: Iterable[int]) -> list[int]:
        """Read the status of every orphan that has ended; does not wait for one.

        Args:
            known: Children that other code waits for. Poll them just before this call: an ended
                one hides the orphans that ended after it.

        Returns:
            The statuses, negative after a signal. The processes are gone then.
        """
        excluded = frozenset(known)
        if not self._is_init:
            excluded |= self._strangers
        statuses: list[int] = []
        while self._is_init or self._is_subreaper:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if child is None or child.si_pid in excluded:
                break
            # WNOWAIT has left the status unread, because a child may be one of the excluded ones.
            # The status of a process that a signal ended is the signal.
            has_exited = child.si_code == os.CLD_EXITED
            statuses.append(child.si_status if has_exited else -child.si_status)
            with contextlib.suppress(ChildProcessError):
                # Another thread may have waited for its own child already (hang.sampling).
                os.waitpid(child.si_pid, 0)
        return statuses

    def has_others(self, known: Iterable[int]) -> bool:
        """Return whether the job has a process outside the trees of the known ones."""
        return bool(_descendants(os.getpid(), self._strangers.union(known)))

    def end(self, known: Iterable[int], seconds: float) -> tuple[int, ...]:
        """KILL every process of the job, and wait for their ends.

        The processes of the job are all descendants of this process: the orphans come here. Only
        proc(5), stat, is read. A process that hangs in a driver may hold the lock of its memory,
        and a read of its environment would wait for that lock.

        Args:
            known: Children of this process that are not of the job.
            seconds: Bound of the wait.

        Returns:
            The processes that have not ended.
        """
        deadline = time.monotonic() + seconds
        excluded = self._strangers.union(known)
        # Again and again, because a process may start another one before its own end.
        while True:
            processes = _descendants(os.getpid(), excluded)
            for pid in processes:
                send(pid, signal.SIGKILL)
            for pid in processes:
                _wait_for_end(pid, deadline)
            for pid in set(children_of(os.getpid())) - excluded:
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)
            if not processes or time.monotonic() >= deadline:
                break
        if self._is_subreaper:
            _set_subreaper(False)
        if not processes:
            return ()
        return tuple(_descendants(os.getpid(), excluded))


def _descendants(top: int, excluded: Iterable[int]) -> list[int]:
    """Return the running processes below one, without the trees of the excluded ones.

    Args:
        top: A process; it is not in the result itself.
        excluded: Processes to leave out with all their descendants.
    """
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    for entry in os.listdir("/proc"):  # noqa: PTH208  (names, not paths)
        if entry.isdecimal():
            process = stat(int(entry))
            children.setdefault(process.parent, []).append(int(entry))
            # Ended, or gone since the list was made.
            if process.state in "ZX":
                ended.add(int(entry))
    running: list[int] = []
    parents = [top]
    while parents:
        for pid in children.get(parents.pop(), ()):
            if pid in excluded:
                continue
            # An ended process may still have children that run.
            parents.append(pid)
            if pid not in ended:
                running.append(pid)
    return running


def _wait_for_end(pid: int, deadline: float) -> None:
    """Wait for the end of a process until a deadline (monotonic clock).

    Returns at once if the process is gone, or where the kernel has no pidfds.
    """
    with contextlib.suppress(OSError):
        descriptor = open_pidfd(pid)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        milliseconds = 1000 * max(0.0, deadline - time.monotonic())
        poll.poll(milliseconds)
        os.close(descriptor)


_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def _set_subreaper(enable: bool) -> bool:
    """Set or clear PR_SET_CHILD_SUBREAPER for this process; return whether that was done."""
    # Imported late, because that takes milliseconds, and process 1 does not need it.
    import ctypes

    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enable), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False
