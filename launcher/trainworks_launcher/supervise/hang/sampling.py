"""Sample the processes of this host: /proc, and stacks by py-spy or faulthandler. Runs in a thread
of its own.

py-spy reads a process's memory without stopping the process, so samples before a verdict cost the
ranks nothing. A process that took no CPU time since the last sample still has the same stack, and
is not read again.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import time
from pathlib import Path
from typing import Iterable, Iterator, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.files import text_of, written_at
from trainworks_launcher.supervise.hang import signals, stacks
from trainworks_launcher.supervise.hang.connections import bytes_of
from trainworks_launcher.supervise.hang.flight_recorder import Recorder
from trainworks_launcher.supervise.hang.nccl import nccl_report
from trainworks_launcher.supervise.hang.outlier_rank import RankSample, Row, row_of
from trainworks_launcher.supervise.hang.progress import CpuTime, Process, Sample
from trainworks_launcher.supervise.hang.stacks import Thread, waits_for_lock

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_ENDED_STATES = ("Z", "X")
"""States of a process that has ended (proc(5), stat)."""

_STOPPED_STATES = ("T", "t")
"""States of a process that a signal or a debugger has stopped (proc(5), stat)."""

# Limits of the time for: the Python stacks of one process; all stacks with compiled code; an
# answer of NCCL's RAS.
_SPY_SECONDS = 5.0
_NATIVE_SECONDS = 6.0
_LEAST_SPY = 0.1  # seconds that py-spy gets at least
_NATIVE_TRIES = 2
_NCCL_SECONDS = 3.0
RECORD_SECONDS = 3.0
LONGEST_SECONDS = _SPY_SECONDS + RECORD_SECONDS + _NATIVE_SECONDS + _NCCL_SECONDS
"""Limit of the time in which a host samples its ranks for a report."""

_ARGUMENTS = 3
"""Arguments of a system call that are read."""

_PATH_BYTES = 4096
"""Size of a page of memory: a path is read up to the end of its page."""

_KINDS_OF_SYSTEM_CALLS: Mapping[str, Mapping[int, str]] = {
    "x86_64": {
        0: "read", 2: "open", 7: "poll", 23: "select", 35: "sleep", 45: "recv", 61: "child",
        202: "futex", 230: "sleep", 232: "poll", 247: "child", 257: "openat", 270: "select",
        271: "poll", 281: "poll",
    },
    "aarch64": {
        22: "poll", 56: "openat", 63: "read", 72: "select", 73: "poll", 95: "child", 98: "futex",
        101: "sleep", 115: "sleep", 207: "recv", 260: "child",
    },
}  # fmt: skip
"""Machine -> number of a system call -> its kind.

Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

_WAIT_REASONS = {
    "poll": "which waits for data of other processes",
    "select": "which waits for data of other processes",
    "recv": "which waits for data of other processes",
    "sleep": "which sleeps",
    "child": "which waits for a process that it started",
    "futex": "which waits for a lock or another thread",
}


class Root(NamedTuple):
    """A process to sample, with all its descendants.

    Attributes:
        rank: Its rank; -1 for the only program of a host.
        pid: Its process id.
    """

    rank: int
    pid: int


class Stat(NamedTuple):
    """A process by proc(5), ``stat``.

    Attributes:
        parent: The parent's process id.
        state: For example ``"S"``.
        started: Start time.
        cpu: Seconds of CPU time of the process itself.
        children: Seconds of CPU time of its ended children.
        faults: Major page faults.
    """

    parent: int
    state: str
    started: str
    cpu: float
    children: float
    faults: int


class KernelWait(NamedTuple):
    """The reason for which a process waits.

    Attributes:
        reason: The end of a sentence, for example ``which sleeps``; ``""`` if not known.
        path: The open or read that waits for a path, for example ``open of /data/x``; ``""`` for
            none.
    """

    reason: str
    path: str


class Sampler:
    """Takes samples of this host's processes."""

    def __init__(
        self, py_spy: str, heartbeat: str, pipe: str = "", file: str = "", ras: str = ""
    ) -> None:
        """Take no sample yet.

        Args:
            py_spy: Path of the program; "" without one.
            heartbeat: Path of the script's heartbeat file; "" without one.
            pipe: Path of the FIFO of torch's flight recorder, without the rank; "" without one.
            file: Path of the recorder's file, without the rank.
            ras: Address of NCCL's RAS in the job's variables; "" for NCCL's default.
        """
        self._py_spy = py_spy
        self._heartbeat = heartbeat
        self.recorder = Recorder(pipe, file)
        self._ras = ras

    def sample(self, roots: Sequence[Root], before: Sample | None = None) -> Sample:
        """Sample the roots and all their descendants.

        Args:
            roots: The processes that run on this host.
            before: The last sample; the stacks of processes that have not run since then are
                taken from it. None reads everything.
        """
        at = time.monotonic()
        stats = _all_stats()
        processes: dict[int, Process] = {}
        for root in roots:
            for pid in _descendants(stats, [root.pid]):
                old = before.processes.get(pid) if before is not None else None
                processes[pid] = self._process(pid, stats[pid], old)
        running = tuple(sorted(root.pid for root in roots))
        heartbeat = written_at(self._heartbeat)
        writes = _writes_of(roots, processes)
        return Sample(at, running, processes, bytes_of(processes), heartbeat, writes)

    def descendants(self, root: Root) -> tuple[int, ...]:
        """Return the ids of a root and of all its descendants."""
        return tuple(_descendants(_all_stats(), [root.pid]))

    def writes(self, roots: Sequence[Root]) -> Mapping[int, int] | None:
        """Count the writes of each main thread, without a whole sample; as ``Sample.writes``.

        Returns:
            Process id -> calls of write(2); None if they do not measure the output of the ranks.
        """
        pids = _descendants(_all_stats(), [root.pid for root in roots])
        return _writes_of(roots, tuple(pids))

    def _process(self, pid: int, now: Stat, old: Process | None) -> Process:
        """Sample one process; facts that cannot be read have the defaults of ``Process``.

        Args:
            pid: The process.
            now: Its stat.
            old: The same process in the last sample; None for none.
        """
        python, threads = _is_python(pid), _threads(pid)
        # Read before a request for the stack, which may wake the process.
        wait = kernel_wait(pid, now.state)
        stack: tuple[Thread, ...] = ()
        if python:
            ran = threads[pid].ran if pid in threads else 0
            times = (now.started, now.cpu, ran)
            if old is not None and ran > 0 and (old.started, old.cpu, old.main.ran) == times:
                # The process has not run since the last sample, so its stack is the same.
                stack = old.stack
            stack = stack or self._stack(pid, now.state)
        # Bytes of read(2), write(2) and their kin; not those of recv(2). The first two lines of the
        # file are "rchar: N" and "wchar: N".
        moved = 0
        for row in text_of(f"/proc/{pid}/io").splitlines()[:2]:
            _, _, count = row.partition(":")
            moved += int(count)
        writes = -1
        # Without py-spy the main thread itself writes its stacks (faulthandler), so its writes say
        # nothing.
        if python and self._py_spy:
            with contextlib.suppress(OSError, ValueError, StopIteration):
                writes = _count_writes(pid)
        return Process(
            started=now.started,
            python=python,
            cpu=now.cpu,
            threads=threads,
            children=now.children,
            moved=moved,
            stack=stack,
            sleeps=python and (wait.reason == _WAIT_REASONS["sleep"] or waits_for_lock(stack)),
            state=now.state,
            waits=wait.reason,
            path=wait.path,
            writes=writes,
            faults=now.faults,
        )

    def _stack(self, pid: int, state: str) -> tuple[Thread, ...]:
        """Read the Python stacks of a process, without stopping it; () if they cannot be read."""
        if self._py_spy:
            return stacks.from_py_spy(self._spy(pid, _SPY_SECONDS, "--nonblocking", "--locals"))
        if state in _STOPPED_STATES:
            # A stopped process answers no signal.
            return ()
        return stacks.from_faulthandler(signals.ask(pid))

    def _spy(self, pid: int, seconds: float, *options: str) -> str:
        """Run ``py-spy dump --json``; return its output, ``""`` if it fails or is too slow.

        Args:
            pid: The process to read.
            seconds: Limit of the time.
            options: More options of py-spy.
        """
        words = (self._py_spy, "dump", "--pid", str(pid), "--json", *options)
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=max(_LEAST_SPY, seconds),
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode("utf-8", "replace")

    def native_stacks(self, roots: Sequence[Root]) -> Mapping[int, tuple[Thread, ...]]:
        """Read the stacks with frames of compiled code, by py-spy, within six seconds in all.

        Holds each process for a moment.

        Returns:
            Process id -> stacks. Processes that are stopped, are not Python, or are not read in
            time are left out; {} without py-spy.
        """
        native_stacks: dict[int, tuple[Thread, ...]] = {}
        if not self._py_spy:
            return native_stacks
        deadline = time.monotonic() + _NATIVE_SECONDS
        stats = _all_stats()
        for pid in _descendants(stats, [root.pid for root in roots]):
            # py-spy holds the process meanwhile. A stopped process cannot be held.
            if stats[pid].state in _STOPPED_STATES:
                continue
            # The first try may fail, if the process is in a place that cannot be unwound.
            for _ in range(_NATIVE_TRIES):
                left = deadline - time.monotonic()
                if left <= 0 or native_stacks.get(pid) or not _is_python(pid):
                    break
                native_stacks[pid] = stacks.from_py_spy(self._spy(pid, left, "--native"))
        return native_stacks

    def rows(
        self,
        roots: Sequence[Root],
        host: str,
        sample: Sample,
        native_stacks: Mapping[int, tuple[Thread, ...]],
    ) -> list[Row]:
        """Return the place of each rank, in the order of the roots.

        Args:
            roots: The ranks.
            host: Name of this host for people.
            sample: The sample.
            native_stacks: From ``native_stacks``; {} for none.
        """
        stats = _all_stats()
        rows = []
        for root in roots:
            # A shell in front of the program has no Python stack; its child does.
            pid = root.pid
            threads: tuple[Thread, ...] = ()
            for descendant in _descendants(stats, [root.pid]):
                process = sample.processes.get(descendant)
                if process is not None and process.stack:
                    pid, threads = descendant, process.stack
                    break
            state = stats[pid].state if pid in stats else ""
            state, wait = _state_and_wait(pid, state, sample)
            rank_sample = RankSample(
                threads, state, wait.reason, wait.path, native_stacks.get(pid, ())
            )
            rows.append(row_of(root.rank, host, rank_sample))
        return rows

    def report(
        self,
        roots: Sequence[Root],
        sample: Sample,
        native_stacks: Mapping[int, tuple[Thread, ...]],
    ) -> str:
        """Return the stacks of all processes as a text for people.

        Args:
            roots: The ranks.
            sample: The sample, with stacks of Python.
            native_stacks: Stacks with compiled code, which are shown instead if there are any.
        """
        stats = _all_stats()
        lines: list[str] = []
        for root in roots:
            if root.rank >= 0:
                lines.append(f"=== rank {root.rank}")
            else:
                lines.append("=== the program")
            for pid in _descendants(stats, [root.pid]):
                now = stats[pid]
                state, wait = _state_and_wait(pid, now.state, sample)
                doing = ", ".join(filter(None, (f"state {state}", wait.reason, wait.path)))
                name = text_of(f"/proc/{pid}/comm").strip() or "ended"
                lines.append(f"--- process {pid} ({name}), {doing}, {now.cpu:.1f} s of CPU time")
                threads = native_stacks.get(pid, ())
                if not threads and pid in sample.processes:
                    threads = sample.processes[pid].stack
                lines += stacks.lines(threads)
        return "\n".join(lines) + "\n"

    def ras(self) -> str:
        """Return the report of NCCL's RAS; "" without an answer."""
        return nccl_report(_NCCL_SECONDS, self._ras)


def _all_stats() -> dict[int, Stat]:
    """Return process id -> proc(5), ``stat``, of every process that can be seen."""
    stats = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  (names, not paths)
        if name.isdecimal():
            # A process may end between the two reads.
            with contextlib.suppress(OSError, ValueError, IndexError):
                stats[int(name)] = _stat(int(name))
    return stats


def _stat(pid: int) -> Stat:
    """Read proc(5), ``stat``, of a process.

    Raises OSError, ValueError or IndexError if the process is gone.
    """
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    # The second field is the program's name in parentheses, which may hold blanks. The list begins
    # behind it, with the third field of proc(5).
    fields = text.rpartition(")")[2].split()
    user, system, children_user, children_system = (int(field) for field in fields[_STAT_TIMES])
    return Stat(
        parent=int(fields[_STAT_PARENT]),
        state=fields[_STAT_STATE],
        started=fields[_STAT_STARTED],
        cpu=(user + system) / _TICKS_PER_SECOND,
        children=(children_user + children_system) / _TICKS_PER_SECOND,
        faults=int(fields[_STAT_MAJOR_FAULTS]),
    )


# Places of fields behind the program's name: three less than the numbers in proc(5), stat.
_STAT_STATE = 0
_STAT_PARENT = 1
_STAT_MAJOR_FAULTS = 9
_STAT_TIMES = slice(11, 15)  # utime, stime, cutime, cstime, in clock ticks
_STAT_STARTED = 19


def _descendants(stats: Mapping[int, Stat], roots: Sequence[int]) -> Iterator[int]:
    """Yield the running roots and their running descendants, parents first, each once.

    Args:
        stats: All processes of the host, from ``_all_stats``.
        roots: Process ids; a root that is not in ``stats`` is left out.
    """
    children: dict[int, list[int]] = {}
    for pid, now in stats.items():
        children.setdefault(now.parent, []).append(pid)
    waiting = [pid for pid in roots if pid in stats]
    # A root may be a descendant of another root. A number that the kernel gave to a new process
    # between two reads may even make a circle.
    done: set[int] = set()
    while waiting:
        pid = waiting.pop(0)
        if pid in done:
            continue
        done.add(pid)
        # An ended process may still have children that run.
        waiting += sorted(children.get(pid, ()))
        if stats[pid].state not in _ENDED_STATES:
            yield pid


def _is_python(pid: int) -> bool:
    """Return whether the program of a process is named python...; False if it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/exe").rpartition("/")[2].startswith("python")
    except OSError:
        return False


def _threads(pid: int) -> dict[int, CpuTime]:
    """Return thread -> its time, the main thread first.

    {} if the kernel does not count times, or if the process or its main thread is gone.
    Source: Linux, sched-stats.rst.
    """
    times = {}
    with contextlib.suppress(OSError, ValueError):
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208  (names)
        # The main thread has the number of the process.
        threads.sort(key=lambda thread: thread != pid)
        # A file has three numbers: nanoseconds on a CPU, nanoseconds of waiting for one, turns.
        for thread in threads:
            path = Path(f"/proc/{pid}/task/{thread}/schedstat")
            # A thread may have ended since it was listed.
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                ran, waited, _ = path.read_text(encoding="ascii").split()
                times[thread] = CpuTime(int(ran), int(waited))
    if pid not in times:
        return {}
    return times


def _writes_of(roots: Sequence[Root], pids: Iterable[int]) -> Mapping[int, int] | None:
    """Count the calls of write(2) by the main thread of each process.

    Args:
        roots: The ranks, or the only program.
        pids: The roots and their descendants.

    Returns:
        Process id -> number of calls. None if the calls do not measure the output: a root is not
        Python, where any thread may print for its work; there is no root; a process has ended
        meanwhile; or the kernel does not count.
    """
    calls: dict[int, int] = {}
    try:
        for pid in pids:
            calls[pid] = _count_writes(pid)
    except (OSError, ValueError, StopIteration):
        return None
    if not roots or not all(_is_python(root.pid) for root in roots):
        return None
    return calls


def _count_writes(pid: int) -> int:
    """Return the number of calls of write(2) by the main thread of a process.

    Source: proc(5), ``task/TID/io``, ``syscw``. Raises OSError, ValueError or StopIteration if the
    process is gone, or if the kernel does not count.
    """
    rows = Path(f"/proc/{pid}/task/{pid}/io").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("syscw:"))


def _state_and_wait(pid: int, state: str, sample: Sample) -> tuple[str, KernelWait]:
    """Return the state of a process and the reason of its wait, as they were at the sample.

    They are read anew for a process that is stopped now, or that the sample does not have.

    Args:
        pid: The process.
        state: Its present state, a letter of proc(5).
        sample: The sample.
    """
    process = sample.processes.get(pid)
    # Reading the stacks of compiled code has held the process, which then runs for a moment: its
    # present state would mislead.
    if process is not None and process.state and state not in _STOPPED_STATES:
        return process.state, KernelWait(process.waits, process.path)
    return state, kernel_wait(pid, state)


def kernel_wait(pid: int, state: str) -> KernelWait:
    """Read from proc(5) for what the main thread of a process waits.

    Args:
        pid: The process.
        state: Its state, a letter of proc(5).

    Returns:
        The reason or the path; both ``""`` if the kernel does not show them.
    """
    if state == "R":
        return KernelWait("which computes or spins", "")
    if state == "D":
        function = text_of(f"/proc/{pid}/wchan").strip() or "not known"
        return KernelWait(f"which waits in the kernel ({function})", "")
    try:
        # For example ``202 0x7f1c 0x189 ...``: the system call and its arguments.
        words = Path(f"/proc/{pid}/syscall").read_text(encoding="ascii").split()
        call = _KINDS_OF_SYSTEM_CALLS.get(os.uname().machine, {}).get(int(words[0]), "")
        arguments = [int(word, 16) for word in words[1 : 1 + _ARGUMENTS]]
    except (OSError, ValueError):
        return KernelWait("", "")
    if call in ("open", "openat") and len(arguments) == _ARGUMENTS:
        # The path is the second argument of openat, after the directory.
        address = arguments[1] if call == "openat" else arguments[0]
        path = _read_text_at(pid, address)
        if path:
            path = f"open of {path}"
        return KernelWait("", path)
    if call == "read" and arguments:
        return _describe_read(pid, arguments[0])
    if call == "select" and arguments[:1] == [0]:
        # A select of no descriptor: so time.sleep waits before Python 3.11.
        call = "sleep"
    return KernelWait(_WAIT_REASONS.get(call, ""), "")


def _describe_read(pid: int, descriptor: int) -> KernelWait:
    """Describe the wait of a process that reads from a descriptor.

    A FIFO is a path, such as ``read of /tmp/queue (a FIFO)``: another process may never open it.
    Other descriptors are a reason, such as ``which reads a pipe``. Both are ``""`` if the
    descriptor cannot be examined.
    """
    link = f"/proc/{pid}/fd/{descriptor}"
    try:
        path = os.readlink(link)
        is_fifo = path.startswith("/") and stat.S_ISFIFO(os.stat(link).st_mode)  # noqa: PTH116
    except OSError:
        return KernelWait("", "")
    if is_fifo:
        return KernelWait("", f"read of {path} (a FIFO)")
    # For example ``pipe:[4026]``.
    kind = path.partition("[")[0]
    source = {"pipe:": "a pipe", "socket:": "a socket"}.get(kind, path)
    return KernelWait(f"which reads {source}", "")


def _read_text_at(pid: int, address: int) -> str:
    """Read the text at an address in the memory of a process, up to its page's end.

    ``""`` if the memory cannot be read.
    """
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(address)
            rest_of_page = memory.read(_PATH_BYTES - address % _PATH_BYTES)
        text, _, _ = rest_of_page.partition(b"\0")
        return text.decode("utf-8", "replace")
    except (OSError, ValueError, OverflowError):
        return ""
