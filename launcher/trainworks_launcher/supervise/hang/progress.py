"""Compare two samples of a host's processes: did any of them make progress in between? Pure.

CPU time of a rank is no sign of progress: threads that wait in NCCL or MPI spin. These are signs:

- A stack that has changed, or a value of a variable in it. Not a stack that came before in the same
  stall, as in an endless loop of a few lines. And not that of a process that only polls: its main
  thread sleeps or waits for a lock in both samples, hardly runs, and is in the same functions of
  the user's code, called by the same step of a package. (A package's loop calls a worker of a slow
  data loader again and again.)
- CPU time of processes that are not Python: a compiler works while its rank waits. On a crowded
  host, or in a container with its CPU time used up, their wait for a CPU counts, too: see
  ``_share``.
- A main thread that takes CPU time and writes something, however little: a worker of a pool, with
  tasks that all look alike. A thread that waits for ever does at most one of the two.
- Bytes that were read or written: a checkpoint, data.
- Bytes of TCP connections: a download into memory reads no file.
- An import that waits for pages or for a CPU: on an image that is fetched while the job runs, one
  import may take minutes.
- A heartbeat file that the script writes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.supervise.hang.stacks import Thread, main_thread

WORKING_SHARE = 0.25
"""Share of one CPU from which a process that is not Python counts as working.

Monitors beside a job take less.
"""

BYTES_PER_SECOND = 256 * 1024
"""Rate from which bytes count. Stores, keep-alives and monitors of a job that hangs move less."""

POLLING_SHARE = 0.05
"""Share of one CPU below which a main thread that sleeps in a sample only polls."""

_NANOSECONDS = 1e9
"""In a second."""

_LEAST_BETWEEN = 0.001
"""Seconds between two samples that are reckoned with at least."""


class CpuTime(NamedTuple):
    """Time of one thread.

    Attributes:
        ran: Nanoseconds on a CPU.
        waited: Nanoseconds in which the thread was ready to run, without a CPU.
    """

    ran: int
    waited: int


class Process(NamedTuple):
    """One process at one moment.

    Attributes:
        started: Its start time, which with its id identifies the process.
        python: Whether it runs Python.
        cpu: Seconds of CPU time of the process itself.
        threads: Thread -> its time, the main thread first; empty if the kernel does not count it.
        children: Seconds of CPU time of its ended children.
        moved: Bytes that it read and wrote, of files and pipes; 0 if the kernel does not count.
        stack: Its Python stacks; () for none, or if they cannot be read.
        sleeps: Whether its main thread slept, or waited for a lock.
        state: The letter of proc(5); ``""`` if not known.
        waits: The kernel's reason for the main thread's wait, as ``KernelWait.reason``.
        path: The open or read that the main thread waits for, as ``KernelWait.path``.
        writes: Calls of write(2) by its main thread; -1 if not known, or if the sampling itself
            causes them.
        faults: Its waits for a page that had to be read (proc(5), ``majflt``).
    """

    started: str
    python: bool = False
    cpu: float = 0.0
    threads: Mapping[int, CpuTime] = MappingProxyType({})
    children: float = 0.0
    moved: int = 0
    stack: tuple[Thread, ...] = ()
    sleeps: bool = False
    state: str = ""
    waits: str = ""
    path: str = ""
    writes: int = -1
    faults: int = 0

    @property
    def main(self) -> CpuTime:
        """Time of the main thread; zeros if the kernel does not count it."""
        return next(iter(self.threads.values()), CpuTime(0, 0))


class Sample(NamedTuple):
    """The processes of the ranks of a host at one moment.

    Attributes:
        at: Seconds of the monotonic clock.
        roots: Process ids of the ranks, or of the only program.
        processes: Process id -> process: the ranks and their descendants.
        connections: Bytes through each TCP connection of these processes.
        heartbeat: A value that changes when the heartbeat file is written; 0 without one.
        writes: Process -> calls of write(2) by its main thread; None if they do not measure the
            output of the ranks.
    """

    at: float
    roots: tuple[int, ...] = ()
    processes: Mapping[int, Process] = MappingProxyType({})
    connections: Mapping[int, int] = MappingProxyType({})
    heartbeat: int = 0
    writes: Mapping[int, int] | None = None


class StackHistory:
    """The stacks of each process in one stall."""

    def __init__(self) -> None:
        """Start without stacks."""
        self._stacks: dict[tuple[int, str], set[tuple[Thread, ...]]] = {}

    def add(self, sample: Sample) -> None:
        """Remember the stacks of a sample.

        Forgets those of a process that has many: such a process does not only repeat itself.
        """
        for pid, process in sample.processes.items():
            stacks = self._stacks.setdefault((pid, process.started), set())
            if len(stacks) >= _MAX_STACKS:
                stacks.clear()
            stacks.add(process.stack)

    def has(self, pid: int, process: Process) -> bool:
        """Return whether a process had this stack before, with the same values of variables.

        False if the variables cannot be read.
        """
        main = main_thread(process.stack)
        if main is None or main.values == 0:
            return False
        return process.stack in self._stacks.get((pid, process.started), ())


_MAX_STACKS = 64
"""Different stacks of a process that are remembered."""


class _Pair(NamedTuple):
    """One process in two samples."""

    now: Process
    before: Process


def find_progress(before: Sample, after: Sample, history: StackHistory | None = None) -> str:
    """Find progress of a host between two samples.

    Args:
        before: The first sample.
        after: The second one.
        history: The stacks of this stall: a stack that was there before is no progress. None counts
            every changed stack.

    Returns:
        The progress in words, for example ``a stack changed``; ``""`` for none.
    """
    seconds = max(after.at - before.at, _LEAST_BETWEEN)
    if after.heartbeat != before.heartbeat:
        return "the heartbeat file was written"
    if after.roots != before.roots:
        return "the ranks are other processes"
    pairs: list[_Pair] = []  # the processes of both samples
    fresh_stacks: list[_Pair] = []  # those with a stack that this stall has not had
    new: list[Process] = []  # the processes of the second sample only
    for pid, process in after.processes.items():
        old = before.processes.get(pid)
        if old is None or old.started != process.started:
            new.append(process)
            continue
        pair = _Pair(process, old)
        pairs.append(pair)
        if history is None or not history.has(pid, process):
            fresh_stacks.append(pair)
    # Other programs that start again and again, such as a monitor's, are no progress.
    if any(process.stack for process in new):
        return "a Python process was started"
    if any(_is_importing(pair, seconds) for pair in pairs):
        return "a module is being imported"
    for pair in fresh_stacks:
        stack, old_stack = pair.now.stack, pair.before.stack
        # An empty stack could not be read.
        is_changed = stack and old_stack and stack != old_stack
        if is_changed and not _only_polls(pair, seconds):
            return "a stack changed"
    if any(_works_and_writes(pair, seconds) for pair in pairs):
        return "a main thread works and writes"
    if _work_of_programs(new, pairs, seconds) >= WORKING_SHARE * seconds:
        return "other programs that the ranks started take CPU time"

    moved = sum(max(0, pair.now.moved - pair.before.moved) for pair in pairs)
    if moved >= BYTES_PER_SECOND * seconds:
        return "bytes were read or written"
    transferred = 0
    for inode, count in after.connections.items():
        transferred += max(0, count - before.connections.get(inode, 0))
    if transferred >= BYTES_PER_SECOND * seconds:
        return "bytes came or went over the network"
    return ""


def _works_and_writes(pair: _Pair, seconds: float) -> bool:
    """Return whether the main thread of a process took CPU time, and wrote something."""
    wrote = 0 <= pair.before.writes < pair.now.writes
    return wrote and _running_share(pair.now.main, pair.before.main, seconds) >= WORKING_SHARE


def _work_of_programs(new: Sequence[Process], pairs: Sequence[_Pair], seconds: float) -> float:
    """Return the seconds of CPU time that the processes other than Python took, or wanted.

    Args:
        new: Processes that the first sample does not have.
        pairs: The others.
        seconds: Time between the samples.
    """
    work = 0.0
    for process in new:
        if not process.stack:
            work += _wanted_cpu_seconds(_Pair(process, Process("")), seconds)
    for pair in pairs:
        work += max(0.0, pair.now.children - pair.before.children)
        # A process without a stack is not Python, or its stack cannot be read. The work of a
        # Python process may be a wait that spins.
        if not (pair.now.stack and pair.before.stack):
            work += _wanted_cpu_seconds(pair, seconds)
    return work


def _is_importing(pair: _Pair, seconds: float) -> bool:
    """Return whether Python was importing a module in both samples, and went on with that.

    It went on if it waited for pages of a file, or took a CPU or waited for one.

    Args:
        pair: The process.
        seconds: Time between the samples.
    """
    for process in pair:
        main = main_thread(process.stack)
        if main is None or not main.frames:
            return False
        # The import itself is the innermost call: a module that runs its own lines has another one.
        if not main.frames[0].file.startswith("<frozen importlib"):
            return False
    if pair.now.faults > pair.before.faults or pair.now.state == "D":
        return True
    nanoseconds = sum(pair.now.main) - sum(pair.before.main)
    return nanoseconds >= POLLING_SHARE * seconds * _NANOSECONDS


def _only_polls(pair: _Pair, seconds: float) -> bool:
    """Return whether a process only polled, although values of its variables have changed.

    Threads beside the main one may run, unless they work.
    """
    now, before = pair
    if not (now.sleeps or before.sleeps):
        return False
    # 0: the kernel does not count the time of threads.
    if not 0 < before.main.ran <= now.main.ran:
        return False
    if _running_share(now.main, before.main, seconds) >= POLLING_SHARE:
        return False
    if _wanted_cpu_seconds(pair, seconds) >= WORKING_SHARE * seconds:
        return False
    if _own_functions(now.stack) != _own_functions(before.stack):
        return False
    return _outer_hash(now.stack) == _outer_hash(before.stack)


def _outer_hash(threads: Sequence[Thread]) -> int:
    """Return ``Thread.outer`` of the main thread; 0 without one."""
    main = main_thread(threads)
    if main is None:
        return 0
    return main.outer


def _wanted_cpu_seconds(pair: _Pair, seconds: float) -> float:
    """Return the seconds of CPU time that a process would have taken with a CPU for each thread.

    On a busy host that is more than the CPU time that the process took.

    Args:
        pair: The process.
        seconds: Time between the samples.
    """
    missed = 0.0
    for thread, now in pair.now.threads.items():
        before = pair.before.threads.get(thread, CpuTime(0, 0))
        took = (now.ran - before.ran) / _NANOSECONDS
        wanted = _running_share(now, before, seconds) * seconds
        missed += max(0.0, wanted - took)
    return max(0.0, pair.now.cpu - pair.before.cpu) + missed


def _running_share(now: CpuTime, before: CpuTime, seconds: float) -> float:
    """Return the share of the time in which a thread ran, of the time in which it could: 0 to 1.

    Time in which other threads had the CPU counts neither for nor against a thread. So a thread
    that always works has a share of 1, however little CPU time it gets. A thread that polls has a
    small share, however long it waits for a CPU.

    Args:
        now: The time of the thread.
        before: The same, earlier.
        seconds: Time between the two.
    """
    ran = (now.ran - before.ran) / _NANOSECONDS
    waited = (now.waited - before.waited) / _NANOSECONDS
    if ran <= 0:
        return 0.0
    return ran / max(seconds - waited, ran)


def _own_functions(threads: Sequence[Thread]) -> list[tuple[str, str]]:
    """Return the user's own functions on the main thread's stack: (file, name) of each."""
    main = main_thread(threads)
    if main is None:
        return []
    return [(frame.file, frame.name) for frame in main.frames if frame.is_own]
