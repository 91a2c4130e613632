"""What a failure is about: the evidence is weighed, and the outcome says it. Pure.

In this order: the exception that ended the process, by its own record; the kernel's count of the processes that it
killed for lack of memory; the signal; what a Python that no exception ended said last. What anything else printed is
shown, and not judged. Loaded only when something fails.
"""

from __future__ import annotations

import re
import signal
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
from trainworks_launcher.supervise.outcome.records import Record, first_of_the_last
from trainworks_launcher.supervise.outcome.starters import without_help


class Said(NamedTuple):
    """What is known of a process that ended.

    Attributes:
        output: End of all that it printed.
        errors: The part of it that went to the standard error; empty if several processes have one.
        records: Of its end, of those that it started, and of threads, in the order of time.
        pid: Its process id; 0 if that is not known.
        ended_at: When, by the monotonic clock; 0.0 if that is not known.
        shell: It is a shell script, which may end with a status of its own.
    """

    output: bytes
    errors: bytes = b""
    records: Sequence[Record] = ()
    pid: int = 0
    ended_at: float = 0.0
    shell: bool = False

    def own(self) -> Record | None:
        """Return the record of the process itself."""
        return next((row for row in reversed(self.records) if row.pid == self.pid and not row.thread), None)


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
    """Return why a process ended. returncode: negative after a signal; None if it is not known."""
    own, number = said.own(), signal_of(returncode or 0)
    first = first_of_the_last([row for row in said.records if row is not own])
    if own is not None and own.message and own.guessed and returncode not in (1, None):
        # A program that handles an exception may leave it in sys.last_value; one that it does not handle gives 1.
        return Reason(None, _last_line(said.errors) if returncode in _SAYS_WHY else "", own.cause)
    if own is not None and own.message:
        if number == signal.SIGINT and own.message.startswith("KeyboardInterrupt"):
            return Reason()
        return Reason(first if own.is_of_a_child and first is not None else own)
    if first is None:
        return Reason(line=_last_line(said.errors) if own is not None and returncode in _SAYS_WHY else "")
    if own is not None:  # no exception ended it: it said something of its own after that one, or it did not
        line = _last_line(said.errors) if returncode in _SAYS_WHY else ""
        is_of_first = bool(line) and line in [part.strip() for part in first.message.splitlines()]
        return Reason(first) if is_of_first else Reason(None, line, first.cause)
    return Reason(first) if _passes_on(said, first, returncode) else Reason(None, "", first.cause)


def _passes_on(said: Said, first: Record, returncode: int | None) -> bool:
    """Return whether a process without a record of its own ended because of a child's exception.

    The ends belong together: the process ended within seconds of the exception, with no Python in between that ended
    well, and with a status that passes it on. A shell has any status, and that of an aborted program, too; another
    process that aborts does so for a reason of its own.
    """
    near = first.at + _SHELL_SECONDS > said.ended_at
    went_on = any(not row.message and row.began >= first.at for row in said.records)
    if not near or went_on:
        return False
    number = signal_of(returncode or 0)
    if said.shell:
        return number in (0, signal.SIGABRT)
    return returncode in (1, None)


_SAYS_WHY = (1, 2)
"""Statuses with which a Python ends that says why: ``sys.exit("...")`` has 1, a wrong command line 2."""

_SHELL_SECONDS = 5.0
"""How long a process may live after the child whose end it passes on."""

_OF_THE_INTERPRETER = re.compile(
    r"\n(?:Error in atexit\._run_exitfuncs|Exception ignored (?:in|on)).*(?:\nTraceback .*(?:\n[ \t].*)*\n\S.*)?\n*$"
)
"""What Python prints of exceptions that change nothing about its end."""


def _last_line(errors: bytes) -> str:
    """Return what a process said last on its standard error: the line that the last indented ones belong to.

    ``""`` if that is a progress bar, which writes over its own line.
    """
    text = "\n" + "\n".join(without_help(errors.decode("utf-8", "replace").split("\n")))
    while _OF_THE_INTERPRETER.search(text):
        text = _OF_THE_INTERPRETER.sub("\n", text)
    lines = [line for line in text.split("\n") if any(map(str.isalpha, line))]
    if not lines or "\r" in lines[-1].rstrip("\r"):
        return ""
    head = next((at for at in range(len(lines) - 1, -1, -1) if not lines[at].startswith((" ", "\t"))), 0)
    said = lines[head].strip()
    if said.endswith(":"):
        said = " ".join(line.strip() for line in lines[head:])
    return printable(said if len(said) <= _LINE_LIMIT else f"{said[:_LINE_LIMIT]} [...]")


_LINE_LIMIT = 400
_SHOWN_LINES = 12


def _text(data: bytes) -> str:
    return printable(data.decode("utf-8", "replace"))


# ------------------------------------------------------------------------------------------------------- of other ranks
_PEER_LEFT = re.compile(r"Connection (reset|closed|was likely closed)|Broken pipe|remote process exit", re.IGNORECASE)
_OF_RAY_LEFT = re.compile(r"ray\.exceptions\.\w*(Died|Crashed|Unavailable)\w*")
_PEER_WAITED_FOR = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


def died_of_a_peer(record: Record | None) -> bool:
    """Return whether the exception a process died of is a broken connection: mostly another process ended before it.

    The words are those of the kernel, of Gloo ("Connection closed by peer"), of NCCL ("a remote process exiting
    prematurely") and of PyTorch's TCPStore ("Connection was likely closed").
    """
    return record is not None and _PEER_LEFT.search(record.message) is not None


def tells_of_a_peer(failure: Outcome) -> bool:
    """Return whether a failure is only that another process has gone; NCCL says so further down in its message."""
    return _PEER_LEFT.search(failure.text if "NCCL" in failure.cause else failure.cause) is not None


def tells_of_ray(failure: Outcome) -> bool:
    """Return whether a failure is only that a process of Ray has gone: its daemon's death may be the reason."""
    return _OF_RAY_LEFT.search(failure.text) is not None


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


_CHILD_LOST = re.compile(r"killed|exited unexpectedly|terminated abruptly|SIGKILL|signal 9\b", re.IGNORECASE)
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
    """Return the failure of a program: its cause, where it happened, and context, each no longer than a text may be.

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
    reason = reason_of(said, returncode)
    found = reason.died_of
    if rank < 0 and found is not None and found.pid != said.pid:  # a rank of a starter that the script started
        rank = found.rank
    cause = found.cause if found is not None else cause or ("" if signal_of(returncode or 0) else reason.line)
    hard = signal_of(returncode or 0) == signal.SIGKILL or said.own() is None
    of_memory = bool(oom_kills) and ((hard and not cause) or _CHILD_LOST.search(cause) is not None)
    library = mode.startswith("smdistributed.") or (found is not None and "smdistributed/" in found.frames)
    asserted = _ASSERTED.search(_text(said.output)) if _ON_DEVICE in cause else None
    notes = [
        EMULATE if library and _NO_GPU.search(cause) else "",
        found.origin if found is not None and found.origin not in cause else "",
        f"the GPU had printed: {asserted[0]}" if asserted else "",
        f"before that, {lack_of_memory(oom_kills, host)}" if oom_kills and not of_memory else "",
        f"{EARLIER}{reason.earlier}" if reason.earlier else "",
        *(f"a thread ({row.thread}) had died of {row.cause}" for row in said.records if row.thread and row.cause),
    ]
    message, frames = "", ""
    if found is not None:
        message, frames = found.message.rstrip("\n"), f"{_TRACEBACK}\n{found.frames.rstrip()}" if found.frames else ""
    else:
        everything = [line for line in _text(said.output).splitlines() if line.strip()]
        last = ([line for line in without_help(everything) if line] or everything)[-_SHOWN_LINES:]
        is_cause = len(last) == 1 and cause and last[0].strip().startswith(cause[:_LINE_LIMIT])
        message = "" if is_cause else "\n".join(last)
    return Outcome(
        FAILED,
        exit_status(returncode or 0),
        host,
        shorten(cause),
        rank,
        lack_of_memory(oom_kills or 0, host) if of_memory else "",
        place_of(what, host, mode, rank),
        UNKNOWN_END if returncode is None else f"{describe_status(returncode, oom_kills)}{note}",
        [shorten(words) for words in notes if words][:_NOTES],
        shorten(frames),
        shorten(message),
    )


_TRACEBACK = "Traceback (most recent call last):"
_NOTES = 5
