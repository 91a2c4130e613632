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
class CommandResult:
    """The result of a marked command.

    Attributes:
        status: The command's exit status; ``None`` if neither stream has a mark.
        is_complete: Whether no output was lost.
        output: The command's stdout, or both streams if they are merged.
        errors: The command's stderr.
    """

    status: int | None
    is_complete: bool
    output: bytes
    errors: bytes


@dataclass(frozen=True, kw_only=True)
class MarkedCommand:
    """A command with its mark.

    Attributes:
        command: The program and its arguments.
        job: Whether it is a job, which ends a moment after its output.
    """

    command: tuple[str, ...]
    job: bool = False
    _mark: str = field(default_factory=lambda: f"end-{uuid.uuid4().hex}")

    @property
    def argv(self) -> tuple[str, ...]:
        """The words to run in the container."""
        script = _SCRIPT.format(_DRAIN if self.job else "")
        return ("/bin/sh", "-c", script, self._mark, *self.command)

    def read(self, execution: Finished, *, split: bool) -> CommandResult:
        """Return a command's output without the marks and the engine's own text after the last.

        Args:
            execution: The end of the engine's program that ran ``argv``.
            split: Whether stdout and stderr are separate; else both are in ``output``.
        """
        mark = re.compile(rb"%s (\d+) " % self._mark.encode())
        output = _read_stream(mark, execution.output)
        if not split:
            # Both marks are in the one stream.
            return CommandResult(
                status=output.first_status,
                is_complete=len(output.statuses) == 2,
                output=output.text,
                errors=b"",
            )
        errors = _read_stream(mark, execution.errors)
        status = output.first_status
        if status is None:
            status = errors.first_status
        return CommandResult(
            status=status,
            is_complete=len(output.statuses) == 1 and len(errors.statuses) == 1,
            output=output.text,
            errors=errors.text,
        )


@dataclass(frozen=True)
class _Stream:
    """A stream without marks, and the exit statuses in its marks."""

    text: bytes
    statuses: list[int]

    @property
    def first_status(self) -> int | None:
        """The status in the first mark; ``None`` without a mark."""
        return self.statuses[0] if self.statuses else None


def _read_stream(mark: re.Pattern[bytes], text: bytes) -> _Stream:
    """Return a stream up to its last mark, without the marks, and the statuses in the marks.

    A stream without a mark is returned as it is.
    """
    matches = list(mark.finditer(text))
    if not matches:
        return _Stream(text=text, statuses=[])
    command_output = mark.sub(b"", text[: matches[-1].start()])
    return _Stream(text=command_output, statuses=[int(match[1]) for match in matches])
