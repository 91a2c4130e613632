"""Looks at the processes of this host: /proc, py-spy or faulthandler. Runs in a thread of its own.

py-spy reads a process's memory without stopping it, so the looks before a verdict cost the ranks
nothing. A process that took no CPU time since the last look has the stack that it had, and is not
read again.
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
from trainworks_launcher.supervise.hang.outlier_rank import Row, row_of
from trainworks_launcher.supervise.hang.progress import Look, Process
from trainworks_launcher.supervise.hang.stacks import Thread, waits_for_lock

_TICKS = os.sysconf("SC_CLK_TCK")
_SPY_SECONDS = 5.0
_NATIVE_SECONDS = 6.0
_NATIVE_TRIES = 2
_NCCL_SECONDS = 3.0
RECORD_SECONDS = 3.0
LONGEST_SECONDS = _SPY_SECONDS + RECORD_SECONDS + _NATIVE_SECONDS + _NCCL_SECONDS
"""How long a host takes at most to look at its ranks for a report."""

_PATH_BYTES = 4096
_SYSCALLS: Mapping[str, Mapping[int, str]] = {
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
"""Machine -> number of a system call -> what it is.

Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

_WAITS = {
    "poll": "which waits for data of other processes",
    "select": "which waits for data of other processes",
    "recv": "which waits for data of other processes",
    "sleep": "which sleeps",
    "child": "which waits for a process that it started",
    "futex": "which waits for a lock or another thread",
}


class Root(NamedTuple):
    """A process to look at, with all that descend from it. rank: -1 for the
    only program of a host.
    """

    rank: int
    pid: int


class Stat(NamedTuple):
    """Of proc(5), ``stat``: parent, state, start time, seconds of CPU time, of itself and of its
    ended children, major page faults.
    """

    parent: int
    state: str
    started: str
    cpu: float
    children: float
    faults: int


class Eyes:
    """How this host's processes are looked at."""

    def __init__(
        self, py_spy: str, heartbeat: str, pipe: str = "", file: str = "", ras: str = ""
    ) -> None:
        """Nothing is looked at yet.

        Args:
            py_spy: Path of the program; "" without one.
            heartbeat: Path of the script's heartbeat file; "" without one.
            pipe: What torch's flight recorder puts a rank behind for its FIFO; "" without one.
            file: The same for its record.
            ras: Address of NCCL's RAS, as the job has it; "" for the usual one.
        """
        self._py_spy = py_spy
        self._heartbeat = heartbeat
        self.recorder = Recorder(pipe, file)
        self._ras = ras

    def look(self, roots: Sequence[Root], before: Look | None = None) -> Look:
        """Look at the roots and all that descends from them.

        Args:
            roots: What runs on this host.
            before: The last look; what has not run since then is taken from it.
                None reads everything.
        """
        at = time.monotonic()
        known = _all_stats()
        found: dict[int, Process] = {}
        for root in roots:
            for pid in _descendants(known, [root.pid]):
                old = before.processes.get(pid) if before is not None else None
                found[pid] = self._process(pid, known[pid], old)
        running = tuple(sorted(root.pid for root in roots))
        return Look(
            at, running, found, bytes_of(found), written_at(self._heartbeat), _wrote(roots, found)
        )

    def below(self, root: Root) -> tuple[int, ...]:
        """Return the ids of a root and of all that descends from it."""
        return tuple(_descendants(_all_stats(), [root.pid]))

    def wrote(self, roots: Sequence[Root]) -> Mapping[int, int] | None:
        """Return what changes when the main thread of a process writes something, as
        ``Look.wrote``: a cheap look.
        """
        return _wrote(roots, tuple(_descendants(_all_stats(), [root.pid for root in roots])))

    def _process(self, pid: int, now: Stat, old: Process | None) -> Process:
        python, threads = _is_python(pid), _threads(pid)
        # Before its stack is asked for, which may wake it.
        waits, path = kernel_words(pid, now.state)
        stack: tuple[Thread, ...] = ()
        if python:
            ran = threads.get(pid, (0, 0))[0]
            same = (
                old is not None
                and (old.started, old.cpu, old.main[0]) == (now.started, now.cpu, ran)
                and ran > 0
            )
            stack = (
                old.stack if same and old is not None and old.stack else self._stack(pid, now.state)
            )
        sleeps = python and (waits == _WAITS["sleep"] or waits_for_lock(stack))
        # Of read(2), write(2) and their kin; not those of recv(2).
        moved = sum(
            int(row.partition(":")[2]) for row in text_of(f"/proc/{pid}/io").splitlines()[:2]
        )
        wrote = -1
        if python and self._py_spy:  # faulthandler has the main thread write its stacks
            with contextlib.suppress(OSError, ValueError, StopIteration):
                wrote = _writes(pid)
        taken = (now.started, python, now.cpu, threads, now.children, moved)
        return Process(*taken, stack, sleeps, now.state, waits, path, wrote, now.faults)

    def _stack(self, pid: int, state: str) -> tuple[Thread, ...]:
        if self._py_spy:
            return stacks.from_py_spy(self._spy(pid, _SPY_SECONDS, "--nonblocking", "--locals"))
        if state in ("T", "t"):
            return ()  # it answers no signal
        return stacks.from_faulthandler(signals.ask(pid))

    def _spy(self, pid: int, seconds: float, *options: str) -> str:
        words = (self._py_spy, "dump", "--pid", str(pid), "--json", *options)
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=max(0.1, seconds),
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode("utf-8", "replace")

    def natives(self, roots: Sequence[Root]) -> Mapping[int, tuple[Thread, ...]]:
        """Return the stacks with those of compiled code, as far as py-spy can read them in time."""
        known = _all_stats()
        deadline = time.monotonic() + _NATIVE_SECONDS
        found: dict[int, tuple[Thread, ...]] = {}
        for pid in _descendants(known, [root.pid for root in roots]):
            # The process is held for that; a stopped one is not read. Now and then a stack cannot
            # be unwound where the process was just then.
            for _ in range(
                _NATIVE_TRIES if self._py_spy and known[pid].state not in ("T", "t") else 0
            ):
                if not found.get(pid) and time.monotonic() < deadline and _is_python(pid):
                    found[pid] = stacks.from_py_spy(
                        self._spy(pid, deadline - time.monotonic(), "--native")
                    )
        return found

    def rows(
        self,
        roots: Sequence[Root],
        host: str,
        seen: Look,
        natives: Mapping[int, tuple[Thread, ...]],
    ) -> list[Row]:
        """Return where each rank is, from a look and from the stacks of compiled code."""
        known = _all_stats()
        found = []
        for root in roots:
            below = _descendants(known, [root.pid])
            pid = next(
                (pid for pid in below if pid in seen.processes and seen.processes[pid].stack),
                root.pid,
            )
            # A shell in front of the program answers nothing; what it started does.
            state = known[pid].state if pid in known else ""
            state, waits, path = _waiting(pid, state, seen)
            threads = seen.processes[pid].stack if pid in seen.processes else ()
            found.append(row_of(root.rank, host, threads, state, waits, path, natives.get(pid, ())))
        return found

    def report(
        self, roots: Sequence[Root], seen: Look, natives: Mapping[int, tuple[Thread, ...]]
    ) -> str:
        """Return the stacks of all processes for a person.

        With those of compiled code where py-spy can read them.
        """
        known = _all_stats()
        lines: list[str] = []
        for root in roots:
            lines.append(f"=== rank {root.rank}" if root.rank >= 0 else "=== the program")
            for pid in _descendants(known, [root.pid]):
                now = known[pid]
                state, waits, path = _waiting(pid, now.state, seen)
                said = ", ".join(filter(None, (f"state {state}", waits, path)))
                name = text_of(f"/proc/{pid}/comm").strip() or "ended"
                lines.append(f"--- process {pid} ({name}), {said}, {now.cpu:.1f} s of CPU time")
                threads = natives.get(pid, ())
                if not threads and pid in seen.processes:
                    threads = seen.processes[pid].stack
                lines += stacks.lines(threads)
        return "\n".join(lines) + "\n"

    def ras(self) -> str:
        """Return what NCCL's RAS says; "" where it does not answer."""
        return nccl_report(_NCCL_SECONDS, self._ras)


def _all_stats() -> dict[int, Stat]:
    """Process id -> what proc(5) says, of every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  (names, not paths)
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[int(name)] = _stat(int(name))
    return found


def _stat(pid: int) -> Stat:
    fields = (
        Path(f"/proc/{pid}/stat")
        .read_text(encoding="ascii", errors="replace")
        .rpartition(")")[2]
        .split()
    )
    ticks = [int(field) for field in fields[11:15]]
    own, ended = (ticks[0] + ticks[1]) / _TICKS, (ticks[2] + ticks[3]) / _TICKS
    return Stat(int(fields[1]), fields[0], fields[19], own, ended, int(fields[9]))


def _descendants(known: Mapping[int, Stat], roots: Sequence[int]) -> Iterator[int]:
    """Yield the roots that run and what descends from them, parents first.

    No process that has ended.
    """
    children: dict[int, list[int]] = {}
    for pid, now in known.items():
        children.setdefault(now.parent, []).append(pid)
    waiting = [pid for pid in roots if pid in known]
    done: set[int] = set()
    while waiting:
        pid = waiting.pop(0)
        if pid not in done and known[pid].state not in ("Z", "X"):
            done.add(pid)
            yield pid
            waiting += sorted(children.get(pid, ()))


def _is_python(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/exe").rpartition("/")[2].startswith("python")
    except OSError:
        return False


def _threads(pid: int) -> dict[int, tuple[int, int]]:
    """Return what ``Process.threads`` is; {} if the kernel does not say.

    Source: Linux, sched-stats.rst.
    """
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=pid.__ne__):  # noqa: PTH208  (names)
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                ran, waited, _ = (
                    Path(f"/proc/{pid}/task/{thread}/schedstat").read_text(encoding="ascii").split()
                )
                found[thread] = int(ran), int(waited)
    return found if pid in found else {}


def _wrote(roots: Sequence[Root], pids: Iterable[int]) -> Mapping[int, int] | None:
    """Return process -> calls of write(2) of its main thread.

    None where a rank is not Python, or the kernel is silent.

    A program that is not Python may have any thread print for its work. Source: proc(5),
    ``task/TID/io``, ``syscw``.
    """
    found: dict[int, int] = {}
    try:
        for pid in pids:
            found[pid] = _writes(pid)
    except (OSError, ValueError, StopIteration):
        return None
    return found if roots and all(_is_python(root.pid) for root in roots) else None


def _writes(pid: int) -> int:
    rows = Path(f"/proc/{pid}/task/{pid}/io").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("syscw:"))


def _waiting(pid: int, state: str, seen: Look) -> tuple[str, str, str]:
    """Return (state, what it waits for, path) of a process: as it was seen,
    unless it was stopped since then.

    Reading the stacks of compiled code holds a process, which then runs for a
    moment, or is ready to on a busy host.
    """
    process = seen.processes.get(pid)
    if process is not None and process.state and state not in ("T", "t"):
        return process.state, process.waits, process.path
    return (state, *kernel_words(pid, state))


def kernel_words(pid: int, state: str) -> tuple[str, str]:
    """Return what the main thread of a process waits for, as the kernel has it.

    Returns:
        (words for a sentence, path of the file that it opens or of the FIFO
        that it reads); each may be ``""``.
    """
    if state == "R":
        return "which computes or spins", ""
    if state == "D":
        return (
            f"which waits in the kernel ({text_of(f'/proc/{pid}/wchan').strip() or 'not known'})",
            "",
        )
    try:
        words = Path(f"/proc/{pid}/syscall").read_text(encoding="ascii").split()
        call = _SYSCALLS.get(os.uname().machine, {}).get(int(words[0]), "")
        arguments = [int(word, 16) for word in words[1:4]]
    except (OSError, ValueError):
        return "", ""
    if call in ("open", "openat") and len(arguments) == 3:
        path = _text_at(pid, arguments[call == "openat"])
        return "", f"open of {path}" if path else ""
    if call == "read" and arguments:
        return _reads(pid, arguments[0])
    if call == "select" and arguments[:1] == [0]:
        call = "sleep"  # of no descriptor, as time.sleep does before Python 3.11
    return _WAITS.get(call, ""), ""


def _reads(pid: int, descriptor: int) -> tuple[str, str]:
    place = f"/proc/{pid}/fd/{descriptor}"
    try:
        path = os.readlink(place)
        fifo = path.startswith("/") and stat.S_ISFIFO(os.stat(place).st_mode)  # noqa: PTH116
    except OSError:
        return "", ""
    if fifo:
        return "", f"read of {path} (a FIFO)"
    what = {"pipe:": "a pipe", "socket:": "a socket"}.get(path.partition("[")[0], path)
    return f"which reads {what}", ""


def _text_at(pid: int, address: int) -> str:
    """Return the text at an address of a process; ``""`` if it cannot be read."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(address)
            return (
                memory.read(_PATH_BYTES - address % _PATH_BYTES)
                .partition(b"\0")[0]
                .decode("utf-8", "replace")
            )
    except (OSError, ValueError, OverflowError):
        return ""
