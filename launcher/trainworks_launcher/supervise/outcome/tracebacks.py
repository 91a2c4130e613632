"""Python's tracebacks in the output of a process. Pure.

Loaded only when something fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TRACEBACK = "Traceback (most recent call last):"
_GROUP = "Exception Group Traceback (most recent call last):"
_IGNORED = "Exception ignored in"  # by the interpreter: nothing dies of it
_CAUSED = "The above exception was the direct cause"
_CHAINED = ("During handling of the above exception", _CAUSED)
_LAUNCHERS = ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError",)
_STARTED = "subprocess.CalledProcessError"
_STARTER_FRAMES = ("/accelerate/commands/", "/deepspeed/launcher/")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: |:?$)")
_FILE = re.compile(r'^\s+File ".*", line \d+$')  # where a file that cannot be read as Python has its mistake
_UNREADABLE = ("SyntaxError", "IndentationError", "TabError")
_UNREADABLE_LINES = 6
_OF_GROUP = re.compile(r"^\s*(\||\+[-+]+( \d+ -+)?$)")
_LOGGED = re.compile(
    r"^(\[?[WEIF]\d{4}|\[?\d{4}-\d\d-\d\d|\[?(DEBUG|INFO|WARNING|ERROR)\b|Exception raised from |frame #)"
)
_ANNOUNCED_LINES = 4
_MESSAGE_LINES = 30
_STRANGE_LINES = 20
_RUNNERS = ('  File "<frozen runpy>"',)
_MPI4PY = "/site-packages/mpi4py/"
_PREFIX = re.compile(r"^\[rank(\d+)\]: ?")  # torch.distributed marks the lines of a traceback so
_BOX = re.compile(r"[╭+][─-]+ Traceback \(most recent call last\) [─-]+[╮+]\s*$")  # rich's, in ASCII too
_BOX_END = re.compile(r"^\s*[╰+][─-]{10,}[╯+]\s*$")
_BOX_SIDES = "│| "
_BOX_LINES = 400
_IN_BOX = re.compile(r":\d+ in |^❱|^>")  # a frame, or the line of its call: the rest is context


@dataclass
class Traceback:
    """One traceback of a text.

    Attributes:
        frames: All that stands above the exception.
        exception: Lines of the exception, the first one with its type.
        rank: Rank that torch.distributed marks its lines with; -1 without a mark.
        start: Index of its first line in the text.
        at: Index of the first line of the exception.
        end: Index of the first line after it.
        ignored: The interpreter says that it ignored the exception.
        origin: How it came about: ``caused by`` another one, or ``while handling`` it; "" if that is not known.
    """

    frames: list[str]
    exception: list[str] = field(default_factory=list)
    rank: int = -1
    start: int = 0
    at: int = 0
    end: int = 0
    ignored: bool = False
    origin: str = ""

    @property
    def cause(self) -> str:
        """First line of the exception; the last line there is, where it was cut off before that.

        A line that only announces another one (``Error(s) in loading state_dict for Net:``) goes on with that.
        """
        if not self.exception:
            return self.frames[-1].strip()
        words = ""
        for line in map(str.strip, self.exception[:_ANNOUNCED_LINES]):
            words = f"{words} {line}".strip()
            if line and not line.endswith(":"):
                break
        return words

    @property
    def is_of_starter(self) -> bool:
        """Whether it is of a program that starts ranks, and only says that one of them failed."""
        if self.cause.startswith(_LAUNCHERS):
            return True
        frames = "\n".join(self.frames)
        return self.cause.startswith(_STARTED) and any(place in frames for place in _STARTER_FRAMES)


def lines_of(text: str) -> list[str]:
    """Return the lines of a text without the marks of ranks."""
    return [_PREFIX.sub("", line) for line in text.splitlines()]


def find_tracebacks(text: str, *, errors_only: bool = False) -> list[Traceback]:
    """Return all tracebacks of a text, in order, also rich's boxed ones; chained exceptions are one traceback.

    Args:
        text: End of the output.
        errors_only: The text is of the standard error of one process. What follows an exception is then more of its
            message; else it may be anything, and only lines that are indented are taken for that.
    """
    marks = [_PREFIX.match(line) for line in text.splitlines()]
    lines = lines_of(text)
    found: list[Traceback] = []
    index = 0
    while index < len(lines):
        start = index
        # Before the word, a progress bar may stand that has not ended its line.
        if lines[index].rstrip().endswith(_GROUP):
            made, index = _read_group(lines, index)
        elif lines[index].rstrip().endswith(_TRACEBACK):
            made, index = _read_traceback(lines, index)
            made.at = index - 1
            index = _read_message(made, lines, index, errors_only)
        elif _BOX.search(lines[index]):
            made, index = _read_box(lines, index)
            made.at = index - 1
            index = _read_message(made, lines, index, errors_only)
        elif _FILE.match(lines[index]) and any(map(_is_unreadable, lines[index : index + _UNREADABLE_LINES])):
            made, index = _read_traceback(lines, index)
        else:
            index += 1
            continue
        before = [line for line in lines[max(0, start - 3) : start] if line.strip()]
        made.ignored = bool(before) and before[-1].startswith(_IGNORED)
        if found and before and before[-1].startswith(_CHAINED):
            first = found.pop()
            made.frames = [*first.frames, *first.exception, *made.frames]
            how = "caused by" if before[-1].startswith(_CAUSED) else "while handling"
            made.origin = first.origin or f"{how} {first.cause}"
            start = first.start
        mark = marks[start]
        made.rank = int(mark[1]) if mark else -1
        made.start, made.at, made.end = start, made.at or index - 1, index
        made.frames = _without_runner(made.frames)
        found.append(made)
    return found


def find_traceback(text: str, processes: int = 1, *, errors_only: bool = False) -> Traceback | None:
    """Return the traceback that explains a failure if one does; None if there is none.

    One process: its last traceback. Several: the first of those that came together at the end, for when one rank dies
    the others die of that. A traceback of a starter only says that some process failed, so it is passed over.

    Args:
        text: End of the output.
        processes: Number of processes whose output it is.
        errors_only: As in ``find_tracebacks``.
    """
    found = find_tracebacks(text, errors_only=errors_only)
    telling = [made for made in found if not made.ignored and not made.is_of_starter]
    if not telling:
        return None
    chosen = telling[-1]
    for earlier in reversed(telling[:-1] if processes > 1 else []):
        if chosen.start - earlier.end > _TOGETHER_LINES:
            break
        chosen = earlier
    return chosen


def at_the_end(text: str) -> str:
    """Return the cause of a traceback with which a text ends; ``""`` if it ends with anything else."""
    found = find_tracebacks(text)
    last = found[-1] if found else None
    ends = last is not None and not last.ignored and not "".join(lines_of(text)[last.end :]).strip()
    return last.cause if last is not None and ends else ""


_TOGETHER_LINES = 60
"""Lines between two tracebacks of one failure: the ranks print at the same time, and their last output in between."""


def _is_unreadable(line: str) -> bool:
    return line.startswith(_UNREADABLE)


def _read_traceback(lines: list[str], index: int) -> tuple[Traceback, int]:
    """Read the traceback that begins at a line, to the first line of its exception; (it, the line after it)."""
    first = lines[index]
    made = Traceback([_TRACEBACK if first.rstrip().endswith(_TRACEBACK) else first])
    index += 1
    while index < len(lines):
        line = lines[index]
        index += 1
        if line.startswith((" ", "\t")) or not line.strip():
            made.frames.append(line)
        elif _EXCEPTION.match(line):
            made.exception.append(line)
            break
        elif not _goes_on(lines[index : index + _STRANGE_LINES]):
            break
    return made, index


def _read_message(made: Traceback, lines: list[str], index: int, all_of_it: bool) -> int:
    """Read the further lines of an exception's message; the line after them."""
    end = min(len(lines), index + _MESSAGE_LINES) if made.exception else index
    while index < end:
        line = lines[index]
        more = line.startswith((" ", "\t")) or (all_of_it and not line.startswith(_CHAINED) and not _LOGGED.match(line))
        if not more or line.rstrip().endswith(_TRACEBACK) or (line.strip() and line.startswith('  File "')):
            break
        made.exception.append(line.rstrip())
        index += 1
    while made.exception and not made.exception[-1].strip():
        made.exception.pop()
    return index


def _read_box(lines: list[str], index: int) -> tuple[Traceback, int]:
    """Read a traceback that rich has drawn, to the first line of its exception; (it, the line after it)."""
    made = Traceback([_TRACEBACK])
    for at in range(index + 1, min(len(lines), index + _BOX_LINES)):
        if _BOX_END.match(lines[at]):
            after = next((later for later in range(at + 1, len(lines)) if lines[later].strip()), len(lines))
            if after < len(lines) and _EXCEPTION.match(lines[after].strip()):
                made.exception.append(lines[after].strip())
                return made, after + 1
            return made, at + 1
        line = lines[at].strip(_BOX_SIDES)
        if _IN_BOX.search(line):
            made.frames.append(f"  {line}")
    return made, index + 1


def _read_group(lines: list[str], index: int) -> tuple[Traceback, int]:
    """Read an exception group: its frames, and all that it says of its members."""
    made = Traceback([_GROUP])
    index += 1
    of_members = re.compile(r"^\s+\|+ ([A-Za-z_][\w.]*: .*)")
    while index < len(lines) and _OF_GROUP.match(lines[index]):
        line = lines[index].strip().lstrip("|")
        index += 1
        if made.exception:
            made.exception.append(lines[index - 1])
            member = of_members.match(lines[index - 1])
            made.origin = made.origin or (f"caused by {member[1]}" if member else "")
        elif _EXCEPTION.match(line.strip()) and not line.startswith("    "):
            made.exception.append(line.strip())
        else:
            made.frames.append(line[1:] if line.startswith(" ") else line)
    return made, index


def _without_runner(block: list[str]) -> list[str]:
    """Return a traceback without the frames of the program that ran the script (``python -m mpi4py``)."""
    kept: list[str] = []
    dropping = False
    for line in block:
        if line.startswith('  File "'):
            dropping = line.startswith(_RUNNERS) or _MPI4PY in line
        elif not line.startswith("    "):
            dropping = False
        if not dropping:
            kept.append(line)
    return kept


def _goes_on(following: list[str]) -> bool:
    """Return whether a traceback goes on below a line that does not belong to it: other ranks print in between."""
    return any(line.startswith('  File "') or _EXCEPTION.match(line) for line in following)
