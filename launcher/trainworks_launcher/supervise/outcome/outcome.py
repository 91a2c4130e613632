"""How a job ended: one record for every host, of which the text that a person
reads is made at the end. Pure.
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple, Sequence

from trainworks_launcher.contract import names

SUCCEEDED, FAILED, STOPPED = "succeeded", "failed", "stopped"
"""The three ends.

Stopped: a stop signal came, and the program ended within its grace or was killed after it.
"""


_PLACE = re.compile(r'(?m)^\s*File "([^"]+)", line (\d+)')
_NOT_THE_USERS = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")


class Outcome(NamedTuple):
    """How a job ended.

    What is learned later is put into its field; the text is made where it is written.

    Attributes:
        kind: SUCCEEDED, FAILED or STOPPED.
        status: Exit status of every host.
        host: Host where it happened.
        cause: Why; ``""`` if nothing but the end of the program says it.
        rank: Process that failed first; -1 if that is not known.
        memory: What the kernel's counter says, before any cause; ``""`` if it says nothing.
        place: The program that ended, its host, rank and mode; ``""`` if the
            end is not that of a program.
        end: How that program ended; UNKNOWN_END until its status is known.
        notes: Lines about the cause and the end.
        frames: Where an exception was raised.
        message: The whole message of the exception, or the last lines that were printed.
        own: The user's own failure text, which stands for all of the above.
        stopped: By what the job was stopped; ``""`` if a failure says it all.
        unsaved: What a stopped job did not save; it ends the first line.
        again: All hosts begin another try of the job.
        restarts: How often the job was started again on all hosts.
        earlier: The first lines of the failures before that, in order.
        lost_steps: Steps that were done again for that; None if they are not known.
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
    again: bool = False
    restarts: int = 0
    earlier: Sequence[str] = ()
    lost_steps: int | None = None

    @property
    def account(self) -> str:
        """What the launcher says of it: of what is too long the frames are cut
        first, then the message.
        """
        end = f"{self.place}: {self.end}" if self.place else ""
        head = "\n".join(filter(None, (self.memory, self.cause, end, *self.notes)))
        frames, message = self.frames, self.message
        room = names.FAILURE_TEXT_LIMIT - len(head) - 2
        if frames and len(frames) + len(message) > room:
            message = shorten(message, max(room - min(len(frames), _FRAMES_LEAST), _FRAMES_LEAST))
            frames = shorten(frames, max(room - len(message), _FRAMES_LEAST // 2))
        text = "\n".join(filter(None, (head, frames, message)))
        return shorten(text) if self.place else text

    @property
    def retry(self) -> bool:
        """Whether another try makes sense: the job was stopped, or what ended
        it is not of the script.
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
        """What two failures have in common that are one: the exception's type,
        and where the user's code raised it.

        A message has addresses, times and sizes. Where no exception is known it
        is the cause, or the end.
        """
        places = _PLACE.findall(self.frames)
        own = [place for place in places if not any(part in place[0] for part in _NOT_THE_USERS)]
        if not places:
            return self.cause or self.end
        file, line = (own or places)[-1]
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


_FRAMES_LEAST = 200
"""Characters that the innermost frames get in any case, where the message of
the exception is long.
"""


def exit_status(wait_status: int) -> int:
    """Return the status to exit with, from a wait status: the program's own, or
    128 + signal as a shell has it.
    """
    if wait_status >= 0:
        return wait_status
    return 128 - wait_status


def returncode_of(wait_status: int) -> int:
    """Return the return code in a wait status, negative after a signal. Source: wait(2)."""
    return -(wait_status & 0x7F) if wait_status & 0x7F else wait_status >> 8 & 0xFF


LAST_SIGNAL = 64
"""Number of the last signal. Source: signal(7), SIGRTMAX."""


def describe_status(returncode: int, oom_kills: int | None = None) -> str:
    """Describe ``exit status 3`` or ``killed by SIGKILL (exit status 137)``.

    Args:
        returncode: Of the process, negative after a signal.
        oom_kills: Processes of this host that the kernel killed during the job;
            None if it does not say.
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

    A shell tells of a signal by a status above 128.
    """
    if returncode < 0:
        return -returncode
    number = returncode - 128
    return number if number in _SIGNALS else 0


_SIGNALS = frozenset(signal.Signals)


def lack_of_memory(oom_kills: int, host: str) -> str:
    """Return the sentence about the processes that the kernel killed."""
    return f"out of memory: the kernel killed {oom_kills} process(es) of host {host}"


EARLY_END = "ended with exit status 0 while other ranks went on"
"""The end of a rank that ended too early for the others."""

EARLY_LEAVE = "had left its program, and other ranks went on"
"""The same of a rank whose exit handlers still ran then."""

UNKNOWN_END = "it failed"
"""The end of a program whose status is not known; ``with_status`` puts it there later."""

EARLIER = "before that, another of its processes had died of "
"""What stands before the cause of the end of a process that the one that counts has outlived."""


def place_of(what: str, host: str, mode: str, rank: int = -1) -> str:
    """Return the place of an end."""
    return f"{what} on host {host}{f', rank {rank}' if rank >= 0 else ''} (mode {mode})"


def with_status(outcome: Outcome, returncode: int) -> Outcome:
    """Return the outcome of a rank whose host did not know its status, with the
    status that another host knows.
    """
    outcome = outcome._replace(status=exit_status(returncode))
    return (
        outcome._replace(end=describe_status(returncode, 0))
        if outcome.end == UNKNOWN_END
        else outcome
    )


def shorten(text: str, limit: int = names.FAILURE_TEXT_LIMIT) -> str:
    """At most ``limit`` characters: the beginning (the cause) and the end (the
    innermost frames) are kept.
    """
    if len(text) <= limit:
        return text
    mark = "\n[...]\n"
    head = limit * 2 // 5
    return text[:head] + mark + text[len(text) - (limit - head - len(mark)) :]
