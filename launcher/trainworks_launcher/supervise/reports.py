"""What programs say of a failure: Python's traceback, torchrun's report, mpirun's words; and the text made of it. Pure.

Loaded only when something fails.
"""

from __future__ import annotations

import re

from trainworks_launcher.supervise.outcome import UNKNOWN_END, describe_status, lack_of_memory, shorten

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_LAUNCHERS = ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError",)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: |:?$)")
_STRANGE_LINES = 20
_RUNNERS = ('  File "<frozen runpy>"',)
_MPI4PY = "/site-packages/mpi4py/"
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch.distributed marks the lines of a traceback so


def find_traceback(tail: str, processes: int = 1) -> tuple[str, str]:
    """Return (last line, whole text) of the traceback that explains a failure; ("", "") if there is none.

    One process: its last traceback. Several: the first in the tail, for when one rank dies the others die of that. A
    traceback of torchrun itself only says that some process failed, so it is passed over.
    """
    lines = [_PREFIX.sub("", line) for line in tail.splitlines()]
    blocks: list[list[str]] = []
    index = 0
    while index < len(lines):
        if lines[index].strip() != _TRACEBACK:
            index += 1
            continue
        block = [lines[index]]
        index += 1
        while index < len(lines):
            line = lines[index]
            index += 1
            if line.startswith((" ", "\t")) or not line.strip():
                block.append(line)
            elif _EXCEPTION.match(line):
                block.append(line)
                break
            elif not _goes_on(lines[index : index + _STRANGE_LINES]):
                break
        if blocks and _is_chained(lines, index - len(block)):
            blocks[-1] += block
        else:
            blocks.append(block)
    telling = [block for block in blocks if not block[-1].startswith(_LAUNCHERS)]
    if not telling:
        return "", ""
    chosen = _without_runner(telling[0] if processes > 1 else telling[-1])
    return chosen[-1].strip(), "\n".join(chosen)


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


def _is_chained(lines: list[str], start: int) -> bool:
    """Return whether the traceback that starts at a line continues the one before it."""
    before = [line for line in lines[max(0, start - 3) : start] if line.strip()]
    return bool(before) and before[-1].startswith(_CHAINED)


_TORCHRUN_REPORT = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def torchrun_report(tail: bytes) -> tuple[int, int]:
    """Return (rank, return code) of the process that failed first, as torchrun reports it at its end; else (-1, 0)."""
    found = _TORCHRUN_REPORT.findall(tail.decode("utf-8", "replace"))
    return (int(found[-1][0]), int(found[-1][1])) if found else (-1, 0)


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


def ends_with_traceback(tail: bytes) -> bool:
    """Return whether a traceback is the last that a process said: it died of it, and did not only log it."""
    text = tail[-_LAST_BYTES:].decode("utf-8", "replace")
    cause, _ = find_traceback(text)
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(cause) and any(cause in line for line in lines[-_LINES_AFTER:])


_LAST_BYTES = 16384
_LINES_AFTER = 6


def failure_text(
    *,
    what: str,
    host: str,
    mode: str,
    returncode: int | None,
    tail: bytes,
    processes: int = 1,
    rank: int = -1,
    oom_kills: int | None = None,
) -> str:
    """Return the text of a program that failed: its cause, where it happened, then as much context as fits.

    Args:
        what: The program as a person calls it.
        host: Its host.
        mode: The job's mode.
        returncode: Negative after a signal; None if it is not known.
        tail: End of its output, or of the output of the rank that failed first, if that is known.
        processes: Number of processes whose output is in ``tail``.
        rank: Rank that failed first; -1 if it is not known.
        oom_kills: As in ``describe_status``.
    """
    output = tail.decode("utf-8", "replace")
    cause, traceback = find_traceback(output, processes)
    end = UNKNOWN_END + lack_of_memory(oom_kills) if returncode is None else describe_status(returncode, oom_kills)
    place = f"{what} on host {host}{f', rank {rank}' if rank >= 0 else ''} (mode {mode}): {end}"
    if cause:
        return shorten(f"{cause}\n{place}\n{traceback}")
    last = "\n".join([line for line in output.splitlines() if line.strip()][-12:])
    return shorten(f"{place}\n{last}" if last else place)
