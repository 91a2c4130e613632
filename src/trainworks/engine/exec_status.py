"""Commands in containers with a mark at the end of their output, which has the exit status.

On a busy machine engines lose outputs (moby/moby, issue 27289; buildah's processes end before they
have passed on everything), and some end with a status of their own. So a shell in the container
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
    """The result of a marked command.

    Attributes:
        status: Its exit status; ``None`` if neither stream has a mark.
        whole: Whether nothing of its output was lost.
        output: Its stdout, or both streams if they are merged.
        errors: Its stderr.
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
        """Remove the marks from the output of an engine, and all that it printed after the last."""
        mark = re.compile(rb"%s (\d+) " % self._mark.encode())
        output = _read_stream(mark, done.output)
        if not split:
            # Both marks are in the one stream.
            return Told(
                status=output.statuses[0] if output.statuses else None,
                whole=len(output.statuses) == 2,
                output=output.text,
                errors=b"",
            )
        errors = _read_stream(mark, done.errors)
        statuses = output.statuses + errors.statuses
        return Told(
            status=statuses[0] if statuses else None,
            whole=len(output.statuses) == 1 and len(errors.statuses) == 1,
            output=output.text,
            errors=errors.text,
        )


@dataclass(frozen=True)
class _Stream:
    """A stream without marks, and the exit statuses in its marks."""

    text: bytes
    statuses: list[int]


def _read_stream(mark: re.Pattern[bytes], text: bytes) -> _Stream:
    matches = list(mark.finditer(text))
    if not matches:
        return _Stream(text=text, statuses=[])
    command_output = mark.sub(b"", text[: matches[-1].start()])
    return _Stream(text=command_output, statuses=[int(match[1]) for match in matches])
