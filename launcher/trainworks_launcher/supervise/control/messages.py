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
"""Number of these messages' form and order.

Hosts with other numbers say so, and do not let each other in.
"""

OTHER_LAUNCHER = "use one image, or one version of trainworks-launcher, on every host"
"""What to do where two hosts have launchers with other numbers."""

MESSAGE_LIMIT = 65536
"""Bytes of one message; a longer line ends its connection."""

STRANGERS_MESSAGE_LIMIT = 4096
"""Bytes of one message before the join; an honest one has a few hundred."""

_WORDS_LIMIT = 4096  # characters of a text that is shown to people

Message = Mapping[str, Json]


class Decoder:
    """Bytes in, messages out.

    Raises ValueError for anything that is not one bounded JSON object per line.

    ``limit``: bytes of one message. ``seal``: what every line must carry; None while no key is
    known. Both may change.
    """

    def __init__(self, limit: int = MESSAGE_LIMIT) -> None:
        """Start empty."""
        self.limit = limit
        self.seal: Seal | None = None
        self._buffer = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that ``data`` completes, in order."""
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
    """Return a text from another host, fit for logs and files: bounded, and
    nothing in it that a terminal obeys.
    """
    return printable(text(value)[:limit])


def one_line(value: Json, limit: int = 200) -> str:
    """Return a text from another host for one line of the log: printable characters only."""
    return " ".join(printable(text(value)[:limit]).split("\n")).replace("\t", " ")


def seconds(value: Json) -> float:
    """Return a number of seconds from another host: not negative, at most a day.

    0 if it is not a number.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        return 0.0
    return float(min(value, _DAY))


_DAY = 86400


def outcome_fields(outcome: Outcome) -> dict[str, Json]:
    """Return an outcome as the fields of a message."""
    return {
        "outcome": outcome.kind,
        "status": outcome.status,
        "host": outcome.host,
        "rank": outcome.rank,
        "notes": list(outcome.notes),
        "again": outcome.again,
        **{name: getattr(outcome, name) for name in _TEXTS},
    }


_TEXTS = ("cause", "memory", "place", "end", "frames", "message", "own", "stopped", "unsaved")


def read_outcome(message: Message, sender: str) -> Outcome:
    """Return the outcome in a message of the host ``sender``.

    An unreadable one is a failure, and names that host.
    """
    kind = text(message.get("outcome"))
    status = number(message.get("status")) & 0xFF
    host, otherwise = one_line(message.get("host")) or sender, ""
    if kind not in (SUCCEEDED, FAILED, STOPPED):
        kind, status = FAILED, status or names.EXIT_HOSTS
        otherwise = f"host {sender} sent an outcome that cannot be read"
    elif kind == FAILED and not status:
        status = names.EXIT_HOSTS
    if kind != SUCCEEDED and status:
        otherwise = (
            otherwise or f"host {host} says that it {kind} with exit status {status}, and not why"
        )
    rank = message.get("rank")
    rank = (
        rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < _RANKS else -1
    )
    notes = tuple(words(note) for note in texts(message.get("notes")))
    said = {name: words(message.get(name)) for name in _TEXTS}
    again = message.get("again") is True
    outcome = Outcome(
        kind, status, host, rank=rank, notes=notes, again=again, restarts=0, lost_steps=None, **said
    )
    return outcome if outcome.text.strip() else outcome._replace(cause=otherwise)


_RANKS = 1 << 31


def suspect_fields(suspect: Suspect, now: float) -> dict[str, Json]:
    """Return a suspect as the fields of a message at a time.

    The clocks of two hosts differ, so ages are sent, not times. A process that
    runs has no age of its end.
    """
    ended = {} if math.isinf(suspect.ended_at) else {"ended": max(0.0, now - suspect.ended_at)}
    age = max(0.0, now - suspect.at)
    return {**outcome_fields(suspect.outcome), "evidence": suspect.kind.value, "age": age, **ended}


def read_suspect(message: Message, sender: str, now: float) -> Suspect:
    """Return the suspect in a message of the host ``sender`` that came at a time."""
    # A status of 0 says that it is not known there, and that is not an error.
    outcome = read_outcome(message, sender)._replace(status=number(message.get("status")) & 0xFF)
    word = text(message.get("evidence"))
    kind = next((kind for kind in Kind if kind.value == word), Kind.UNSEEN)
    ended_at = now - seconds(message.get("ended")) if "ended" in message else math.inf
    return Suspect(kind, now - seconds(message.get("age")), ended_at, outcome)
