"""Parse the Python stacks of a process, from the output of py-spy or of faulthandler. Pure.

Sources: py-spy's ``dump --json`` (version 0.4), Python's faulthandler.dump_traceback (3.6 to 3.14).
"""

from __future__ import annotations

import re
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, decode, mapping, number, text


class Frame(NamedTuple):
    """One call.

    Attributes:
        name: Name of the function.
        file: Path of its file.
        line: The line; 0 if not known.
        native: Whether the function is of a compiled library.
    """

    name: str
    file: str
    line: int
    native: bool = False

    @property
    def is_standard(self) -> bool:
        """Whether the function is of Python's standard library."""
        if self.file.startswith("<frozen"):
            return True
        return "/lib/python3" in self.file and not self._is_installed

    @property
    def is_own(self) -> bool:
        """Whether the function is the user's: neither of the standard library nor of an installed
        package.
        """
        return not (self.native or self.is_standard or self._is_installed)

    @property
    def _is_installed(self) -> bool:
        return "/site-packages/" in self.file or "/dist-packages/" in self.file

    @property
    def place(self) -> str:
        """The place for people: ``train.py:12``."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"


class Thread(NamedTuple):
    """One thread.

    Attributes:
        main: Whether it is the main thread.
        frames: Its calls, innermost first.
        name: Its name; ``""`` if not known.
        values: Of the main thread, a hash of the local variables of functions outside the
            standard library; 0 if not known. So a loop that is always sampled at the same line
            still shows its steps. The standard library's own variables would change in every
            wait with a limit, which counts the seconds.
        outer: The same hash for packages only, outside of the user's innermost function: for the
            loop that calls the function.
    """

    main: bool
    frames: tuple[Frame, ...]
    name: str = ""
    values: int = 0
    outer: int = 0


def from_py_spy(output: str) -> tuple[Thread, ...]:
    """Parse the output of ``py-spy dump --json``: a JSON list with an object for each thread.

    () if the output is not a JSON list. An entry that is not an object, which py-spy does not
    write, counts as a main thread without frames.
    """
    try:
        rows = decode(output)
    except ValueError:
        return ()
    if not isinstance(rows, list):
        return ()
    # ``mapping`` returns {} for a value that is not an object.
    return tuple(_thread_of(mapping(row)) for row in rows)


def _thread_of(row: Mapping[str, Json]) -> Thread:
    """Parse one thread of py-spy's output; fields in another form have their defaults.

    Args:
        row: With ``thread_name``, ``os_thread_id``, ``pid`` and ``frames``, innermost first.
    """
    frames = row.get("frames")
    calls = [mapping(frame) for frame in frames] if isinstance(frames, list) else []
    stack = tuple(_frame_of(call) for call in calls)
    name = text(row.get("thread_name"))
    # The main thread has the number of the process. In some containers the two numbers differ for
    # every thread: then the name marks the main thread.
    if row.get("os_thread_id") != row.get("pid") and name != "MainThread":
        return Thread(False, stack, name)

    # The variables of the main thread distinguish a loop that goes on from one that waits.
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
        # Places count from the innermost call, so a larger one is further out.
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
    """Parse one frame of py-spy's output; only a frame of compiled code has a ``module``."""
    return Frame(
        text(call.get("name")),
        text(call.get("filename")),
        number(call.get("line")),
        bool(call.get("module")),
    )


def _variables(
    calls: Sequence[Mapping[str, Json]], stack: Sequence[Frame]
) -> list[tuple[int, tuple[str, str]]]:
    """Return (place in the stack, (name, value)) of each local variable outside the standard
    library.
    """
    shown: list[tuple[int, tuple[str, str]]] = []
    for place, (call, frame) in enumerate(zip(calls, stack)):
        variables = call.get("locals")
        if isinstance(variables, list) and not frame.is_standard:
            rows = map(mapping, variables)
            shown += [(place, (text(row.get("name")), text(row.get("repr")))) for row in rows]
    return shown


_THREAD_LINE = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$")
_CALL_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def from_faulthandler(report: str) -> tuple[Thread, ...]:
    """Parse the report that faulthandler wrote, in which the main thread comes last.

    Lines in another form are ignored, and so are calls before the first thread; () without a
    thread. Threads have no names and no hashes of variables.
    """
    threads: list[list[Frame]] = []  # for each thread its calls, innermost first
    for line in report.splitlines():
        if _THREAD_LINE.match(line):
            threads.append([])
        match = _CALL_LINE.match(line)
        if match and threads:
            file, number_of_line, name = match.groups()
            threads[-1].append(Frame(name, file, int(number_of_line)))
    last = len(threads) - 1
    return tuple(Thread(place == last, tuple(frames)) for place, frames in enumerate(threads))


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """Return the main thread, else the first one; None without threads."""
    for thread in threads:
        if thread.main:
            return thread
    if not threads:
        return None
    return threads[0]


_LOCK_FILES = (
    "/threading.py",
    "/queue.py",
    "/multiprocessing/synchronize.py",
    "/concurrent/futures/_base.py",
)
"""Files of Python's standard library whose functions wait for another thread or process."""


def waits_for_lock(threads: Sequence[Thread]) -> bool:
    """Return whether the main thread waits in Python's standard library for a lock, an event or a
    queue.
    """
    main = main_thread(threads)
    if main is None:
        return False
    for frame in main.frames:
        if not frame.native:
            return frame.is_standard and frame.file.endswith(_LOCK_FILES)
    return False


def lines(threads: Sequence[Thread]) -> list[str]:
    """Return lines about the threads for people, the main thread first.

    Values of variables are left out: they may be secrets.
    """
    rows: list[str] = []
    for thread in sorted(threads, key=lambda thread: not thread.main):
        name = thread.name
        if not name:
            name = "MainThread" if thread.main else "without a name"
        rows.append(f"  thread {name}")
        for frame in thread.frames:
            place = f"{frame.file}:{frame.line}" if frame.line else frame.file
            rows.append(f"    {frame.name} ({place})")
    return rows
