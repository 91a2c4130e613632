"""The Python stacks of a process, from the words of py-spy or of faulthandler. Pure.

Sources: py-spy's ``dump --json`` (version 0.4), Python's faulthandler.dump_traceback (3.6 to 3.14).
"""

from __future__ import annotations

import re
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, decode, mapping, number, text


class Frame(NamedTuple):
    """One call. name: of the function. file: its path. line: 0 where it is not
    known. native: of a compiled library.
    """

    name: str
    file: str
    line: int
    native: bool = False

    @property
    def is_standard(self) -> bool:
        """Whether it is of Python's standard library."""
        return self.file.startswith("<frozen") or (
            "/lib/python3" in self.file and not self._is_installed
        )

    @property
    def is_own(self) -> bool:
        """Whether it is of the user's code: neither of the standard library nor
        of an installed package.
        """
        return not (self.native or self.is_standard or self._is_installed)

    @property
    def _is_installed(self) -> bool:
        return "/site-packages/" in self.file or "/dist-packages/" in self.file

    @property
    def place(self) -> str:
        """``train.py:12``."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"


class Thread(NamedTuple):
    """One thread. frames: innermost first. values: a hash of the local variables of the main
    thread's functions outside the standard library, 0 where they are not known: a loop that always
    stops at the same line still counts its steps. The standard library's own are left out, because
    waits with a limit count the seconds. outer: the same of packages alone, outside of the user's
    innermost function: of the loop that calls it.
    """

    main: bool
    frames: tuple[Frame, ...]
    name: str = ""
    values: int = 0
    outer: int = 0


def from_py_spy(words: str) -> tuple[Thread, ...]:
    """Return the threads in what ``py-spy dump --json`` printed; () if it is not that."""
    try:
        rows = decode(words)
    except ValueError:
        return ()
    if not isinstance(rows, list):
        return ()
    return tuple(_thread_of(mapping(row)) for row in rows)


def _thread_of(row: Mapping[str, Json]) -> Thread:
    frames = row.get("frames")
    calls = [mapping(frame) for frame in frames] if isinstance(frames, list) else []
    stack = tuple(_frame_of(call) for call in calls)
    name = text(row.get("thread_name"))
    if row.get("os_thread_id") != row.get("pid") and name != "MainThread":
        return Thread(False, stack, name)

    # The variables of the main thread tell a loop that goes on from one that waits.
    variables = _variables(calls, stack)
    innermost_own = len(stack)
    for place, frame in enumerate(stack):
        if frame.is_own:
            innermost_own = place
            break
    values = []
    outer = []
    for place, variable in variables:
        values.append(variable)
        if place > innermost_own and not stack[place].is_own:
            outer.append(variable)
    return Thread(
        main=True,
        frames=stack,
        name=name,
        values=hash(tuple(values)) if values else 0,
        outer=hash(tuple(outer)) if outer else 0,
    )


def _frame_of(call: Mapping[str, Json]) -> Frame:
    return Frame(
        text(call.get("name")),
        text(call.get("filename")),
        number(call.get("line")),
        bool(call.get("module")),
    )


def _variables(
    calls: Sequence[Mapping[str, Json]], stack: Sequence[Frame]
) -> list[tuple[int, tuple[str, str]]]:
    """Return (place in the stack, (name, value)) of each local variable outside
    the standard library.
    """
    shown: list[tuple[int, tuple[str, str]]] = []
    for place, (call, frame) in enumerate(zip(calls, stack)):
        variables = call.get("locals")
        if isinstance(variables, list) and not frame.is_standard:
            rows = map(mapping, variables)
            shown += [(place, (text(row.get("name")), text(row.get("repr")))) for row in rows]
    return shown


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$")
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def from_faulthandler(words: str) -> tuple[Thread, ...]:
    """Return the threads that faulthandler wrote, of its last report.

    The main thread is the last of them.
    """
    threads: list[list[Frame]] = []
    for line in words.splitlines():
        if _THREAD.match(line):
            threads.append([])
        match = _CALL.match(line)
        if match and threads:
            threads[-1].append(Frame(match[3], match[1], int(match[2])))
    last = len(threads) - 1
    return tuple(Thread(place == last, tuple(frames)) for place, frames in enumerate(threads))


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """Return the main thread, or what is nearest to it; None without threads."""
    return next((thread for thread in threads if thread.main), threads[0] if threads else None)


_LOCKS = (
    "/threading.py",
    "/queue.py",
    "/multiprocessing/synchronize.py",
    "/concurrent/futures/_base.py",
)
"""Files of Python's standard library whose functions wait for another thread or process."""


def waits_for_lock(threads: Sequence[Thread]) -> bool:
    """Return whether the main thread is inside a wait of Python's standard
    library for a lock, an event or a queue.
    """
    main = main_thread(threads)
    frame = (
        next((frame for frame in main.frames if not frame.native), None)
        if main is not None
        else None
    )
    return frame is not None and frame.is_standard and frame.file.endswith(_LOCKS)


def lines(threads: Sequence[Thread]) -> list[str]:
    """Return the threads for a person, the main thread first, without values of variables."""
    shown: list[str] = []
    for thread in sorted(threads, key=lambda thread: not thread.main):
        shown.append(
            f"  thread {thread.name or ('MainThread' if thread.main else 'without a name')}"
        )
        for frame in thread.frames:
            place = f"{frame.file}:{frame.line}" if frame.line else frame.file
            shown.append(f"    {frame.name} ({place})")
    return shown
