"""What a failure is about: the evidence is weighed, and the outcome says it. Pure.

In this order: the kernel's count of the processes that it killed for lack of memory, the signal, the last words of the
process that died first. A traceback is the last words only if nothing shows that the process went on after it; else it
is told as something earlier. Loaded only when something fails.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from itertools import takewhile
from typing import NamedTuple, Sequence

from trainworks_launcher.contract.values import printable
from trainworks_launcher.supervise.outcome.outcome import (
    EARLIER,
    EARLY_END,
    FAILED,
    SUCCEEDED,
    UNKNOWN_END,
    Outcome,
    Suspect,
    describe_status,
    exit_status,
    lack_of_memory,
    place_of,
    shorten,
    signal_of,
    suspect_of,
)
from trainworks_launcher.supervise.outcome.starters import without_help
from trainworks_launcher.supervise.outcome.tracebacks import Traceback, find_traceback, find_tracebacks, lines_of


class Said(NamedTuple):
    """What a process printed, or several did.

    Attributes:
        output: End of all that was printed.
        errors: The part of it that went to the standard error of one process; empty if it is of several.
        latest: The part of ``errors`` that came after its last pause; empty if that is not known.
        printed: Bytes of the standard output that were read after the last traceback; 0 if that is not known.
        quiet: Seconds from the last traceback to the end; 0 if that is not known.
        processes: Number of processes whose output it is.
        shell: The process is a shell script: then a program that it started may have said the last words.
    """

    output: bytes
    errors: bytes = b""
    latest: bytes = b""
    printed: int = 0
    quiet: float = 0.0
    processes: int = 1
    shell: bool = False


class LastWords(NamedTuple):
    """What a process said at its end.

    Attributes:
        died_of: The exception that ended it; None if none did.
        line: Else its last line of an error; "" without one.
        earlier: Cause of a traceback after which it went on; "" without one.
    """

    died_of: Traceback | None = None
    line: str = ""
    earlier: str = ""


def last_words(said: Said, returncode: int | None = None) -> LastWords:
    """Return what a process said at its end, and whether its last traceback belongs to that.

    Args:
        said: What it printed.
        returncode: Negative after a signal; None if it is not known.
    """
    errors = _text(said.errors)
    if said.processes > 1 or not errors.strip():
        return _of_one_stream(_text(said.output), said.processes)
    errors = "\n".join(without_help(errors.splitlines()))
    lines = lines_of(errors)
    found = find_tracebacks(errors, errors_only=True)
    dropped = {at for made in found if made.ignored for at in range(made.start, made.end)}
    telling = _telling(found, lines)
    if not telling:
        line = _last_line(["" if at in dropped else line for at, line in enumerate(lines)], said.shell)[0]
        return LastWords(line=line) if line else _of_one_stream(_text(said.output), 1)
    last = telling[-1]
    pause = len(lines) - len(lines_of(_text(said.latest))) if said.latest else 0
    if last.at < pause < last.end:
        _cut(last, lines, pause)
    # A shell's own loop may print after a program of it has died.
    steps = [at for at in _steps(lines[last.at + 1 :]) if not said.shell or _PROGRESS.search(lines[last.at + 1 + at])]
    if steps:
        _cut(last, lines, min(last.end, last.at + 1 + steps[0]))
    after = _after(last, lines, without_help(lines_of(_text(said.output))))
    rest = ["" if at in dropped else line for at, line in enumerate(lines)][last.end :]
    line, at = _last_line(rest, said.shell)
    ending = next((at for at, line in enumerate(rest) if _THROWN_NOTHING.search(line) or _FAULT.match(line)), len(rest))
    is_logged = last.start > 0 and _WARNED.search(lines[last.start - 1]) is not None
    more = [at for at, line in enumerate(rest[:ending]) if any(map(str.isalpha, line)) and not _CLOSING.search(line)]
    went_on = (
        bool(steps)
        or len(more) > _LINES_AFTER
        or said.printed > _PIPE
        or (last.at < pause and any(last.end + at >= pause for at in more))
        # Python writes its own buffer at the very end: what came before the last words was printed in between.
        or (line != "" and not said.shell and _printed_between(after, rest, at))
        # Python itself ends with 1 after an exception.
        or (returncode not in (None, 0, 1) and not said.shell and (said.quiet > _QUIET_SECONDS or is_logged))
    )
    return LastWords(None, line, last.cause) if went_on else LastWords(last)


def _telling(found: Sequence[Traceback], lines: Sequence[str]) -> list[Traceback]:
    """Return the tracebacks that may be the cause; one of a program that another one failed is none beside the other's.

    ``subprocess`` only says that its child ended with a status, and the child has said why right before.
    """
    telling = [made for made in found if not made.ignored and not made.is_of_starter]
    while len(telling) > 1 and _CHILD_FAILED.match(telling[-1].cause):
        if any(line.strip() for line in lines[telling[-2].end : telling[-1].start]):
            break
        telling.pop()
    return telling


_CHILD_FAILED = re.compile(r"subprocess\.CalledProcessError: .* returned non-zero exit status")

_LINES_AFTER = 6
"""Lines of the standard error after a traceback with which a process may still be dying of it."""

_BUFFER = 16384
"""Characters after a traceback that were perhaps printed before it: buffers are written at the end."""

_PIPE = 65536 + _BUFFER
"""The same in bytes, where a pipe was full too: our reader may be slow. Source: pipe(7), its usual capacity."""

_QUIET_SECONDS = 2.0

_LINES_BACK = 12

_CLOSING = re.compile(
    r"resource_tracker|leaked (semaphore|shared_memory)|^wandb: |^\[?W\d{4} |^Exception ignored "
    r"|^terminate called without|^Aborted|^Segmentation fault|^\+{1,3} |^[^ ]+:\d+: \w*Warning: |^  warnings\.warn"
    r"|^Set the environment variable HYDRA_|^note: run with |^Pass --help|^Try '.*--help|^exit status \d+$"
    r"|^\*\*\* Check failure stack trace|^    @ +0x|^==\d+==ABORTING|^Node\.js v\d|^Execution halted$|^Calls: "
    r"|^in expression starting at |^(\S+ )?View (run|experiment) |^[Uu]sage: |^For detailed information on this command"
)
"""What the interpreter, libraries and shells print after the last words."""

_PROGRESS = re.compile(r"^.{0,80}\b(TRACE|DEBUG|INFO|NOTICE|WARN|WARNING)\b|\d%\||(it/s|s/it)\b|^\[?\d{4}-\d\d-\d\d")
_WARNED = re.compile(r"^.{0,80}\b(DEBUG|INFO|NOTICE|WARN|WARNING)\b")
_ERROR = re.compile(
    r"\b(errors?|fatal|critical|exception|fail(ed|ure)?|cannot|can't|could not|couldn't|unable|not found|no such|denied"
    r"|invalid|illegal|abort(ed|ing)?|panic(ked)?|killed|unrecognized|missing|required)\b|Error\b|Exception\b",
    re.IGNORECASE,
)
_THROWN = re.compile(r"terminate called after throwing an instance of '(.*)'\n\s*what\(\):\s*([^\n]+)")
_THROWN_NOTHING = re.compile(r"terminate called (after throwing an instance of '[^']*'|without an active exception)")
_GO = re.compile(r"^(panic|fatal error): .*(?=\n(?:.*\n)*?goroutine \d+ \[)", re.MULTILINE)
_FAULT = re.compile(r"^(Fatal Python error: .*|Timeout \(.*\)!)$")
_OF_FAULT = re.compile(r"^(Current thread |Thread 0x|Extension modules: |  |$)")
_BORDERS = "│┃|╭╮╰╯┏┓┗┛─━▶ "


def _steps(lines: Sequence[str]) -> list[int]:
    """Return the places of lines that tell of progress: they differ in their numbers only, and there are several."""
    shapes = [
        "" if line.startswith((" ", "\t")) and not _PROGRESS.search(line) else _NUMBER.sub("0", line) for line in lines
    ]
    count = Counter(shape for shape in shapes if shape.strip() and not _CLOSING.search(shape))
    return [at for at, shape in enumerate(shapes) if count[shape] >= _STEPS]


_NUMBER = re.compile(r"[\d.]+(e[-+]?\d+)?")
_STEPS = 3


def _last_line(lines: Sequence[str], shell: bool = False) -> tuple[str, int]:
    """Return (the line that says why a process ended, its index); ("", -1) if none does.

    A shell's tools may end with advice: there a line that speaks of an error is preferred.
    """
    text = "\n".join(lines[-_FAULT_LINES:])
    thrown = [*_THROWN.finditer(text)]
    if thrown:
        return f"{thrown[-1][1]}: {thrown[-1][2].strip()}", len(lines) - 1
    panicked = [*_GO.finditer(text)]
    if panicked:
        return panicked[-1][0], len(lines) - 1
    fault = max((at for at, line in enumerate(lines) if _FAULT.match(line)), default=-1)
    if fault >= 0 and all(map(_OF_FAULT.match, lines[fault + 1 :])):
        return lines[fault], fault
    passed = False
    steps = set(_steps(lines))
    filled = [at for at, line in enumerate(lines) if any(map(str.isalpha, line))][-_LINES_BACK:]
    for at in reversed(filled):
        line = lines[at]
        if _CLOSING.search(line):
            continue
        if at in steps or (_PROGRESS.search(line) and not _ERROR.search(line)):
            passed = True
            continue
        if passed and not _ERROR.search(line):
            break
        near = [other for other in filled[-_LINES_AFTER:] if other <= at and _ERROR.search(lines[other])]
        at = near[-1] if shell and near else at
        head = _head_of(lines, at)
        if _CLOSING.search(lines[head]):
            continue
        said = lines[head].strip(_BORDERS)
        if said.endswith(":"):
            said = " ".join(line.strip() for line in lines[head : at + 1])
        return said if len(said) <= _LINE_LIMIT else f"{said[:_LINE_LIMIT]} [...]", at
    nothing = [line for line in lines if _THROWN_NOTHING.search(line)]
    return (nothing[-1].strip(), len(lines) - 1) if nothing else ("", -1)


def _head_of(lines: Sequence[str], at: int) -> int:
    """Return the line that says what happened, where the line ``at`` is of a stack or of details below it."""
    head = at
    while head > 0 and lines[head].startswith((" ", "\t")) and lines[head - 1].strip():
        head -= 1
    return at if lines[head].startswith((" ", "\t")) else head


_FAULT_LINES = 100
_LINE_LIMIT = 400


def _text(data: bytes) -> str:
    return printable(data.decode("utf-8", "replace"))


def _of_one_stream(output: str, processes: int) -> LastWords:
    """Return the last words where standard output and error are one, or of several processes."""
    found = find_traceback(output, processes)
    lines = without_help(lines_of(output))
    line = _last_line(lines)[0] if processes == 1 else ""
    line = line if _ERROR.search(line) else ""  # it may be anything that was printed
    if found is None:
        return LastWords(line=line)
    went_on = sum(map(len, lines[found.end :])) > _BUFFER
    return LastWords(None, line, found.cause) if went_on else LastWords(found)


def _cut(found: Traceback, lines: Sequence[str], end: int) -> None:
    """The message of an exception ends before a line: what follows was said later."""
    found.exception = [line.rstrip() for line in lines[found.at : end]]
    while found.exception and not found.exception[-1]:
        found.exception.pop()
    found.end = end


def _after(found: Traceback, lines: Sequence[str], output: Sequence[str]) -> Sequence[str]:
    """Return the lines of both streams after a traceback; its message ends where the other stream comes between."""
    place = max((at for at, line in enumerate(output) if line == lines[found.at]), default=-1)
    if place < 0:
        return ()
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(output[place:], lines[found.at : found.end])))
    if found.at + same < found.end and lines[found.at + same].strip():
        _cut(found, lines, found.at + same)
    return output[place + same :]


def _printed_between(after: Sequence[str], rest: Sequence[str], at: int) -> bool:
    """Return whether the other stream has lines between a traceback and the line ``at`` of the standard error."""
    if rest[at] not in after:
        return False
    place = len(after) - 1 - list(reversed(after)).index(rest[at])
    return sum(1 for line in after[:place] if line.strip()) > sum(1 for line in rest[:at] if line.strip())


# ------------------------------------------------------------------------------------------------------- of other ranks
_PEER_LEFT = re.compile(r"Connection (reset|closed|was likely closed)|Broken pipe|remote process exit", re.IGNORECASE)
_PEER_WAITED_FOR = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


def died_of_a_peer(said: Said) -> bool:
    """Return whether the exception a process died of is a broken connection: mostly another process ended before it.

    The words are those of the kernel, of Gloo ("Connection closed by peer"), of NCCL ("a remote process exiting
    prematurely") and of PyTorch's TCPStore ("Connection was likely closed").
    """
    found = last_words(said).died_of
    return found is not None and _is_of_a_peer(found)


def _is_of_a_peer(found: Traceback) -> bool:
    return _PEER_LEFT.search("\n".join(found.exception)) is not None


def tells_of_a_peer(failure: Outcome) -> bool:
    """Return whether a failure is only that another process has gone; NCCL says so further down in its message."""
    return _PEER_LEFT.search(failure.text if "NCCL" in failure.cause else failure.cause) is not None


def after_early_end(failure: Outcome, suspects: Sequence[Suspect]) -> Outcome:
    """Return a failure with the rank that had ended with status 0 before it, where others still needed that rank.

    It is the reason if the failure is a connection that broke, or a wait for other ranks that took too long.
    """
    if not (tells_of_a_peer(failure) or _PEER_WAITED_FOR.search(failure.cause)):
        return failure
    own = suspect_of(suspects, failure.rank)
    others = [row for row in suspects if row.outcome.rank != failure.rank and _ended_well(row, own)]
    early = min(others, key=lambda row: row.at, default=None)
    if early is None:
        return failure
    where = f"rank {failure.rank} on host {failure.host}" if failure.rank >= 0 else f"host {failure.host}"
    return Outcome(
        failure.kind,
        failure.status,
        early.outcome.host,
        rank=early.outcome.rank,
        place=early.outcome.place,
        end=EARLY_END,
        notes=(f"{where} failed after that: {failure.text}",),
    )


def _ended_well(suspect: Suspect, failed: Suspect | None) -> bool:
    """Return whether a rank ended with status 0 before another one failed.

    Its starter may have been first to take the status. Starters report the first rank that failed, so one that ended
    before that, without a word of an error, did not fail.
    """
    if suspect.outcome.kind == SUCCEEDED:
        return failed is None or suspect.at <= failed.at + _SEEN_LATER_SECONDS
    silent = not (suspect.certain or suspect.outcome.memory or suspect.outcome.cause)
    return silent and suspect.outcome.end == UNKNOWN_END and failed is not None and suspect.at <= failed.at


_SEEN_LATER_SECONDS = 1.0
"""How much later than its effect the end of a rank may be seen."""


# ---------------------------------------------------------------------------------------------------------- the failure
EMULATE = (
    "no GPU: with SMP_CPU_EMULATION=1 in its environment, a script of smp or smddp that asks for CUDA runs on CPUs"
)

_ON_DEVICE = "device-side assert triggered"
_ASSERTED = re.compile(r"(?m)\S+: block: \[[\d,]+\], thread: \[[\d,]+\] Assertion .* failed\.")
"""What torch's kernels print where an index is out of bounds; the exception that follows says nothing of it."""

_NO_GPU = re.compile(
    r"no attribute '_cuda_|Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
    r"|torch\.cuda\.is_available\(\) is False|no CUDA-capable device|no GPUs found|have NCCL built in"
    r"|Cannot access accelerator device"
)
"""What torch says where a script asks for a GPU: built without CUDA, and built with it on a host without a driver."""


def failure_of(
    *,
    what: str,
    host: str,
    mode: str,
    returncode: int | None,
    said: Said,
    rank: int = -1,
    oom_kills: int | None = None,
    cause: str = "",
    note: str = "",
    reported: bool = False,
) -> Outcome:
    """Return the failure of a program: its cause, where it happened, and context, each no longer than a text may be.

    Args:
        what: The program as a person calls it.
        host: Its host.
        mode: The job's mode.
        returncode: Negative after a signal; None if it is not known.
        said: What it printed, or the rank that failed first, if that is known.
        rank: Rank that failed first; -1 if it is not known.
        oom_kills: Processes of the host that the kernel killed; None if it does not say.
        cause: What is known of it otherwise, where the program said no traceback.
        note: Stands after the status.
        reported: ``rank`` and ``returncode`` come from a starter in whose output the ranks' own words are.
    """
    words = _of_reported(said, rank, returncode) if reported else last_words(said, returncode)
    number = signal_of(returncode or 0)
    killed = bool(oom_kills) or number not in (0, signal.SIGABRT)
    line = "" if killed else cause or words.line
    found = words.died_of
    cause = found.cause if found is not None else line
    context = [found.origin] if found is not None and found.origin else []
    asserted = _ASSERTED.search(_text(said.output)) if found is not None and _ON_DEVICE in cause else None
    context += [f"the GPU had printed: {asserted[0]}"] if asserted else []
    library = mode.startswith("smdistributed.") or (found is not None and "smdistributed/" in "".join(found.frames))
    made = Outcome(
        FAILED,
        exit_status(returncode or 0),
        host,
        "" if killed else shorten(cause),
        rank,
        lack_of_memory(oom_kills, host) if oom_kills else "",
        place_of(what, host, mode, rank),
        UNKNOWN_END if returncode is None else f"{describe_status(returncode, oom_kills)}{note}",
        (EMULATE,) if library and _NO_GPU.search(cause) else (),
    )
    if context and not killed:
        made = made._replace(notes=(*made.notes, *map(shorten, context)))
    if found is not None and not killed:
        return made._replace(frames=shorten("\n".join(found.frames)), message=shorten("\n".join(found.exception)))
    earlier = words.earlier or (found.cause if found is not None else "")
    last = _shown(_text(said.output))
    if line and len(last) == 1 and last[0].strip().startswith(line[:_LINE_LIMIT]):
        last = []  # it is the cause itself
    notes = (*made.notes, shorten(f"{EARLIER}{earlier}")) if earlier else made.notes
    return made._replace(notes=notes, message=shorten("\n".join(last)))


def _of_reported(said: Said, rank: int, returncode: int | None) -> LastWords:
    """Return the last words of a rank in the output of several, whose starter says how it ended.

    Python ends with 1 after an exception: a rank with another status did not die of one.
    """
    output = _before_report(_text(said.output))
    found = [made for made in find_tracebacks(output) if not made.ignored and not made.is_of_starter]
    own = [made for made in found if made.rank == rank >= 0]
    if own:
        return LastWords(own[-1])
    spoken = {at for made in found for at in range(made.start, made.end)}
    lines = [line for at, line in enumerate(lines_of(output)) if at not in spoken and not _MPI_LOG.match(line)]
    line = _last_line(without_help(lines))[0]
    line = line if _ERROR.search(line) else ""  # any rank may have printed it
    if returncode not in (None, 1):
        return LastWords(line=line)
    rest = [made for made in found if min(made.rank, rank) < 0 and not _is_of_a_peer(made)]
    return LastWords(rest[-1] if rest else found[0] if found else None, line)


_MPI_LOG = re.compile(r"^\[[\w.-]+:\d+\] (PMIX|PRTE|ORTE|OPAL|OMPI|PML|\w+:\w+:)[ _]?")
"""What Open MPI's daemons log of themselves, often for want of the rank that failed: [host:pid] PMIX ERROR: ..."""


def _before_report(output: str) -> str:
    """Return the output of ranks without what their starter says at the end."""
    lines = output.splitlines()
    found = find_tracebacks(output)
    first = next((made.start for made in found if made.is_of_starter), len(lines))
    return "\n".join(line for line in lines[:first] if not _STARTER_LOG.search(line))


_STARTER_LOG = re.compile(
    r"torch[/.]distributed[/.](elastic|run|launcher)|^[WE]\d{4} .* (api|run)\.py:\d+\]|\[launch\.py:\d+:"
    r"|\[(ft_launcher|RankMonServer)\d+@"
)


def _shown(output: str) -> list[str]:
    """Return the lines that are shown where no traceback is the cause."""
    everything = [line for line in _before_report(output).splitlines() if line.strip()]
    lines = [line for line in without_help(everything) if line] or everything
    fault = next((at for at, line in enumerate(lines) if _FAULT.match(line)), None)
    return lines[-_LINES_BACK:] if fault is None else lines[fault : fault + _LINES_BACK]
