"""How the Pythons of a job ended, as each of them has noted it itself
(``programs/python/sitecustomize.py``). Pure.

One line of JSON for each end, in order: which exception ended the process, or that none did; and
one for each exception that ended a thread. A process that has peers notes as well that it has left
its program: its exit handlers follow. A process that a signal or ``os._exit`` ended in its program
has none, nor has what is not Python.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, decode, mapping, number, printable, text
from trainworks_launcher.supervise.outcome.evidence import blames_a_peer

FILE = "ends"
"""Name of the file in the runtime directory."""

CAUSED_BY = "caused by "
"""What the origin of an exception begins with that was raised from another one."""

WHILE_HANDLING = "while handling "
"""What it begins with where the other one was being handled, or left a ``finally`` clause."""

_CHILD_FAILED = (
    "subprocess.CalledProcessError",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
)
"""Exceptions that only say that a process failed which this one had started."""


class Record(NamedTuple):
    """One end. Times are of the monotonic clock, which all processes of a host share.

    Attributes:
        pid: The process.
        began: When its Python started.
        at: When it ended, or when the exception came.
        message: The exception with its type, as Python prints it; ``""`` if none ended it.
        frames: Where it was raised, innermost last.
        origin: ``caused by`` another one, or ``while handling`` it; ``""`` for neither.
        thread: Name of the thread that it ended; ``""``: the whole program.
        rank: What the process's variables say; -1 if nothing.
        inner: Of a group of exceptions the first one that is not a group
            itself; ``""`` for another exception.
        guessed: No hook of ours saw the exception: it is what ``sys.last_value`` had at the end,
            where the program had replaced the hook.
        left: It had left its program, and its exit handlers followed.
        exit_status: What ``sys.exit`` was told, as the status of the process;
            -1: nothing that is known.
        said: The text that ``sys.exit`` was told; ``""`` for none.
        of_sigterm: It is of the program's own handler of SIGTERM: somebody had
            told the process to end.
        brief: The whole record follows, unless its process is ended before.
    """

    pid: int
    began: float = 0.0
    at: float = 0.0
    message: str = ""
    frames: str = ""
    origin: str = ""
    thread: str = ""
    rank: int = -1
    inner: str = ""
    guessed: bool = False
    left: bool = False
    exit_status: int = -1
    said: str = ""
    of_sigterm: bool = False
    brief: bool = False

    @property
    def cause(self) -> str:
        """The first line of the message; of a group its first exception.

        With the direct cause, if it has one.

        A line that only announces another one (``Error(s) in loading state_dict for Net:``) goes on
        with that, and an exception of another process that is told in the message is named by its
        last line.
        """
        first = self._first_line
        if self.inner:
            return f"{self.inner} (in {first})"
        if self.handled:
            return f"{self.handled} (and then {first})"
        if first and self.origin.startswith(CAUSED_BY):
            return f"{first} ({self.origin})"
        return first

    @property
    def handled(self) -> str:
        """The process's own exception, where a peer was missed while that one was handled.

        ``""`` for none.
        """
        if not self.origin.startswith(WHILE_HANDLING):
            return ""
        handled = self.origin[len(WHILE_HANDLING) :]
        if blames_a_peer(self.message) and not blames_a_peer(handled):
            return handled
        return ""

    @property
    def blames(self) -> bool:
        """Whether what it died of began with a connection to another process that broke."""
        return not self.handled and (blames_a_peer(self.message) or blames_a_peer(self.origin))

    @property
    def _first_line(self) -> str:
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        if not lines:
            return ""
        if self.message.startswith("  File "):
            return lines[-1]  # a file that cannot be read as Python
        words = lines[0]
        for line in lines[1:4]:
            if not words.endswith(":") or line.startswith(("Traceback", 'File "')):
                break
            words = f"{words} {line}"
        if not any(line.startswith('File "') for line in lines):
            return words
        exception = lines[-1]
        if not exception or exception in words:
            return words
        return f"{words.rstrip('.:')}: {exception}"

    @property
    def tells_an_end(self) -> bool:
        """Whether its time is that of the failure: an exception, the leaving,
        or what ``sys.exit`` was told.
        """
        return bool(self.message) or self.left or self.exit_status >= 0

    @property
    def is_of_a_child(self) -> bool:
        """Whether it only says that a process failed which this one had started."""
        return self.message.startswith(_CHILD_FAILED)


def read(data: bytes) -> list[Record]:
    """Return the records of a file, without what is no record, and without a
    brief one that a whole one follows.
    """
    found = []
    for line in data.splitlines():
        try:
            row = mapping(decode(line.decode("utf-8")))
        except (ValueError, RecursionError):
            continue
        rank, status = row.get("rank"), row.get("exit")
        found.append(
            Record(
                number(row.get("pid")),
                _seconds(row.get("began")),
                _seconds(row.get("at")),
                rank=rank if isinstance(rank, int) else -1,
                guessed=row.get("guessed") is True,
                left=row.get("left") is True,
                of_sigterm=row.get("of_sigterm") is True,
                brief=row.get("brief") is True,
                exit_status=status & 0xFF if isinstance(status, int) else -1,
                **{name: printable(text(row.get(name))) for name in _TEXTS},
            )
        )
    brief_at: dict[tuple[int, float], float] = {}
    whole = set()
    for record in found:
        program = (record.pid, record.began)
        if record.brief:
            brief_at[program] = record.at
        elif record.message and not record.thread:
            whole.add(program)

    records = []
    for record in found:
        program = (record.pid, record.began)
        if record.brief and program in whole:
            continue
        if record.message and not record.thread:
            # The brief record was written first: its time is that of the failure.
            records.append(record._replace(at=brief_at.get(program, record.at)))
        else:
            records.append(record)
    return records


def of_torch(data: bytes, pid: int, at: float, rank: int) -> list[Record]:
    """Return the record in torch's error file of a rank; [] if there is none.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py, record_exception.
    """
    try:
        told = mapping(mapping(decode(data.decode("utf-8"))).get("message"))
    except (ValueError, RecursionError):
        return []
    message, stack = (
        text(told.get("message")),
        text(mapping(told.get("extraInfo")).get("py_callstack")),
    )
    frames = "\n".join(line for line in stack.splitlines()[1:] if line.startswith(" "))
    return (
        [Record(pid, at, at, printable(message), printable(frames), rank=rank)] if message else []
    )


_TEXTS = ("message", "frames", "origin", "thread", "inner", "said")


def _seconds(value: Json) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def first_of_the_last(records: Sequence[Record]) -> Record | None:
    """Return the exception that came first of those that ended the last process
    and what ran beside it.
    """
    died = [row for row in records if row.message and not row.thread and not row.is_of_a_child]
    return next((row for row in died if row.at >= died[-1].began), None)
