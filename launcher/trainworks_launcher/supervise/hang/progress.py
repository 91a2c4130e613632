"""Two looks at the processes of a host: did any of them make progress in between? Pure.

CPU time of a rank is no sign of life: threads that wait in NCCL or MPI spin. These are signs:

- a stack that is another one, or another value of a variable in it. Not one that was seen before in
  the same stall, as in an endless loop of a few lines. And not of a process that only polls: its
  main thread sleeps or waits for a lock when it is looked at, hardly runs, and is in the same
  functions of the user's code, called by the same step of a package: a worker of a data loader
  whose data is slow is called again and again;
- CPU time of processes that are not Python: a compiler works while its rank waits for it. On a
  crowded host, or in a container whose CPU time is used up, it counts what they would have taken:
  see ``_share``;
- a main thread that takes CPU time and writes something, however little: the results of a worker of
  a pool, whose tasks all look alike. One that waits for ever does one of the two at most;
- bytes that were read or written: a checkpoint, data;
- bytes of TCP connections: a download into memory reads no file;
- an import that waits for pages or for a CPU: on an image that is fetched while
  it runs one may take minutes;
- a heartbeat file that the script writes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.supervise.hang.stacks import Thread, main_thread

WORKING_SHARE = 0.25
"""Share of one CPU from which on a process that is not Python counts as working.

Monitors beside a job take less.
"""

BYTES_PER_SECOND = 256 * 1024
"""Rate from which on bytes count.

Stores, keep-alives and monitors of a job that hangs move less.
"""


POLLING_SHARE = 0.05
"""Share of one CPU below which a main thread that sleeps again and again does nothing but look
whether it may go on.
"""


class Process(NamedTuple):
    """One process at one moment.

    Attributes:
        started: Its start time; with its id it names the process.
        python: It runs Python.
        cpu: Seconds of CPU time that it took itself.
        threads: Thread -> (nanoseconds that it ran, and that it was ready to run without a CPU),
            the main one first; empty where the kernel does not say.
        children: Seconds that its ended children took.
        moved: Bytes that it read and wrote, of files and pipes; 0 where the kernel does not say.
        stack: Its Python stacks; () where there are none or they cannot be read.
        sleeps: Its main thread was asleep, or waited for a lock.
        state: The letter of proc(5); ``""`` where it is not known.
        waits: The kernel's words of what its main thread waited for.
        path: The file that the main thread was in the middle of opening, or the FIFO that it read.
        wrote: How often its main thread called write(2); -1 where that is not
            known, or not its own doing.
        faults: How often it waited for a page that had to be read (proc(5), ``majflt``).
    """

    started: str
    python: bool = False
    cpu: float = 0.0
    threads: Mapping[int, tuple[int, int]] = MappingProxyType({})
    children: float = 0.0
    moved: int = 0
    stack: tuple[Thread, ...] = ()
    sleeps: bool = False
    state: str = ""
    waits: str = ""
    path: str = ""
    wrote: int = -1
    faults: int = 0

    @property
    def main(self) -> tuple[int, int]:
        """What ``threads`` has of the main thread; zeros where the kernel does not say."""
        return next(iter(self.threads.values()), (0, 0))


class Look(NamedTuple):
    """The processes of the ranks of a host at one moment.

    Attributes:
        at: Seconds of the monotonic clock.
        roots: Process ids of the ranks, or of the only program.
        processes: Process id -> process: the ranks and what descends from them.
        connections: Bytes through each TCP connection of these processes.
        heartbeat: What changes when the heartbeat file is written; 0 without one.
        wrote: Process -> how often its main thread called write(2); None where
            that is no measure of its output.
    """

    at: float
    roots: tuple[int, ...] = ()
    processes: Mapping[int, Process] = MappingProxyType({})
    connections: Mapping[int, int] = MappingProxyType({})
    heartbeat: int = 0
    wrote: Mapping[int, int] | None = None


class Seen:
    """The stacks of each process in one stall."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._stacks: dict[tuple[int, str], set[tuple[Thread, ...]]] = {}

    def add(self, look: Look) -> None:
        """Remember the stacks of a look.

        A process that had too many of them does not only repeat itself.
        """
        for pid, process in look.processes.items():
            known = self._stacks.setdefault((pid, process.started), set())
            if len(known) >= _STACKS:
                known.clear()
            known.add(process.stack)

    def has(self, pid: int, process: Process) -> bool:
        """Return whether a process had this stack before, variables included.

        False where they are not known.
        """
        main = main_thread(process.stack)
        known = main is not None and main.values != 0
        return known and process.stack in self._stacks.get((pid, process.started), ())


_STACKS = 64


def sign_of_life(before: Look, after: Look, seen: Seen | None = None) -> str:
    """Return what moved between two looks, for a person; ``""`` if nothing did.

    Args:
        before: The first look.
        after: The second.
        seen: What was seen in this stall; None counts every other stack as a sign.
    """
    seconds = max(after.at - before.at, 0.001)
    if after.heartbeat != before.heartbeat:
        return "the heartbeat file was written"
    if after.roots != before.roots:
        return "the ranks are other processes"
    pairs: list[tuple[Process, Process]] = []
    repeats: set[int] = set()
    new: list[Process] = []
    for pid, process in after.processes.items():
        old = before.processes.get(pid)
        if old is not None and old.started == process.started:
            pairs.append((process, old))
            repeats |= {id(process)} if seen is not None and seen.has(pid, process) else set()
        else:
            new.append(process)
    if any(process.stack for process in new):
        return "a Python process was started"
    if any(_imports(process, old, seconds) for process, old in pairs):
        return "a module is being imported"
    for process, old in pairs:
        moved = process.stack and old.stack and process.stack != old.stack
        if moved and id(process) not in repeats and not _only_polls(process, old, seconds):
            return "a stack changed"
    if any(
        0 <= old.wrote < process.wrote and _share(process.main, old.main, seconds) >= WORKING_SHARE
        for process, old in pairs
    ):
        return "a main thread works and writes"
    working = sum(_wanted(process, Process(""), seconds) for process in new if not process.stack)
    for process, old in pairs:
        working += max(0.0, process.children - old.children)
        # Without its stack there is no telling whether a Python process waits or works.
        if not (process.stack and old.stack):
            working += _wanted(process, old, seconds)
    if working >= WORKING_SHARE * seconds:
        return "other programs that the ranks started take CPU time"
    if (
        sum(max(0, process.moved - old.moved) for process, old in pairs)
        >= BYTES_PER_SECOND * seconds
    ):
        return "bytes were read or written"
    known = before.connections
    if (
        sum(max(0, count - known.get(one, 0)) for one, count in after.connections.items())
        >= BYTES_PER_SECOND * seconds
    ):
        return "bytes came or went over the network"
    return ""


def _imports(process: Process, old: Process, seconds: float) -> bool:
    """Return whether Python is importing a module, and waits for pages or a CPU
    meanwhile, or takes one.

    The import itself is the innermost call: a module whose own lines run has another one.
    """
    mains = main_thread(process.stack), main_thread(old.stack)
    if not all(
        main is not None and main.frames and main.frames[0].file.startswith("<frozen importlib")
        for main in mains
    ):
        return False
    took = sum(process.main) - sum(old.main)
    return (
        process.faults > old.faults or process.state == "D" or took >= POLLING_SHARE * seconds * 1e9
    )


def _only_polls(process: Process, old: Process, seconds: float) -> bool:
    """Return whether a process did nothing but look now and then whether it may
    go on, whatever it counts meanwhile.

    Threads beside the main one do not change that, unless they work.
    """
    return (
        (process.sleeps or old.sleeps)
        and 0 < old.main[0] <= process.main[0]
        and _share(process.main, old.main, seconds) < POLLING_SHARE
        and _wanted(process, old, seconds) < WORKING_SHARE * seconds
        and _functions(process.stack) == _functions(old.stack)
        and _outer(process.stack) == _outer(old.stack)
    )


def _outer(threads: Sequence[Thread]) -> int:
    main = main_thread(threads)
    return main.outer if main is not None else 0


def _wanted(process: Process, old: Process, seconds: float) -> float:
    """Return the seconds of CPU time that a process would have taken, had each
    of its threads had a CPU for itself.
    """
    missed = 0.0
    for thread, now in process.threads.items():
        before = old.threads.get(thread, (0, 0))
        missed += max(0.0, _share(now, before, seconds) * seconds - (now[0] - before[0]) / 1e9)
    return max(0.0, process.cpu - old.cpu) + missed


def _share(now: tuple[int, int], before: tuple[int, int], seconds: float) -> float:
    """Return how much of the time a thread runs, of that in which it may: 0 to 1.

    It does not count for or against a thread that others had the CPU. So one that works all the
    time has a share of 1 however little it gets, and one that looks now and then whether it may go
    on has a small one however long it waits.
    """
    ran, waited = ((new - old) / 1e9 for new, old in zip(now, before))
    return ran / max(seconds - waited, ran) if ran > 0 else 0.0


def _functions(threads: Sequence[Thread]) -> list[tuple[str, str]]:
    """Return the user's own functions on the main thread's stack."""
    main = main_thread(threads)
    return (
        [(frame.file, frame.name) for frame in main.frames if frame.is_own]
        if main is not None
        else []
    )
