"""Two looks at the processes of a host: did any of them make progress in between? Pure.

CPU time of a rank is no sign of life: threads that wait in NCCL or MPI spin. These are signs:

- a stack that is another one, or another value of a variable in it;
- CPU time of processes that are not Python: a compiler works while its rank waits for it;
- bytes that were read or written: a checkpoint, data;
- bytes of TCP connections: a download into memory reads no file;
- a heartbeat file that the script writes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple

from trainworks_launcher.supervise.hang.stacks import Thread

WORKING_SHARE = 0.25
"""Share of one CPU from which on a process that is not Python counts as working. Monitors beside a job take less."""

BYTES_PER_SECOND = 256 * 1024
"""Rate from which on bytes count. Stores, keep-alives and monitors of a job that hangs move less."""


class Process(NamedTuple):
    """One process at one moment.

    Attributes:
        started: Its start time; with its id it names the process.
        python: It runs Python.
        cpu: Seconds of CPU time that it took itself.
        ran: Nanoseconds that its main thread ran; 0 where the kernel does not say.
        children: Seconds that its ended children took.
        moved: Bytes that it read and wrote, of files and pipes; 0 where the kernel does not say.
        stack: Its Python stacks; () where there are none or they cannot be read.
    """

    started: str
    python: bool = False
    cpu: float = 0.0
    ran: int = 0
    children: float = 0.0
    moved: int = 0
    stack: tuple[Thread, ...] = ()


class Look(NamedTuple):
    """The processes of the ranks of a host at one moment.

    Attributes:
        at: Seconds of the monotonic clock.
        roots: Process ids of the ranks, or of the only program.
        processes: Process id -> process: the ranks and what descends from them.
        connections: Bytes through each TCP connection of these processes.
        heartbeat: What changes when the heartbeat file is written; 0 without one.
    """

    at: float
    roots: tuple[int, ...] = ()
    processes: Mapping[int, Process] = MappingProxyType({})
    connections: Mapping[int, int] = MappingProxyType({})
    heartbeat: int = 0


def sign_of_life(before: Look, after: Look) -> str:
    """Return what moved between two looks, for a person; ``""`` if nothing did."""
    seconds = max(after.at - before.at, 0.001)
    if after.heartbeat != before.heartbeat:
        return "the heartbeat file was written"
    if after.roots != before.roots:
        return "the ranks are other processes"
    pairs: list[tuple[Process, Process]] = []
    new: list[Process] = []
    for pid, process in after.processes.items():
        old = before.processes.get(pid)
        if old is not None and old.started == process.started:
            pairs.append((process, old))
        else:
            new.append(process)
    if any(process.stack for process in new):
        return "a Python process was started"
    for process, old in pairs:
        if process.stack and old.stack and process.stack != old.stack:
            return "a stack changed"
    working = sum(process.cpu for process in new if not process.stack)
    for process, old in pairs:
        working += max(0.0, process.children - old.children)
        # Without its stack there is no telling whether a Python process waits or works.
        if not (process.stack and old.stack):
            working += max(0.0, process.cpu - old.cpu)
    if working >= WORKING_SHARE * seconds:
        return "other programs that the ranks started take CPU time"
    if sum(max(0, process.moved - old.moved) for process, old in pairs) >= BYTES_PER_SECOND * seconds:
        return "bytes were read or written"
    known = before.connections
    if sum(max(0, count - known.get(one, 0)) for one, count in after.connections.items()) >= BYTES_PER_SECOND * seconds:
        return "bytes came or went over the network"
    return ""
