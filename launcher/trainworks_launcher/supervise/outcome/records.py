"""Records of the ends of a job's Python processes, written by each process itself
(``programs/python/sitecustomize.py``). Pure.

The file has one line of JSON for each end, in order, with the exception that ended the process, if
one did. A thread that an exception ended has a line, too. A process with peers also notes that it
has left its program, before its exit handlers run. There is no line for a process that a signal or
``os._exit`` ended in its program, nor for a program other than Python.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, decode, mapping, number, printable, text
from trainworks_launcher.supervise.outcome.evidence import blames_a_peer

FILE = "ends"
"""Name of the file in the runtime directory."""

CAUSED_BY = "caused by "
"""Prefix of the origin of an exception that was raised from another one."""

WHILE_HANDLING = "while handling "
"""Prefix of the origin where the other exception was being handled, or left a ``finally`` clause.
"""

_CHILD_FAILED = (
    "subprocess.CalledProcessError",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
)
"""Exceptions that only report the failure of a child process."""


class Record(NamedTuple):
    """One end. Times are of the monotonic clock, which all processes of a host share.

    Attributes:
        pid: The process.
        began: Start of its Python.
        at: Time of its end, or of the exception.
        message: The exception with its type, as Python prints it; ``""`` for none.
        frames: The exception's frames, innermost last.
        origin: For example ``caused by KeyError: 'x'``, or ``while handling ...``; ``""`` for
            neither.
        thread: Name of the thread that the exception ended; ``""`` for the whole program.
        rank: The rank in the process's variables; -1 for none.
        inner: In a group of exceptions, the first one that is not itself a group; else ``""``.
        guessed: The program had replaced our hook; the exception is the value of
            ``sys.last_value`` at the end.
        left: The process had left its program, and its exit handlers followed.
        exit_status: Status given to ``sys.exit``; -1 if that is not known.
        exit_message: Text given to ``sys.exit``; ``""`` for none.
        of_sigterm: The program's own handler of SIGTERM ended the process.
        brief: A longer record of the same end follows, unless the process is killed before.
        uses_smp: The program had imported smp.
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
    exit_message: str = ""
    of_sigterm: bool = False
    brief: bool = False
    uses_smp: bool = False

    @property
    def cause(self) -> str:
        """The first line of the message, with the direct cause if the exception has one.

        Of a group the first exception. A line that ends with a colon, for example ``Error(s) in
        loading state_dict for Net:``, is joined with the next line. A message that quotes an
        exception of another process gets the last line of that exception.
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
        """The process's own exception, during the handling of which a peer was lost.

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
        """Whether the exception began with the failure of another process."""
        return not self.handled and (blames_a_peer(self.message) or blames_a_peer(self.origin))

    @property
    def _first_line(self) -> str:
        """The first line of the message that tells something; ``""`` without a message."""
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        if not lines:
            return ""
        if self.message.startswith("  File "):
            # A SyntaxError: the file and the line come first.
            return lines[-1]
        first = lines[0]
        # A line that ends with a colon says nothing yet: at most three more lines are joined.
        for line in lines[1:4]:
            if not first.endswith(":") or line.startswith(("Traceback", 'File "')):
                break
            first = f"{first} {line}"
        quotes_traceback = any(line.startswith('File "') for line in lines)
        exception = lines[-1]
        if not quotes_traceback or exception in first:
            return first
        return f"{first.rstrip('.:')}: {exception}"

    @property
    def tells_an_end(self) -> bool:
        """Whether the record's time is the time of a failure: an exception, the leaving of the
        program, or a call of ``sys.exit``.
        """
        return bool(self.message) or self.left or self.exit_status >= 0

    @property
    def is_of_a_child(self) -> bool:
        """Whether the exception only reports the failure of a child process."""
        return self.message.startswith(_CHILD_FAILED)


def read(data: bytes) -> list[Record]:
    """Parse the records of a file, in order.

    Lines that are not a record are skipped, and so is a brief record if the longer one of the same
    end follows.

    Args:
        data: Content of the file: a JSON object in each line.
    """
    records: list[Record] = []
    for line in data.splitlines():
        try:
            row = mapping(decode(line.decode("utf-8")))
        except (ValueError, RecursionError):
            continue
        records.append(_parse(row))

    # A program is (process id, start): a number may be given to a new process later.
    brief_at: dict[tuple[int, float], float] = {}  # program -> time of its brief record
    complete = set()  # programs with a longer record of their end
    for record in records:
        program = (record.pid, record.began)
        if record.brief:
            brief_at[program] = record.at
        elif record.message and not record.thread:
            complete.add(program)

    merged = []
    for record in records:
        program = (record.pid, record.began)
        if record.brief and program in complete:
            continue
        if record.message and not record.thread:
            # The brief record was written first: its time is that of the failure.
            merged.append(record._replace(at=brief_at.get(program, record.at)))
        else:
            merged.append(record)
    return merged


def _parse(row: Mapping[str, Json]) -> Record:
    """Return a line's object as a record; a field in another form has its default."""
    rank, status = row.get("rank"), row.get("exit")
    return Record(
        pid=number(row.get("pid")),
        began=_seconds(row.get("began")),
        at=_seconds(row.get("at")),
        message=printable(text(row.get("message"))),
        frames=printable(text(row.get("frames"))),
        origin=printable(text(row.get("origin"))),
        thread=printable(text(row.get("thread"))),
        rank=rank if isinstance(rank, int) else -1,
        inner=printable(text(row.get("inner"))),
        guessed=row.get("guessed") is True,
        left=row.get("left") is True,
        # The kernel keeps eight bits of what sys.exit was given.
        exit_status=status & 0xFF if isinstance(status, int) else -1,
        exit_message=printable(text(row.get("said"))),
        of_sigterm=row.get("of_sigterm") is True,
        brief=row.get("brief") is True,
        uses_smp=row.get("smp") is True,
    )


def read_torch_error(data: bytes, pid: int, at: float, rank: int) -> list[Record]:
    """Read torch's error file of a rank.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py, record_exception.

    Args:
        data: Content of the file.
        pid: The rank's process.
        at: Time of its end.
        rank: Its global rank.

    Returns:
        One record; an empty list if the file has no exception.
    """
    try:
        document = mapping(decode(data.decode("utf-8")))
    except (ValueError, RecursionError):
        return []
    error = mapping(document.get("message"))
    message = text(error.get("message"))
    if not message:
        return []
    stack = text(mapping(error.get("extraInfo")).get("py_callstack"))
    # The first line is "Traceback ...", the last ones are the exception.
    frames = "\n".join(line for line in stack.splitlines()[1:] if line.startswith(" "))
    return [Record(pid, at, at, printable(message), printable(frames), rank=rank)]


def _seconds(value: Json) -> float:
    """Return a number of seconds; 0.0 for another value."""
    return float(value) if isinstance(value, (int, float)) else 0.0


def find_first_exception(records: Sequence[Record]) -> Record | None:
    """Return the earliest exception among the last process that died and the processes beside it.

    A process is beside the last one if it died after the Python of the last one had started: both
    belong to one attempt. None without an exception.
    """
    died = [row for row in records if row.message and not row.thread and not row.is_of_a_child]
    for row in died:
        # An earlier one is of an attempt before: the last process had not started yet.
        if row.at >= died[-1].began:
            return row
    return None
