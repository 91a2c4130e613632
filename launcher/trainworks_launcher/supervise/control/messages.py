"""Messages of the control channel as values: bytes in, checked objects out. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Mapping

from trainworks_launcher import names
from trainworks_launcher.plan import Control
from trainworks_launcher.supervise.outcome import FAILED, STOPPED, SUCCEEDED, Outcome, Suspect
from trainworks_launcher.values import Json, decode, number, text

MESSAGE_LIMIT = 65536
"""Bytes of one message; a longer line ends its connection."""

STRANGERS_MESSAGE_LIMIT = 4096
"""Bytes of one message before the join; an honest one has a few hundred."""

_WORDS_LIMIT = 4096  # characters of a text that is shown to people

Message = Mapping[str, Json]


def digest(control: Control, mode: str) -> str:
    """Return what the hosts of one job have in common, as a short text: two jobs on one network do not mix."""
    words = json.dumps([mode, list(control.hosts), control.leader, control.minimum_hosts])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


class Decoder:
    """Bytes in, messages out; raises ValueError for anything that is not one bounded JSON object per line."""

    def __init__(self, limit: int = MESSAGE_LIMIT) -> None:
        """Start empty. limit: bytes of one message; it may be changed later."""
        self.limit = limit
        self._buffer = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that ``data`` completes, in order."""
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if any(len(line) > self.limit for line in (*lines, self._buffer)):
            raise ValueError("a message is too long")
        messages: list[Message] = []
        for line in lines:
            try:
                value = decode(line.decode("utf-8"))
            except RecursionError as error:
                raise ValueError("a message is nested too deeply") from error
            if not isinstance(value, dict):
                raise ValueError("a message is not an object")  # noqa: TRY004  (bad input, not a bad call)
            messages.append(value)
        return messages


def words(value: Json, limit: int = _WORDS_LIMIT) -> str:
    """Return a text from another host, fit for logs and files: bounded, and nothing in it that cannot be encoded."""
    return text(value)[:limit].encode("utf-8", "replace").decode("utf-8")


def one_line(value: Json, limit: int = 200) -> str:
    """Return a text from another host for one line of the log: printable characters only."""
    return "".join(letter if letter.isprintable() else " " for letter in text(value)[:limit])


def outcome_fields(outcome: Outcome) -> dict[str, Json]:
    """Return an outcome as the fields of a message."""
    return {
        "outcome": outcome.kind,
        "status": outcome.status,
        "host": outcome.host,
        "rank": outcome.rank,
        "cause": outcome.cause,
        "text": outcome.text,
    }


def read_outcome(message: Message) -> Outcome:
    """Return the outcome in a message; an unreadable one is a failure."""
    kind = text(message.get("outcome"), FAILED)
    status = number(message.get("status")) & 0xFF
    if kind not in (SUCCEEDED, FAILED, STOPPED) or (kind == FAILED and not status):
        kind, status = FAILED, status or names.EXIT_LAUNCHER
    rank = message.get("rank")
    return Outcome(
        kind,
        status,
        one_line(message.get("host")),
        words(message.get("text")),
        words(message.get("cause")),
        rank if isinstance(rank, int) and not isinstance(rank, bool) else -1,
    )


def suspect_fields(suspect: Suspect, now: float) -> dict[str, Json]:
    """Return a suspect as the fields of a message at a time.

    The clocks of two hosts differ, so its age is sent, not its time.
    """
    return {**outcome_fields(suspect.outcome), "age": max(0.0, now - suspect.at), "certain": suspect.certain}


def read_suspect(message: Message, now: float) -> Suspect:
    """Return the suspect in a message that came at a time."""
    age = message.get("age")
    age = float(age) if isinstance(age, (int, float)) else 0.0
    # A status of 0 says that it is not known there, and that is not an error.
    outcome = replace(read_outcome(message), status=number(message.get("status")) & 0xFF)
    return Suspect(now - age, outcome, message.get("certain") is True)
