"""Read and write files of other programs and of the kernel, which may be missing or endless."""

from __future__ import annotations

import os
import stat
from pathlib import Path

LIMIT_BYTES = 1 << 26
"""Limit for one file; files for the launcher have kilobytes."""


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text of a regular file, also through a link.

    Never waits for a pipe, and never reads without end. A path below a dead mount may still hang.

    Raises:
        OSError: The file cannot be read, is a pipe or a device, or is too large.
        ValueError: The content is not text in the encoding.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"is not a file: {path}")
        content = opened.read(LIMIT_BYTES + 1)
    if len(content) > LIMIT_BYTES:
        raise OSError(f"has more than {LIMIT_BYTES} bytes: {path}")
    return content.decode(encoding, errors)


def text_of(path: str) -> str:
    """Return the text of a file that may be missing, such as one of the kernel; ``""`` if so."""
    try:
        return read_text(Path(path), errors="replace")
    except OSError:
        return ""


def written_at(path: str) -> int:
    """Return the time of a file's writing, in nanoseconds since 1970; 0 if not known."""
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0


def write_text(path: Path, text: str) -> None:
    """Write a file, in place of an older one.

    A link or a device at the path is removed, never written into. Characters that UTF-8 does not
    have become ``?``.

    Raises OSError, for example if the path is a directory.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.unlink()
    path.write_text(text, encoding="utf-8", errors="replace")
