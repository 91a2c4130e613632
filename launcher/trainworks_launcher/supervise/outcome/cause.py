"""Find the cause of a failure: weigh the evidence about a process, and make the outcome. Pure.

Evidence in its order of weight: the exception in the process's own record; the kernel's count of
the processes that were killed for lack of memory; the signal; the last line on standard error of a
Python without an exception. The output of any other program is shown, and not judged. Loaded only
when something fails.
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple, Sequence

from trainworks_launcher.contract.json_values import printable
from trainworks_launcher.supervise.outcome.evidence import (
    Kind,
    Observation,
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
    ProgramPlace,
    describe_status,
    exit_status,
    lack_of_memory,
    shorten,
    signal_of,
)
from trainworks_launcher.supervise.outcome.records import Record, find_first_exception
from trainworks_launcher.supervise.outcome.starter_reports import without_help


class ProcessEnd(NamedTuple):
    """The evidence about a process that ended.

    Attributes:
        output: End of its standard output and error.
        errors: End of its standard error; empty if several processes share it.
        records: Records of the process, of its children and of threads, in the order of time.
        pid: Its process id; 0 if that is not known.
        ended_at: Time of its end (monotonic clock); 0.0 if that is not known.
        shell: Whether the program is a shell script, which may end with a status of its own.
        python: Whether the program is a script of Python, which notes its own end unless it
            ends by ``os._exit``.
    """

    output: bytes
    errors: bytes = b""
    records: Sequence[Record] = ()
    pid: int = 0
    ended_at: float = 0.0
    shell: bool = False
    python: bool = False

    def own(self) -> Record | None:
        """Return the process's own record; None if it has none.

        A process may run several programs, one after the other (exec). Of the last program the
        first record counts: later ones are of its exit handlers.
        """
        own_records = [row for row in self.records if row.pid == self.pid and not row.thread]
        for row in own_records:
            if row.began == own_records[-1].began:
                return row
        return None


class Reason(NamedTuple):
    """Why a process ended.

    Attributes:
        exception: The exception that ended the process; None for none.
        line: Without an exception: the last line that tells of the end; ``""`` for none.
        earlier: An exception that had ended another process before.
    """

    exception: Record | None = None
    line: str = ""
    earlier: str = ""


def reason_of(process: ProcessEnd, returncode: int | None = None) -> Reason:
    """Return why one process ended: the first of these that is known.

    1. The exception in its own record, unless that only reports the failure of a child.
    2. The exception in a child's record, if the process reports that a child failed, or passes
       the child's status on.
    3. The text that was given to ``sys.exit``, from its own record.
    4. The last line on standard error of a Python without an exception, where the status is one
       that such a line explains.

    A child's exception that is not the reason is the earlier one.

    Args:
        process: Its output and its records.
        returncode: Negative after a signal; None if it is not known.
    """
    own_record, status = process.own(), status_of(process, returncode)
    # Records of children; without a record of its own all of them are.
    of_others = [row for row in process.records if own_record is None or row.pid != own_record.pid]
    child = find_first_exception(of_others)
    if own_record is None:
        if child is None:
            return Reason()
        if _passes_on(process, child, returncode):
            return Reason(child)
        return Reason(earlier=child.cause)

    if own_record.message and _ended_by_exception(own_record, returncode):
        interrupted = signal_of(status or 0) == signal.SIGINT
        if interrupted and own_record.message.startswith("KeyboardInterrupt"):
            return Reason()
        if own_record.is_of_a_child and child is not None:
            return Reason(child)
        return Reason(own_record)

    line = _headline(own_record.exit_message)
    if not line and status in _EXPLAINED_STATUSES:
        line = _last_line(process.errors)
    # The process may only repeat the message that its child died with.
    if child is not None and line:
        message_lines = [part.strip() for part in child.message.splitlines()]
        if line in message_lines:
            return Reason(child)
    earlier = ""
    if own_record.message:
        earlier = own_record.cause
    elif child is not None:
        earlier = child.cause
    return Reason(None, line, earlier)


def _ended_by_exception(own_record: Record, returncode: int | None) -> bool:
    """Return whether the exception in a process's own record ended the process.

    Args:
        own_record: A record with an exception.
        returncode: Negative after a signal; None if it is not known.
    """
    if not own_record.guessed:
        return True
    # A guessed exception is the value of sys.last_value, and may have been handled. An exception
    # that was not handled gives status 1.
    return returncode in (1, None)


def status_of(process: ProcessEnd, returncode: int | None) -> int | None:
    """Return the status that counts: a record of the end outweighs a later signal.

    A process that has noted an exception, or a call of ``sys.exit``, has failed of that. A signal
    to its exit handlers does not change the cause. A status that the process itself chose later
    counts as it is.

    Args:
        process: Its records.
        returncode: Negative after a signal; None if it runs or if that is not known.

    Returns:
        As ``returncode``; None if neither a record nor the kernel tells the status.
    """
    own_record = process.own()
    has_exit_status = returncode is not None and returncode >= 0
    if own_record is None or has_exit_status:
        return returncode
    if own_record.message and not own_record.guessed:
        # Python ends itself by SIGINT after a KeyboardInterrupt, else with status 1.
        if own_record.message.startswith("KeyboardInterrupt"):
            return -signal.SIGINT
        return 1
    if own_record.exit_status >= 0:
        return own_record.exit_status
    return returncode


def _passes_on(process: ProcessEnd, first: Record, returncode: int | None) -> bool:
    """Return whether a process without a record of its own ended because of a child's exception.

    Its end has to follow within seconds of the exception, without a Python in between that ended
    well, and with a status that passes a failure on. A shell passes any status on, also that of
    an aborted program. Any other process that aborts, and a script of Python that ends by
    ``os._exit``, has a reason of its own.

    Args:
        process: The process.
        first: The child's exception.
        returncode: Negative after a signal; None if it is not known.
    """
    ended_soon = process.ended_at < first.at + _SHELL_SECONDS
    if not ended_soon or process.python:
        return False
    # A Python that started after the exception, and ended without one.
    went_on = any(not row.message and row.began >= first.at for row in process.records)
    if went_on:
        return False
    number = signal_of(returncode or 0)
    if process.shell:
        return number in (0, signal.SIGABRT)
    return returncode in (1, None)


def _headline(text: str) -> str:
    """Return the first line of a text, shortened; all lines if the first one ends with a colon.

    ``""`` for an empty text.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    if lines[0].endswith(":"):
        return _cut(" ".join(lines))
    return _cut(lines[0])


def _cut(line: str) -> str:
    """Shorten a line to the limit of a cause."""
    if len(line) <= _MAX_LINE_CHARACTERS:
        return line
    return f"{line[:_MAX_LINE_CHARACTERS]} [...]"


_EXPLAINED_STATUSES = (1, 2)
"""Statuses of a Python that prints why it ends: ``sys.exit("...")`` has 1, a wrong command line 2.
"""

_SHELL_SECONDS = 5.0
"""Longest life of a process after the child with the status that it passes on."""

_OF_THE_INTERPRETER = re.compile(
    r"\n(?:Error in atexit\._run_exitfuncs|Exception ignored (?:in|on)).*(?:\nTraceback .*(?:\n["
    r" \t].*)*\n\S.*)?\n*$"
)
"""Exceptions that Python prints although they do not change its end."""


def _last_line(errors: bytes) -> str:
    """Return the last line of a process's standard error that is not indented.

    Indented lines below it belong to it, and are shown only if it ends with a colon. mpirun's help,
    and exceptions that do not change the end of a Python, are skipped.

    Args:
        errors: End of the standard error.

    Returns:
        The line, shortened; ``""`` if there is none, or if it is a progress bar, which writes over
        itself.
    """
    text = "\n" + "\n".join(without_help(errors.decode("utf-8", "replace").split("\n")))
    while _OF_THE_INTERPRETER.search(text):
        text = _OF_THE_INTERPRETER.sub("\n", text)
    # A line without a letter tells nothing.
    lines = [line for line in text.split("\n") if any(map(str.isalpha, line))]
    if not lines or "\r" in lines[-1].rstrip("\r"):
        return ""
    head = len(lines) - 1
    while head > 0 and lines[head].startswith((" ", "\t")):
        head -= 1
    last = lines[head].strip()
    if last.endswith(":"):
        last = " ".join(line.strip() for line in lines[head:])
    return printable(_cut(last))


_MAX_LINE_CHARACTERS = 400
"""Characters of a line that is a cause."""

_MAX_SHOWN_LINES = 12
"""Lines of the output that are shown where no exception explains a failure."""


def _text(data: bytes) -> str:
    """Return output as text, without control characters that a terminal obeys."""
    return printable(data.decode("utf-8", "replace"))


# --- of other ranks -------------------------------------------------------------------------------
_LOST_RAY_PROCESS = re.compile(r"ray\.exceptions\.\w*(Died|Crashed|Unavailable)\w*")
_CPP_EXCEPTION = re.compile(r"(?m)^\s*what\(\):\s*(\S.*)$")
"""The exception that ended a program of C++, as its runtime prints it before it aborts."""


def observe(process: ProcessEnd, returncode: int | None, *, of_memory: bool = False) -> Observation:
    """Return the facts about one process that decide the kind of its evidence.

    Args:
        process: Its output and its records.
        returncode: Negative after a signal; None if it runs or if that is not known.
        of_memory: Whether the kernel killed it for lack of memory.
    """
    own_record, died_of = process.own(), reason_of(process, returncode).exception
    if own_record is not None and own_record.of_sigterm:
        noted_status = exit_status(status_of(process, returncode) or 0)
        return Observation(returncode, noted=noted_status, of_sigterm=True)
    if died_of is not None:
        return Observation(returncode, noted=1, blames=died_of.blames)
    if own_record is None:
        blames = False
        # A program of C++ has no record, but its runtime prints the exception before it aborts.
        if signal_of(returncode or 0) == signal.SIGABRT:
            exceptions = _CPP_EXCEPTION.findall(_text(process.output))
            blames = bool(exceptions) and blames_a_peer(exceptions[-1])
        return Observation(returncode, blames=blames, of_memory=of_memory)
    noted = own_record.exit_status if own_record.exit_status >= 0 else None
    if own_record.message and not own_record.guessed:
        # A KeyboardInterrupt, which is not a reason: Python ends itself by SIGINT.
        noted = exit_status(-signal.SIGINT)
    exited = returncode is not None and returncode > 0 and not signal_of(returncode)
    if noted is None and own_record.left and exited:
        # ``raise SystemExit(3)`` leaves no status in the record, but the time of the failure.
        noted = returncode
    return Observation(
        returncode, noted, own_record.left, blames_a_peer(own_record.exit_message), of_memory
    )


def began_at(process: ProcessEnd, returncode: int | None) -> float:
    """Return when the failure of a process began, in seconds of the monotonic clock.

    That is the time of the record of its exception or, of a process that left its program, of the
    record that its exit handlers began. Without such a record it is the time of its end. A process
    that SIGTERM ended, or that died by a signal in its exit handlers (``Kind.DIED``), has the time
    of its end, too.

    Args:
        process: The evidence about the process.
        returncode: Negative after a signal; None if the process still runs, or is another host's.
    """
    own_record, died_of = process.own(), reason_of(process, returncode).exception
    if own_record is not None and own_record.of_sigterm:
        return process.ended_at
    if died_of is not None:
        return died_of.at
    if own_record is None or not own_record.tells_an_end:
        return process.ended_at
    if kind_of(observe(process, returncode)) is Kind.DIED:
        return process.ended_at
    return own_record.at


def tells_of_ray(failure: Outcome) -> bool:
    """Return whether a failure only reports a lost process of Ray: Ray's daemon may have died."""
    return _LOST_RAY_PROCESS.search(failure.text) is not None


def after_leaving(failure: Outcome, left: Suspect) -> Outcome:
    """Return the failure of a rank that lost a peer as the failure of the peer that had left.

    Args:
        failure: The failure of the rank that lost the peer; its text becomes a note.
        left: The evidence about the peer.
    """
    early = left.outcome
    where = f"host {failure.host}"
    if failure.rank >= 0:
        where = f"rank {failure.rank} on {where}"
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

_DEVICE_ASSERT = "device-side assert triggered"
_ASSERTION_LINE = re.compile(
    r"(?m)\S+: block: \[[\d,]+\], thread: \[[\d,]+\] Assertion .* failed\."
)
"""Printed by torch's kernels for an index out of bounds. The exception that follows does not name
the assertion.
"""

_NO_GPU_MESSAGE = re.compile(
    r"no attribute '_cuda_|Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs"
    r" are available"
    r"|torch\.cuda\.is_available\(\) is False|no CUDA-capable device|no GPUs found|have NCCL"
    r" built in"
    r"|Cannot access accelerator device"
)
"""Messages of torch where a script asks for a GPU: torch built without CUDA, or a host without a
driver.
"""


_CHILD_LOST = re.compile(
    r"killed|exited unexpectedly|terminated abruptly|SIGKILL|signal 9\b", re.IGNORECASE
)
"""In exceptions about a process that was lost."""


class OutsideEvidence(NamedTuple):
    """Evidence about a failure from outside the process that failed.

    Attributes:
        oom_kills: Processes of the host that the kernel killed; None without a counter.
        cause: A cause from elsewhere, used if no exception ended the program.
        note: Text after the status, for example about a full disk.
    """

    oom_kills: int | None = None
    cause: str = ""
    note: str = ""


def failure_of(
    place: ProgramPlace,
    returncode: int | None,
    process: ProcessEnd,
    outside: OutsideEvidence = OutsideEvidence(),  # noqa: B008  (a constant)
) -> Outcome:
    """Make the failure of a program: its cause, its place, and context.

    Each text is shortened to the limit of a failure text.

    Args:
        place: Where the program ran, with the rank that failed first.
        returncode: Negative after a signal; None if it is not known.
        process: Evidence about the program, or about the rank that failed first.
        outside: Evidence from outside the process.
    """
    oom_kills, cause = outside.oom_kills, outside.cause
    reason, counted = reason_of(process, returncode), status_of(process, returncode)
    exception = reason.exception
    if exception is not None:
        cause = exception.cause
        if place.rank < 0 and exception.pid != process.pid:
            # The script itself started the starter of this rank.
            place = place._replace(rank=exception.rank)
    elif not cause and not signal_of(counted or 0):
        cause = reason.line

    memory = ""
    if oom_kills and _is_of_memory(process, counted, cause):
        memory = lack_of_memory(oom_kills, place.host)

    notes = []
    if _NO_GPU_MESSAGE.search(cause) and _uses_smdistributed(place.mode, exception):
        notes.append(EMULATE)
    if exception is not None and exception.origin not in cause:
        notes.append(exception.origin)
    if _DEVICE_ASSERT in cause:
        assertion = _ASSERTION_LINE.search(_text(process.output))
        if assertion:
            notes.append(f"the GPU had printed: {assertion[0]}")
    if oom_kills and not memory:
        notes.append(f"before that, {lack_of_memory(oom_kills, place.host)}")
    if reason.earlier:
        notes.append(f"{EARLIER}{reason.earlier}")
    threads = [row for row in process.records if row.thread and row.cause]
    notes += [f"a thread ({row.thread}) had died of {row.cause}" for row in threads]

    frames = ""
    if exception is None:
        message = _last_lines(process.output, cause)
    else:
        message = exception.message.rstrip("\n")
        if exception.frames:
            frames = f"{_TRACEBACK}\n{exception.frames.rstrip()}"
    return Outcome(
        FAILED,
        exit_status(counted or 0),
        place.host,
        shorten(cause),
        place.rank,
        memory,
        place.text,
        _end_of(returncode, counted, outside),
        [shorten(words) for words in notes if words][:_MAX_NOTES],
        shorten(frames),
        shorten(message),
    )


def _is_of_memory(process: ProcessEnd, counted: int | None, cause: str) -> bool:
    """Return whether lack of memory ended a process, on a host where the kernel has killed some.

    The process was killed itself, or reports that it has lost a process.

    Args:
        process: The process.
        counted: Its status that counts (``status_of``).
        cause: The cause that is known so far; ``""`` for none.
    """
    if _CHILD_LOST.search(cause):
        return True
    was_killed = signal_of(counted or 0) == signal.SIGKILL or process.own() is None
    return was_killed and not cause


def _uses_smdistributed(mode: str, exception: Record | None) -> bool:
    """Return whether a job uses smp or smddp: by its mode, its imports, or frames of its exception.

    The imports tell of smp only, and in every mode: ``none``, for example.
    """
    if mode.startswith("smdistributed."):
        return True
    if exception is None:
        return False
    return exception.uses_smp or "smdistributed/" in exception.frames


def _last_lines(output: bytes, cause: str) -> str:
    """Return the last twelve lines of an output, without empty ones and mpirun's help.

    ``""`` if they only repeat the cause.
    """
    lines = [line for line in _text(output).splitlines() if line.strip()]
    without_advice = [line for line in without_help(lines) if line]
    last = (without_advice or lines)[-_MAX_SHOWN_LINES:]
    if len(last) == 1 and cause and last[0].strip().startswith(cause[:_MAX_LINE_CHARACTERS]):
        return ""
    return "\n".join(last)


def _end_of(returncode: int | None, counted: int | None, outside: OutsideEvidence) -> str:
    """Describe the end of a process, for example ``exit status 1, noted before SIGKILL``.

    Args:
        returncode: Negative after a signal; None if it is not known.
        counted: The status that counts (``status_of``).
        outside: Has a note for the end, and the number of killed processes.
    """
    if counted is None:
        return UNKNOWN_END
    oom_kills = outside.oom_kills
    end = f"{describe_status(counted, oom_kills)}{outside.note}"
    if returncode is None:
        return f"{end}, noted before its process had ended"
    if returncode != counted:
        later, _, _ = describe_status(returncode, oom_kills).partition(" (")
        return f"{end}, noted before {later}"
    return end


_TRACEBACK = "Traceback (most recent call last):"
_MAX_NOTES = 5
"""Notes that a failure has at most."""
