"""What programs say of a failure: Python's traceback, torchrun's report, mpirun's words; and the text made of it. Pure.

Loaded only when something fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trainworks_launcher import names
from trainworks_launcher.supervise.outcome import UNKNOWN_END, describe_status, lack_of_memory, shorten
from trainworks_launcher.values import printable

_TRACEBACK = "Traceback (most recent call last):"
_GROUP = "Exception Group Traceback (most recent call last):"
_IGNORED = "Exception ignored in"  # by the interpreter: nothing dies of it
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_LAUNCHERS = ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError",)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: |:?$)")
_FILE = re.compile(r'^\s+File ".*", line \d+$')  # where a file that cannot be read as Python has its mistake
_UNREADABLE = ("SyntaxError", "IndentationError", "TabError")
_UNREADABLE_LINES = 6
_OF_GROUP = re.compile(r"^\s*(\||\+[-+]+( \d+ -+)?$)")
_LOGGED = re.compile(
    r"^(\[?[WEIF]\d{4}|\[?\d{4}-\d\d-\d\d|\[?(DEBUG|INFO|WARNING|ERROR)\b|Exception raised from |frame #)"
)
_MESSAGE_LINES = 30
_STRANGE_LINES = 20
_RUNNERS = ('  File "<frozen runpy>"',)
_MPI4PY = "/site-packages/mpi4py/"
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch.distributed marks the lines of a traceback so


@dataclass
class Traceback:
    """One traceback: its frames with all that stands above the exception, and the lines of the exception."""

    frames: list[str]
    exception: list[str] = field(default_factory=list)
    chained: bool = False
    ignored: bool = False

    @property
    def cause(self) -> str:
        """First line of the exception; the last line there is, where it was cut off before that."""
        return (self.exception or self.frames)[0 if self.exception else -1].strip()


def find_traceback(tail: str, processes: int = 1, *, errors_only: bool = False) -> Traceback | None:
    """Return the traceback that explains a failure; None if there is none.

    One process: its last traceback. Several: the first in the tail, for when one rank dies the others die of that. A
    traceback of torchrun itself only says that some process failed, so it is passed over.

    Args:
        tail: End of the output.
        processes: Number of processes whose output it is.
        errors_only: The tail is of the standard error of one process. What follows an exception is then more of its
            message; else it may be anything, and only lines that are indented are taken for that.
    """
    lines = [_PREFIX.sub("", line) for line in tail.splitlines()]
    found: list[Traceback] = []
    index = 0
    while index < len(lines):
        start = index
        # Before the word, a progress bar may stand that has not ended its line.
        if lines[index].rstrip().endswith(_GROUP):
            made, index = _read_group(lines, index)
        elif lines[index].rstrip().endswith(_TRACEBACK):
            made, index = _read_traceback(lines, index)
            index = _read_message(made, lines, index, errors_only)
        elif _FILE.match(lines[index]) and any(map(_is_unreadable, lines[index : index + _UNREADABLE_LINES])):
            made, index = _read_traceback(lines, index)
        else:
            index += 1
            continue
        before = [line for line in lines[max(0, start - 3) : start] if line.strip()]
        made.ignored = bool(before) and before[-1].startswith(_IGNORED)
        if found and before and before[-1].startswith(_CHAINED):
            made = Traceback([*found[-1].frames, *found[-1].exception, *made.frames], made.exception)
            found.pop()
        found.append(made)
    telling = [made for made in found if not made.ignored and not made.cause.startswith(_LAUNCHERS)]
    if not telling:
        return None
    chosen = telling[0] if processes > 1 else telling[-1]
    chosen.frames = _without_runner(chosen.frames)
    return chosen


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


def _read_group(lines: list[str], index: int) -> tuple[Traceback, int]:
    """Read an exception group: its frames, and all that it says of its members."""
    made = Traceback([_GROUP])
    index += 1
    while index < len(lines) and _OF_GROUP.match(lines[index]):
        line = lines[index].strip().lstrip("|")
        index += 1
        if made.exception:
            made.exception.append(lines[index - 1])
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


_TORCHRUN_REPORT = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def torchrun_report(tail: bytes) -> tuple[int, int]:
    """Return (rank, return code) of the process that failed first, as torchrun reports it at its end; else (-1, 0)."""
    found = _TORCHRUN_REPORT.findall(tail.decode("utf-8", "replace"))
    return (int(found[-1][0]), int(found[-1][1])) if found else (-1, 0)


def torchrun_status(tail: bytes, pid: int) -> int | None:
    """Return the return code of the process ``pid``, which torchrun logs as soon as it has taken it.

    None if it does not say so: it names only the process of its host that failed first.
    """
    found = re.search(rb"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: %d\)" % pid, tail)
    return int(found[1]) if found else None


_MPIRUN_REPORTS = (
    # "The first process to do so was: Process name: [[39593,1],2] Exit code: 42"; 5.x writes [prterun-host-77@1,2]
    re.compile(
        r"first process to do so was:\s+Process name:\s*\[.*?,(?P<rank>\d+)\]\s+Exit code:\s*(?P<code>\d+)", re.DOTALL
    ),
    re.compile(r"noticed that process rank (?P<rank>\d+) with PID.*?exited\s+on\s+signal\s+(?P<signal>\d+)", re.DOTALL),
    re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d+).*?(?:errorcode|Errorcode:)\s*(?P<code>-?\d+)", re.DOTALL),
)


def mpirun_report(tail: bytes) -> tuple[int, int]:
    """Return (rank, return code) of the process that failed first, in mpirun's own words (4.x and 5.x).

    Without such a report: (-1, 0).
    """
    words = tail.decode("utf-8", "replace")
    found = [match for match in (pattern.search(words) for pattern in _MPIRUN_REPORTS) if match]
    if not found:
        return -1, 0
    # What it said first: an abort is told when it happens, the summary comes at the end.
    values = min(found, key=lambda match: match.start()).groupdict()
    return int(values["rank"]), -int(values["signal"]) if values.get("signal") else int(values["code"])


_DAEMON_REPORTS = (
    # Open MPI 5, also where the daemon could not be started
    re.compile(r"daemon executable.*?Local host:\s+\S+\s+Remote host:\s+(\S+)", re.DOTALL),
    # both lines, where the connection broke
    re.compile(r"lost communication with a remote daemon.*?Remote daemon:\s+\S+ on node (\S+)", re.DOTALL),
)


def mpirun_daemon(tail: bytes) -> str:
    """Return the host whose daemon mpirun lost or could not start, in its own words; "" if it does not say so."""
    words = tail.decode("utf-8", "replace")
    found = [match for match in (pattern.search(words) for pattern in _DAEMON_REPORTS) if match]
    return printable(found[0][1]) if found else ""


def mpirun_host(tail: bytes) -> str:
    """Return the host of the process that failed first, in mpirun's own words; "" if it does not say."""
    found = re.search(r"process rank \d+ with PID \d+ on node ([A-Za-z0-9._-]+)", tail.decode("utf-8", "replace"))
    return found.group(1) if found else ""


def ends_with_traceback(tail: bytes, *, errors_only: bool = False) -> bool:
    """Return whether a traceback is the last that a process said: it died of it, and did not only log it."""
    text = tail[-_LAST_BYTES:].decode("utf-8", "replace")
    found = find_traceback(text, errors_only=errors_only)
    lines = [line for line in text.splitlines() if line.strip()]
    last = (found.exception or found.frames)[-1].strip() if found is not None else ""
    return bool(last) and any(last in line for line in lines[-_LINES_AFTER:])


_LAST_BYTES = 16384
_LINES_AFTER = 6

_PEER_LEFT = re.compile(r"Connection (reset|closed|was likely closed)|Broken pipe|remote process exit", re.IGNORECASE)


def died_of_a_peer(errors: bytes) -> bool:
    """Return whether the exception a process died of is a broken connection: mostly another process ended before it.

    The words are those of the kernel, of Gloo ("Connection closed by peer"), of NCCL ("a remote process exiting
    prematurely") and of PyTorch's TCPStore ("Connection was likely closed").
    """
    if not ends_with_traceback(errors, errors_only=True):
        return False
    found = find_traceback(errors[-_LAST_BYTES:].decode("utf-8", "replace"), errors_only=True)
    return found is not None and _PEER_LEFT.search("\n".join(found.exception)) is not None


EMULATE = (
    "no GPU: with SMP_CPU_EMULATION=1 in its environment, a script of smp or smddp that asks for CUDA runs on CPUs"
)

_NO_GPU = re.compile(r"no attribute '_cuda_|Torch not compiled with CUDA enabled|Found no NVIDIA driver")
"""What torch says where a script asks for a GPU: built without CUDA, and built with it on a host without a driver."""


def failure_text(
    *,
    what: str,
    host: str,
    mode: str,
    returncode: int | None,
    tail: bytes,
    errors: bytes = b"",
    processes: int = 1,
    rank: int = -1,
    oom_kills: int | None = None,
    cause: str = "",
) -> str:
    """Return the text of a program that failed: its cause, where it happened, then as much context as fits.

    Args:
        what: The program as a person calls it.
        host: Its host.
        mode: The job's mode.
        returncode: Negative after a signal; None if it is not known.
        tail: End of its output, or of the output of the rank that failed first, if that is known.
        errors: The part of ``tail`` that went to the standard error of one process; empty if it is of several.
        processes: Number of processes whose output is in ``tail``.
        rank: Rank that failed first; -1 if it is not known.
        oom_kills: As in ``describe_status``.
        cause: What is known of it otherwise, where the program said no traceback.
    """
    output = printable(tail.decode("utf-8", "replace"))
    found = find_traceback(printable(errors.decode("utf-8", "replace")), errors_only=True) if errors else None
    found = found or find_traceback(output, processes)
    end = UNKNOWN_END + lack_of_memory(oom_kills) if returncode is None else describe_status(returncode, oom_kills)
    place = f"{what} on host {host}{f', rank {rank}' if rank >= 0 else ''} (mode {mode}): {end}"
    if found is not None:
        remedy = f"\n{EMULATE}" if mode.startswith("smdistributed.") and _NO_GPU.search(found.cause) else ""
        return _fit(f"{found.cause}\n{place}{remedy}", found)
    last = "\n".join([line for line in output.splitlines() if line.strip()][-12:])
    return shorten("\n".join(part for part in (cause, place, last) if part))


_FRAMES_LEAST = 200
"""Characters that the innermost frames get in any case, where the message of the exception is long."""


def _fit(head: str, found: Traceback) -> str:
    """Put a failure text together: of what is too long the frames are cut first, then the message."""
    frames, message = "\n".join(found.frames), "\n".join(found.exception)
    room = names.FAILURE_TEXT_LIMIT - len(head) - 2
    if len(frames) + len(message) > room:
        message = shorten(message, max(room - min(len(frames), _FRAMES_LEAST), _FRAMES_LEAST))
        frames = shorten(frames, max(room - len(message), _FRAMES_LEAST // 2))
    return shorten("\n".join(part for part in (head, frames, message) if part))
