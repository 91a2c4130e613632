"""The end of a job: one record for every host, and the failure text that people read. Pure."""

from __future__ import annotations

import re
import signal
from typing import NamedTuple, Sequence

from trainworks_launcher.contract import names

SUCCEEDED, FAILED, STOPPED = "succeeded", "failed", "stopped"
"""The three kinds of ends.

Stopped: a stop signal came, and the program ended within its grace period or was killed after it.
"""


_FRAME_LINE = re.compile(r'(?m)^\s*File "([^"]+)", line (\d+)')
_PATHS_OF_PYTHON = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")
"""Parts of paths of files that are not the user's."""


class Outcome(NamedTuple):
    """The end of a job.

    Facts that are learned later are put into their fields. The text is made when it is written.

    Attributes:
        kind: SUCCEEDED, FAILED or STOPPED.
        status: Exit status of every host.
        host: Host of the failure.
        cause: The cause, for example ``ValueError: label 17``; ``""`` if only the end is known.
        rank: Rank that failed first; -1 if that is not known.
        memory: Text about the kernel's counter of killed processes, before any cause; ``""``
            for none.
        place: The program that ended, its host, rank and mode, for example ``train.py on host
            algo-1, rank 3 (mode mpi)``; ``""`` if the end is not that of a program.
        end: End of that program, for example ``exit status 1``; UNKNOWN_END until its status is
            known.
        notes: Lines about the cause and the end.
        frames: Frames of the exception.
        message: Message of the exception, or the last lines that were printed.
        own: The failure text that the user's program wrote, in place of all of the above.
        stopped: Reason of a stop; ``""`` without a stop, or if a failure explains it.
        unsaved: Work that a stopped job did not save; ends the first line.
        is_decided: Whether the launcher has ended the job for this failure of a program, for
            example after restarts without progress: what other ranks did then is an effect.
        again: Whether all hosts begin another attempt of the job.
        restarts: Number of restarts on all hosts.
        earlier: First lines of the failures before those restarts, in order.
        lost_steps: Steps that had to be repeated after those restarts; None if not known.
    """

    kind: str
    status: int = 0
    host: str = ""
    cause: str = ""
    rank: int = -1
    memory: str = ""
    place: str = ""
    end: str = ""
    notes: Sequence[str] = ()
    frames: str = ""
    message: str = ""
    own: str = ""
    stopped: str = ""
    unsaved: str = ""
    is_decided: bool = False
    again: bool = False
    restarts: int = 0
    earlier: Sequence[str] = ()
    lost_steps: int | None = None

    @property
    def account(self) -> str:
        """The launcher's text about the end.

        Of a text above the limit the frames are cut first, then the message.
        """
        end = f"{self.place}: {self.end}" if self.place else ""
        head = "\n".join(filter(None, (self.memory, self.cause, end, *self.notes)))
        frames, message = self.frames, self.message
        # Characters for both, without the two newlines between the three parts.
        room = names.FAILURE_TEXT_LIMIT - len(head) - 2
        if frames and len(frames) + len(message) > room:
            room_for_message = room - min(len(frames), _FRAMES_LEAST)
            message = shorten(message, max(room_for_message, _FRAMES_LEAST))
            frames = shorten(frames, max(room - len(message), _FRAMES_LEAST // 2))
        text = "\n".join(filter(None, (head, frames, message)))
        if not self.place:
            return text
        return shorten(text)

    @property
    def may_be_an_effect(self) -> bool:
        """Whether another failure may be the cause of this one.

        Not so for a failure without a place, which is not the end of a program but one that the
        launcher has found, and for one that is decided.
        """
        return self.kind == FAILED and bool(self.place) and not self.is_decided

    @property
    def retry(self) -> bool:
        """Whether another attempt makes sense: after a stop, or if the script is not to blame.

        The script is not to blame for a refusal of the launcher about the hosts, nor for a signal
        that was not sent for lack of memory.
        """
        if self.kind == STOPPED:
            return True
        if not self.place:
            return self.status in (
                names.EXIT_PREPARATION,
                names.EXIT_HOSTS,
                names.EXIT_CHECK,
                names.EXIT_HANG,
            )
        return not self.memory and signal_of(self.status) in (signal.SIGKILL, signal.SIGTERM)

    @property
    def kind_of_failure(self) -> str:
        """A text that two failures share if they are the same failure.

        The exception's type and the place in the user's code, for example ``KeyError at
        train.py:17``. The message is left out: it may have addresses, times and sizes. Without an
        exception the cause, or the end.
        """
        places = _FRAME_LINE.findall(self.frames)
        if not places:
            return self.cause or self.end
        # The innermost frame of the user, else of any file.
        users_places = [(file, line) for file, line in places if _is_of_user(file)]
        file, line = (users_places or places)[-1]
        return f"{self.cause.partition(':')[0]} at {file}:{line}"

    @property
    def text(self) -> str:
        """The failure text, cause first; ``""`` for a success."""
        lines = (self.own or self.account).split("\n")
        if self.stopped:
            lines.insert(0, self.stopped)
        if self.unsaved:
            lines[0] += f"; {self.unsaved}"
        if self.earlier:
            lost = "" if self.lost_steps is None else f", {self.lost_steps} step(s) lost"
            lines += [f"started again {self.restarts} time(s){lost}; before that:", *self.earlier]
        return "\n".join(lines)


def _is_of_user(file: str) -> bool:
    """Return whether a file is the user's: neither of Python nor of an installed package."""
    return not any(part in file for part in _PATHS_OF_PYTHON)


_FRAMES_LEAST = 200
"""Characters for the innermost frames, even where the exception's message is long."""


def exit_status(wait_status: int) -> int:
    """Convert a return code to an exit status: 128 + signal for a negative one, as a shell does.

    wait_status: a return code as of ``subprocess``, not the status of wait(2).

    >>> exit_status(3), exit_status(-9)
    (3, 137)
    """
    if wait_status >= 0:
        return wait_status
    return 128 - wait_status


def returncode_of(wait_status: int) -> int:
    """Convert a wait status to a return code, negative after a signal. Source: wait(2).

    A wait status has the signal in its lowest seven bits, and the exit status eight bits higher.

    >>> returncode_of(3 << 8), returncode_of(9)
    (3, -9)
    """
    number = wait_status & _SIGNAL_BITS
    if number:
        return -number
    return wait_status >> _EXIT_STATUS_SHIFT & _EXIT_STATUS_BITS


_SIGNAL_BITS, _EXIT_STATUS_SHIFT, _EXIT_STATUS_BITS = 0x7F, 8, 0xFF


LAST_SIGNAL = 64
"""Number of the last signal. Source: signal(7), SIGRTMAX."""


def describe_status(returncode: int, oom_kills: int | None = None) -> str:
    """Describe a return code: ``exit status 3`` or ``killed by SIGKILL (exit status 137)``.

    Args:
        returncode: Of a process, negative after a signal.
        oom_kills: Processes of this host that the kernel killed during the job; None without a
            counter.
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
    """Return the signal that ended a process; 0 for none.

    A shell reports a signal by a status above 128.

    >>> signal_of(-9), signal_of(137), signal_of(1)
    (9, 9, 0)
    """
    if returncode < 0:
        return -returncode
    number = returncode - 128
    if number not in _SIGNAL_NUMBERS:
        return 0
    return number


_SIGNAL_NUMBERS = frozenset(signal.Signals)


def lack_of_memory(oom_kills: int, host: str) -> str:
    """Return the sentence about the processes of a host that the kernel killed."""
    return f"out of memory: the kernel killed {oom_kills} process(es) of host {host}"


EARLY_END = "ended with exit status 0 while other ranks went on"
"""The end of a rank that ended too early for the others."""

EARLY_LEAVE = "had left its program, and other ranks went on"
"""The end of such a rank, if its exit handlers still ran when the others failed."""

UNKNOWN_END = "it failed"
"""The end of a program with an unknown status; ``with_status`` replaces it later."""

EARLIER = "before that, another of its processes had died of "
"""Prefix of the cause of an earlier end: that of another process than the one that counts."""


class ProgramPlace(NamedTuple):
    """Where a program ran, or one rank of it.

    Attributes:
        program: The program's name for people, for example ``train.py``.
        host: Its host.
        mode: The job's mode.
        rank: The rank; -1 for the whole program, or if the rank is not known.
    """

    program: str
    host: str
    mode: str
    rank: int = -1

    @property
    def text(self) -> str:
        """The place for people: ``train.py on host algo-1, rank 3 (mode mpi)``."""
        where = f"{self.program} on host {self.host}"
        if self.rank >= 0:
            where = f"{where}, rank {self.rank}"
        return f"{where} (mode {self.mode})"


def with_status(outcome: Outcome, returncode: int) -> Outcome:
    """Return the outcome of a rank with its status, which another host or the starter knows.

    The end of the process is described by that status, unless the outcome has an end already.

    Args:
        outcome: The outcome.
        returncode: Negative after a signal.
    """
    outcome = outcome._replace(status=exit_status(returncode))
    if outcome.end != UNKNOWN_END:
        return outcome
    return outcome._replace(end=describe_status(returncode, 0))


def shorten(text: str, limit: int = names.FAILURE_TEXT_LIMIT) -> str:
    """Cut a text to a limit of characters, in its middle.

    The beginning (the cause) and the end (the innermost frames) are kept.
    """
    if len(text) <= limit:
        return text
    mark = "\n[...]\n"
    # Two fifths of the limit: the end has the innermost frames, and needs more.
    head = limit * 2 // 5
    return text[:head] + mark + text[len(text) - (limit - head - len(mark)) :]
