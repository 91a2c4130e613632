"""What a failure is about: the evidence is weighed, and the outcome says it. Pure.

In this order: the exception that ended the process, by its own record; the kernel's count of the
processes that it killed for lack of memory; the signal; what a Python that no exception ended said
last. What anything else printed is shown, and not judged. Loaded only when something fails.
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple, Sequence

from trainworks_launcher.contract.json_values import printable
from trainworks_launcher.supervise.outcome.evidence import (
    Kind,
    Seen,
    Suspect,
    blames_a_peer,
    kind_of,
)
from trainworks_launcher.supervise.outcome.outcome import (
    EARLIER,
    EARLY_END,
    FAILED,
    UNKNOWN_END,
    Outcome,
    describe_status,
    exit_status,
    lack_of_memory,
    place_of,
    shorten,
    signal_of,
)
from trainworks_launcher.supervise.outcome.records import Record, first_of_the_last
from trainworks_launcher.supervise.outcome.starter_reports import without_help


class Said(NamedTuple):
    """What is known of a process that ended.

    Attributes:
        output: End of all that it printed.
        errors: The part of it that went to the standard error; empty if several processes have one.
        records: Of its end, of those that it started, and of threads, in the order of time.
        pid: Its process id; 0 if that is not known.
        ended_at: When, by the monotonic clock; 0.0 if that is not known.
        shell: It is a shell script, which may end with a status of its own.
        python: It is a script of Python, which notes its own end unless it ends
            itself by ``os._exit``.
    """

    output: bytes
    errors: bytes = b""
    records: Sequence[Record] = ()
    pid: int = 0
    ended_at: float = 0.0
    shell: bool = False
    python: bool = False

    def own(self) -> Record | None:
        """Return the record of the process itself: of its last program the
        first one, for its exit handlers follow.
        """
        own = [row for row in self.records if row.pid == self.pid and not row.thread]
        return next((row for row in own if row.began == own[-1].began), None)


class Reason(NamedTuple):
    """Why a process ended.

    Attributes:
        died_of: The exception; None if none did.
        line: Else what it said last; ``""`` if nothing says that it is about its end.
        earlier: An exception that ended another process before.
    """

    died_of: Record | None = None
    line: str = ""
    earlier: str = ""


def reason_of(said: Said, returncode: int | None = None) -> Reason:
    """Return why one process ended: the first of these that is there.

    1. The exception that its own record has, where that does not only say that a child failed.
    2. The exception that a child noted, where the process says that a child
       failed, or passes its end on.
    3. The text that ``sys.exit`` was told, by its own record.
    4. The last line on standard error of a Python that no exception ended, with
       a status that says why.

    A child's exception that is not the reason is told as an earlier one.

    Args:
        said: What it printed and noted.
        returncode: Negative after a signal; None if it is not known.
    """
    own, status = said.own(), status_of(said, returncode)
    child = first_of_the_last([row for row in said.records if own is None or row.pid != own.pid])
    if own is not None and own.message and _counts(own, returncode):
        if signal_of(status or 0) == signal.SIGINT and own.message.startswith("KeyboardInterrupt"):
            return Reason()
        return Reason(child if own.is_of_a_child and child is not None else own)
    earlier = (
        own.cause if own is not None and own.message else child.cause if child is not None else ""
    )
    if own is None:
        is_childs = child is not None and _passes_on(said, child, returncode)
        return Reason(child) if is_childs else Reason(None, "", earlier)
    line = _headline(own.said)
    if not line and status in _SAYS_WHY:
        line = _last_line(said.errors)
    # It said something of its own after its child had died, or it repeats what that one died of.
    if child is not None and line and line in [part.strip() for part in child.message.splitlines()]:
        return Reason(child)
    return Reason(None, line, earlier)


def _counts(own: Record, returncode: int | None) -> bool:
    """Return whether a process's own exception ended it.

    One that it handles may be left in sys.last_value; one that it does not handle gives status 1.
    """
    return not own.guessed or returncode in (1, None)


def status_of(said: Said, returncode: int | None) -> int | None:
    """Return the status that counts: a record of the end outlives a signal that came after it.

    A process that has noted an exception, or what ``sys.exit`` was told, has failed of that: who
    sends a signal to its exit handlers does not change why. A status that the process chose later
    counts as it is.

    Args:
        said: What it noted.
        returncode: Negative after a signal; None if it runs or if that is not known.
    """
    own = said.own()
    if own is None or (returncode is not None and returncode >= 0):
        return returncode
    if own.message and not own.guessed:
        return -signal.SIGINT if own.message.startswith("KeyboardInterrupt") else 1
    return own.exit_status if own.exit_status >= 0 else returncode


def _passes_on(said: Said, first: Record, returncode: int | None) -> bool:
    """Return whether a process without a record of its own ended because of a child's exception.

    The ends belong together: the process ended within seconds of the exception, with no Python in
    between that ended well, and with a status that passes it on. A shell has any status, and that
    of an aborted program, too; another process that aborts does so for a reason of its own, and so
    does a script of Python that ends by ``os._exit``.
    """
    near = first.at + _SHELL_SECONDS > said.ended_at
    went_on = any(not row.message and row.began >= first.at for row in said.records)
    if not near or went_on or said.python:
        return False
    number = signal_of(returncode or 0)
    if said.shell:
        return number in (0, signal.SIGABRT)
    return returncode in (1, None)


def _headline(told: str) -> str:
    """Return the first line of a text, with what follows it if it only announces that."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    if not lines:
        return ""
    headline = " ".join(lines) if lines[0].endswith(":") else lines[0]
    return headline if len(headline) <= _LINE_LIMIT else f"{headline[:_LINE_LIMIT]} [...]"


_SAYS_WHY = (1, 2)
"""Statuses with which a Python ends that says why: ``sys.exit("...")`` has 1, a
wrong command line 2.
"""

_SHELL_SECONDS = 5.0
"""How long a process may live after the child whose end it passes on."""

_OF_THE_INTERPRETER = re.compile(
    r"\n(?:Error in atexit\._run_exitfuncs|Exception ignored (?:in|on)).*(?:\nTraceback .*(?:\n["
    r" \t].*)*\n\S.*)?\n*$"
)
"""What Python prints of exceptions that change nothing about its end."""


def _last_line(errors: bytes) -> str:
    """Return what a process said last on its standard error: the line that the
    last indented ones belong to.

    ``""`` if that is a progress bar, which writes over its own line.
    """
    text = "\n" + "\n".join(without_help(errors.decode("utf-8", "replace").split("\n")))
    while _OF_THE_INTERPRETER.search(text):
        text = _OF_THE_INTERPRETER.sub("\n", text)
    lines = [line for line in text.split("\n") if any(map(str.isalpha, line))]
    if not lines or "\r" in lines[-1].rstrip("\r"):
        return ""
    head = next(
        (at for at in range(len(lines) - 1, -1, -1) if not lines[at].startswith((" ", "\t"))), 0
    )
    said = lines[head].strip()
    if said.endswith(":"):
        said = " ".join(line.strip() for line in lines[head:])
    return printable(said if len(said) <= _LINE_LIMIT else f"{said[:_LINE_LIMIT]} [...]")


_LINE_LIMIT = 400
_SHOWN_LINES = 12


def _text(data: bytes) -> str:
    return printable(data.decode("utf-8", "replace"))


# --- of other ranks -------------------------------------------------------------------------------
_OF_RAY_LEFT = re.compile(r"ray\.exceptions\.\w*(Died|Crashed|Unavailable)\w*")
_WHAT = re.compile(r"(?m)^\s*what\(\):\s*(\S.*)$")
"""The exception that ended a program of C++, as its runtime prints it before it aborts."""


def seen_of(said: Said, returncode: int | None, *, of_memory: bool = False) -> Seen:
    """Return what is known of a process, as evidence.

    Args:
        said: What it printed and noted.
        returncode: Negative after a signal; None if it runs or if that is not known.
        of_memory: The kernel killed it for lack of memory.
    """
    own, died_of = said.own(), reason_of(said, returncode).died_of
    if own is not None and own.of_sigterm:
        return Seen(
            returncode, noted=exit_status(status_of(said, returncode) or 0), of_sigterm=True
        )
    if died_of is not None:
        return Seen(returncode, noted=1, blames=died_of.blames)
    aborted = signal_of(returncode or 0) == signal.SIGABRT
    words = _WHAT.findall(_text(said.output)) if aborted else []
    if own is None:
        return Seen(
            returncode, blames=bool(words) and blames_a_peer(words[-1]), of_memory=of_memory
        )
    noted = own.exit_status if own.exit_status >= 0 else None
    if own.message and not own.guessed:  # KeyboardInterrupt, which Python tells by SIGINT
        noted = exit_status(-signal.SIGINT)
    said_so = returncode is not None and returncode > 0 and not signal_of(returncode)
    if noted is None and own.left and said_so:
        # ``raise SystemExit(3)``: the status was seen, and the time is that of the record.
        noted = returncode
    return Seen(returncode, noted, own.left, blames_a_peer(own.said), of_memory)


def began_at(said: Said, returncode: int | None) -> float:
    """Return when the trouble of a process began: by the record of what it died of, or of its
    leaving; else its end.

    One that was told to end, or that crashed in its exit handlers, has the time
    of its end, when that was seen.
    """
    own, died_of = said.own(), reason_of(said, returncode).died_of
    if own is not None and own.of_sigterm:
        return said.ended_at
    if died_of is not None:
        return died_of.at
    if own is None or not own.tells_an_end or kind_of(seen_of(said, returncode)) is Kind.DIED:
        return said.ended_at
    return own.at


def tells_of_ray(failure: Outcome) -> bool:
    """Return whether a failure is only that a process of Ray has gone: its
    daemon's death may be the reason.
    """
    return _OF_RAY_LEFT.search(failure.text) is not None


def after_leaving(failure: Outcome, left: Suspect) -> Outcome:
    """Return the failure of a rank that missed another one, as that of the one that had left."""
    early = left.outcome
    where = (
        f"rank {failure.rank} on host {failure.host}"
        if failure.rank >= 0
        else f"host {failure.host}"
    )
    return Outcome(
        failure.kind,
        failure.status,
        early.host,
        rank=early.rank,
        place=early.place,
        end=EARLY_END if early.end == UNKNOWN_END else early.end,
        notes=(*early.notes, f"{where} failed after that: {failure.text}"),
        message=early.message,
    )


# --- the failure ----------------------------------------------------------------------------------
EMULATE = (
    "no GPU: with SMP_CPU_EMULATION=1 in its environment, a script of smp or smddp that asks for"
    " CUDA runs on CPUs"
)

_ON_DEVICE = "device-side assert triggered"
_ASSERTED = re.compile(r"(?m)\S+: block: \[[\d,]+\], thread: \[[\d,]+\] Assertion .* failed\.")
"""What torch's kernels print where an index is out of bounds.

The exception that follows says nothing of it.
"""

_NO_GPU = re.compile(
    r"no attribute '_cuda_|Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs"
    r" are available"
    r"|torch\.cuda\.is_available\(\) is False|no CUDA-capable device|no GPUs found|have NCCL"
    r" built in"
    r"|Cannot access accelerator device"
)
"""What torch says where a script asks for a GPU: built without CUDA, and built
with it on a host without a driver.
"""


_CHILD_LOST = re.compile(
    r"killed|exited unexpectedly|terminated abruptly|SIGKILL|signal 9\b", re.IGNORECASE
)
"""What exceptions say of a process that the one who raised them has lost."""


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
) -> Outcome:
    """Return the failure of a program: its cause, where it happened, and
    context, each no longer than a text may be.

    Args:
        what: The program as a person calls it.
        host: Its host.
        mode: The job's mode.
        returncode: Negative after a signal; None if it is not known.
        said: What is known of it, or of the rank that failed first.
        rank: Rank that failed first; -1 if it is not known.
        oom_kills: Processes of the host that the kernel killed; None if it does not say.
        cause: What is known of it otherwise, where no exception ended it.
        note: Stands after the status.
    """
    reason, counted = reason_of(said, returncode), status_of(said, returncode)
    found = reason.died_of
    if (
        rank < 0 and found is not None and found.pid != said.pid
    ):  # a rank of a starter that the script started
        rank = found.rank
    cause = (
        found.cause
        if found is not None
        else cause or ("" if signal_of(counted or 0) else reason.line)
    )
    hard = signal_of(counted or 0) == signal.SIGKILL or said.own() is None
    of_memory = bool(oom_kills) and ((hard and not cause) or _CHILD_LOST.search(cause) is not None)
    library = mode.startswith("smdistributed.") or (
        found is not None and "smdistributed/" in found.frames
    )
    asserted = _ASSERTED.search(_text(said.output)) if _ON_DEVICE in cause else None
    notes = [
        EMULATE if library and _NO_GPU.search(cause) else "",
        found.origin if found is not None and found.origin not in cause else "",
        f"the GPU had printed: {asserted[0]}" if asserted else "",
        f"before that, {lack_of_memory(oom_kills, host)}" if oom_kills and not of_memory else "",
        f"{EARLIER}{reason.earlier}" if reason.earlier else "",
        *(
            f"a thread ({row.thread}) had died of {row.cause}"
            for row in said.records
            if row.thread and row.cause
        ),
    ]
    message, frames = "", ""
    if found is not None:
        message, frames = (
            found.message.rstrip("\n"),
            f"{_TRACEBACK}\n{found.frames.rstrip()}" if found.frames else "",
        )
    else:
        everything = [line for line in _text(said.output).splitlines() if line.strip()]
        last = ([line for line in without_help(everything) if line] or everything)[-_SHOWN_LINES:]
        is_cause = len(last) == 1 and cause and last[0].strip().startswith(cause[:_LINE_LIMIT])
        message = "" if is_cause else "\n".join(last)
    return Outcome(
        FAILED,
        exit_status(counted or 0),
        host,
        shorten(cause),
        rank,
        lack_of_memory(oom_kills or 0, host) if of_memory else "",
        place_of(what, host, mode, rank),
        _end_of(returncode, counted, oom_kills, note),
        [shorten(words) for words in notes if words][:_NOTES],
        shorten(frames),
        shorten(message),
    )


def _end_of(returncode: int | None, counted: int | None, oom_kills: int | None, note: str) -> str:
    """Return how a process ended in words. counted: the status that counts,
    which its record may have.
    """
    if counted is None:
        return UNKNOWN_END
    told = f"{describe_status(counted, oom_kills)}{note}"
    if returncode is None:
        return f"{told}, noted before its process had ended"
    if returncode != counted:
        return f"{told}, noted before {describe_status(returncode, oom_kills).partition(' (')[0]}"
    return told


_TRACEBACK = "Traceback (most recent call last):"
_NOTES = 5
