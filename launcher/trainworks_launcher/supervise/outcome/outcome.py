"""How a job ended: one value for every host, and the text that a person reads. Pure."""

from __future__ import annotations

import signal
from typing import NamedTuple, Sequence

from trainworks_launcher.contract import names

SUCCEEDED, FAILED, STOPPED = "succeeded", "failed", "stopped"
"""The three ends. Stopped: a stop signal came, and the program ended within its grace or was killed after it."""


class Outcome(NamedTuple):
    """How a job ended.

    Attributes:
        kind: SUCCEEDED, FAILED or STOPPED.
        status: Exit status of every host.
        host: Host where it happened.
        text: The failure text, cause first; ``""`` for a success.
        cause: First line of the failure text that the launcher made, also where ``text`` is the user's own.
        rank: Process that failed first; -1 if that is not known.
    """

    kind: str
    status: int = 0
    host: str = ""
    text: str = ""
    cause: str = ""
    rank: int = -1


def exit_status(wait_status: int) -> int:
    """Return the status to exit with, from a wait status: the program's own, or 128 + signal as a shell has it."""
    if wait_status >= 0:
        return wait_status
    return 128 - wait_status


def describe_status(returncode: int, oom_kills: int | None = None) -> str:
    """Describe ``exit status 3`` or ``killed by SIGKILL (exit status 137)``.

    Args:
        returncode: Of the process, negative after a signal.
        oom_kills: Processes of this host that the kernel killed during the job; None if it does not say.
    """
    number = signal_of(returncode)
    if not number:
        return f"exit status {returncode}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"  # a real-time signal has no name of its own
    hint = ", perhaps out of memory" if name == "SIGKILL" and oom_kills is None else ""
    return f"killed by {name} (exit status {exit_status(returncode)}{hint})"


def signal_of(returncode: int) -> int:
    """Return the signal that ended a process; 0 for none. A shell tells of a signal by a status above 128."""
    if returncode < 0:
        return -returncode
    number = returncode - 128
    return number if number in _SIGNALS else 0


_SIGNALS = frozenset(signal.Signals)


LACK_OF_MEMORY = "out of memory: "
"""How the sentence about the kernel's counter begins."""


def lack_of_memory(oom_kills: int, host: str) -> str:
    """Return the sentence about the processes that the kernel killed."""
    return f"{LACK_OF_MEMORY}the kernel killed {oom_kills} process(es) of host {host}"


class Suspect(NamedTuple):
    """A rank that ended before the job did.

    Attributes:
        at: When the trouble began, in seconds of the leader's monotonic clock.
        outcome: What its host knows: rank, status (0: not known) and the failure text from its own output.
        certain: It failed on its own account, by its traceback or its status.
    """

    at: float
    outcome: Outcome
    certain: bool


def first_suspect(suspects: Sequence[Suspect], rank: int = -1) -> Suspect | None:
    """Return what is known of ``rank``, the process that had it last.

    Without a rank, it is the first one that surely failed.
    """
    if rank >= 0:
        return next((suspect for suspect in reversed(suspects) if suspect.outcome.rank == rank), None)
    return min((suspect for suspect in suspects if suspect.certain), key=lambda suspect: suspect.at, default=None)


def earlier_failure(failure: Outcome, suspects: Sequence[Suspect]) -> Outcome:
    """Return the failure of another host's rank, if it came before the one that was reported; else the reported one.

    Each torchrun knows the ranks of its own host only, and the one that reports first may have been the second to fail.
    """
    own = first_suspect([suspect for suspect in suspects if suspect.outcome.host == failure.host], failure.rank)
    first = first_suspect(suspects)
    if first is None or first.outcome.host == failure.host or (own is not None and own.at <= first.at):
        return failure
    return first.outcome._replace(kind=failure.kind, status=first.outcome.status or failure.status)


EARLY_END = "ended with exit status 0 while other ranks went on"
"""The end of the sentence about a rank that ended too early for the others."""


def early_end(what: str, host: str, mode: str, rank: int) -> str:
    """Return the sentence about a rank that ended too early for the others."""
    return f"{what} on host {host}, rank {rank} (mode {mode}): {EARLY_END}"


UNKNOWN_END = "it failed"
"""Where the status of a program is not known; ``with_status`` puts it there later."""

EARLIER = "earlier it had printed: "
"""What stands before the cause of a traceback that the process did not die of."""


def with_status(outcome: Outcome, returncode: int) -> Outcome:
    """Return the outcome of a rank whose host did not know its status, with the status that another host knows.

    A process that a signal ended did not die of the exception that its host took for the cause.
    """
    lines = outcome.text.replace(f"): {UNKNOWN_END}", f"): {describe_status(returncode, 0)}", 1).splitlines()
    place = next((at for at, line in enumerate(lines[:2]) if "): killed by " in line), 0)
    if place and signal_of(returncode) != signal.SIGABRT and not lines[0].startswith(LACK_OF_MEMORY):
        lines[:2] = [lines[1], f"{EARLIER}{lines[0]}"]
    text = shorten("\n".join(lines))
    return outcome._replace(status=exit_status(returncode), text=text, cause=text.partition("\n")[0])


def shorten(text: str, limit: int = names.FAILURE_TEXT_LIMIT) -> str:
    """At most ``limit`` characters: the beginning (the cause) and the end (the innermost frames) are kept."""
    if len(text) <= limit:
        return text
    mark = "\n[...]\n"
    head = limit * 2 // 5
    return text[:head] + mark + text[len(text) - (limit - head - len(mark)) :]
