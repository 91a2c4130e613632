"""Commands in containers whose end can be seen: how a command ended stands in what it printed.

On a busy machine engines lose outputs (moby/moby, issue 27289; buildah's processes end before they
have handed on everything), and some end with a status of their own. So a shell in the container
prints a mark with the status to both streams. Without the marks the command was not run, or its
output was lost.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import Final

from trainworks.engine.subprocesses import Finished

_SCRIPT: Final = (
    '"$@"; status=$?;'
    ' printf "%s %d " "$0" $status;'
    ' printf "%s %d " "$0" $status >&2;'
    " {}exit $status"
)

_DRAIN: Final = "sleep 0.2; "
"""A job is run once: it ends a moment after its output."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a marked command left.

    Attributes:
        status: Its exit status; ``None`` where neither stream says it.
        whole: Whether nothing of its output was lost.
        output, errors: What it printed; all in ``output`` where the streams are merged.
    """

    status: int | None
    whole: bool
    output: bytes
    errors: bytes


@dataclass(frozen=True, kw_only=True)
class Marked:
    """A command with its mark."""

    command: tuple[str, ...]
    job: bool = False
    _mark: str = field(default_factory=lambda: f"end-{uuid.uuid4().hex}")

    @property
    def argv(self) -> tuple[str, ...]:
        """The words to run in the container."""
        return (
            "/bin/sh",
            "-c",
            _SCRIPT.format(_DRAIN if self.job else ""),
            self._mark,
            *self.command,
        )

    def read(self, done: Finished, *, split: bool) -> Told:
        """Take the marks out of what an engine handed on, and what the engine
        printed after the last one.
        """
        mark = re.compile(rb"%s (\d+) " % self._mark.encode())
        streams = (done.output, done.errors) if split else (done.output,)
        found = [mark.findall(text) for text in streams]
        ends = [
            list(mark.finditer(text))[-1].start() if each else len(text)
            for text, each in zip(streams, found, strict=True)
        ]
        texts = [mark.sub(b"", text[:end]) for text, end in zip(streams, ends, strict=True)]
        statuses = [int(number) for each in found for number in each]
        return Told(
            status=statuses[0] if statuses else None,
            whole=[len(each) for each in found] == ([1, 1] if split else [2]),
            output=texts[0],
            errors=texts[1] if split else b"",
        )
