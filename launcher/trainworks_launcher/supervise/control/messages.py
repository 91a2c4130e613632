"""Messages of the control channel as values: bytes in, checked objects out. Pure."""

from __future__ import annotations

import math
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, decode, number, printable, text, texts
from trainworks_launcher.supervise.control.message_authentication import SEAL_BYTES, Seal
from trainworks_launcher.supervise.outcome.evidence import Kind, Suspect
from trainworks_launcher.supervise.outcome.outcome import FAILED, STOPPED, SUCCEEDED, Outcome

PROTOCOL = 3
"""Version of the form and order of these messages.

Hosts with another version are refused, with the reason.
"""

OTHER_LAUNCHER = "use one image, or one version of trainworks-launcher, on every host"
"""Advice for two hosts with other versions."""

MESSAGE_LIMIT = 65536
"""Bytes of one message; a longer line ends its connection."""

STRANGERS_MESSAGE_LIMIT = 4096
"""Bytes of one message before the join; a message of the launcher has a few hundred."""

_WORDS_LIMIT = 4096  # characters of a text that is shown to people

Message = Mapping[str, Json]


class Decoder:
    """Decodes messages from bytes.

    Attributes:
        limit: Bytes of one message; may change between two calls of ``feed``.
        seal: The seal that every line must have; None while no key is known; may change, too.
    """

    def __init__(self, limit: int = MESSAGE_LIMIT) -> None:
        """Begin without bytes."""
        self.limit = limit
        self.seal: Seal | None = None
        self._buffer = b""

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes, and return the messages that are complete now, in order.

        Args:
            data: The next bytes of the connection; a rest without a newline is kept.

        Raises:
            ValueError: A line is too long, has no seal, or is not a JSON object.
        """
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        limit = self.limit + (SEAL_BYTES if self.seal is not None else 0)
        if any(len(line) > limit for line in (*lines, self._buffer)):
            raise ValueError("a message is too long")
        messages: list[Message] = []
        for line in lines:
            if self.seal is not None:
                line = self.seal.opened(line)
            try:
                value = decode(line.decode("utf-8"))
            except RecursionError as error:
                raise ValueError("a message is nested too deeply") from error
            if not isinstance(value, dict):
                raise ValueError("a message is not an object")  # noqa: TRY004  (bad input, not a bad call)
            messages.append(value)
        return messages


def words(value: Json, limit: int = _WORDS_LIMIT) -> str:
    """Sanitise a text from another host for logs and files.

    The text is cut to the limit of characters, and has no control characters that a terminal
    obeys. ``""`` for a value that is not a text.
    """
    return printable(text(value)[:limit])


def one_line(value: Json, limit: int = 200) -> str:
    """Sanitise a text from another host for one line of the log, within a limit of characters.

    Newlines and tabs become blanks. ``""`` for a value that is not a text.
    """
    return " ".join(printable(text(value)[:limit]).split("\n")).replace("\t", " ")


def seconds(value: Json) -> float:
    """Return seconds from another host: at most a day; 0 if negative or unreadable."""
    # A bool is an int, too.
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return 0.0
    if not 0 < value < math.inf:
        return 0.0
    return float(min(value, _DAY))


_DAY = 86400  # seconds
_STATUS_BITS = 0xFF


def outcome_fields(outcome: Outcome) -> dict[str, Json]:
    """Return an outcome as the fields of a message; ``read_outcome`` is the reverse."""
    return {
        "outcome": outcome.kind,
        "status": outcome.status,
        "host": outcome.host,
        "rank": outcome.rank,
        "notes": list(outcome.notes),
        "again": outcome.again,
        **{name: getattr(outcome, name) for name in _TEXT_FIELDS},
    }


_TEXT_FIELDS = ("cause", "memory", "place", "end", "frames", "message", "own", "stopped", "unsaved")


def read_outcome(message: Message, sender: str) -> Outcome:
    """Read the outcome in a message, with sanitised texts.

    Args:
        message: The message.
        sender: The host that has sent it.

    Returns:
        The outcome. An unreadable one is a failure of the sender, and one without a text gets a
        cause that says so.
    """
    kind = text(message.get("outcome"))
    # An exit status has eight bits.
    status = number(message.get("status")) & _STATUS_BITS
    host = one_line(message.get("host")) or sender
    default_cause = ""
    if kind not in (SUCCEEDED, FAILED, STOPPED):
        kind, status = FAILED, status or names.EXIT_HOSTS
        default_cause = f"host {sender} sent an outcome that cannot be read"
    elif kind == FAILED and not status:
        # A failure must not end the job with success.
        status = names.EXIT_HOSTS
    if kind != SUCCEEDED and status and not default_cause:
        default_cause = f"host {host} says that it {kind} with exit status {status}, and not why"
    outcome = Outcome(
        kind,
        status,
        host,
        rank=_read_rank(message.get("rank")),
        notes=tuple(words(note) for note in texts(message.get("notes"))),
        is_decided=False,
        again=message.get("again") is True,
        restarts=0,
        lost_steps=None,
        **{name: words(message.get(name)) for name in _TEXT_FIELDS},
    )
    if outcome.text.strip():
        return outcome
    return outcome._replace(cause=default_cause)


def _read_rank(value: Json) -> int:
    """Return a rank from another host; -1 if the value is not a rank."""
    if not isinstance(value, int) or isinstance(value, bool):
        return -1
    if not 0 <= value < _MAX_RANKS:
        return -1
    return value


_MAX_RANKS = 1 << 31
"""A rank is below this number: programs keep ranks in 32 bits."""


def suspect_fields(suspect: Suspect, now: float) -> dict[str, Json]:
    """Return evidence as the fields of a message; ``read_suspect`` is the reverse.

    The clocks of two hosts differ, so ages are sent, not times. A process that runs has no age of
    its end.

    Args:
        suspect: The evidence.
        now: Present time of the clock in its fields (monotonic).
    """
    fields = outcome_fields(suspect.outcome)
    fields["evidence"] = suspect.kind.value
    fields["age"] = max(0.0, now - suspect.at)
    fields["restarts"] = suspect.restarts
    if not math.isinf(suspect.ended_at):
        fields["ended"] = max(0.0, now - suspect.ended_at)
    return fields


def read_suspect(message: Message, sender: str, now: float) -> Suspect:
    """Read the evidence in a message.

    Args:
        message: The message.
        sender: The host that has sent it.
        now: When it came (monotonic clock of this host, which the result's times have).
    """
    # A status of 0 means that the sender does not know it: so it is kept.
    status = number(message.get("status")) & _STATUS_BITS
    outcome = read_outcome(message, sender)._replace(status=status)
    try:
        kind = Kind(text(message.get("evidence")))
    except ValueError:
        kind = Kind.UNSEEN
    ended_at = math.inf
    if "ended" in message:
        ended_at = now - seconds(message.get("ended"))
    at = now - seconds(message.get("age"))
    return Suspect(kind, at, ended_at, outcome, number(message.get("restarts")))
