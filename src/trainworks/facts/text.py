"""Read files of facts as text.

The error for an unreadable file is one sentence; a pipe is never waited for.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli

_UNSEEN = "\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
"""Controls beyond ASCII, line breaks of Unicode, characters without width, and those that turn
the direction of writing.
"""

CONTROL = re.compile(f"[\x00-\x1f{_UNSEEN}]")
"""Characters that no text of a row may hold: in a Dockerfile a line break begins another
instruction, and a reader of labels sees another text than the one that is there.
"""

MAY_HOLD_CONTROL = re.compile(f"[\\\\\t{_UNSEEN}]|\"\"\"|'''")
"""A TOML file with such a character in a text has one of these: most files need no closer look."""

_MARKS = (
    (b"\xef\xbb\xbf", "a byte order mark (BOM)"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


class UnreadableError(ValueError):
    """A file cannot be read as text; the message says why, without the file's name."""


def read_text(path: Path) -> str:
    """Read a regular file in UTF-8, and return its text.

    Raises:
        UnreadableError: The path is something else than a regular file, the file cannot be read,
            or it is empty.
    """
    if path.is_symlink():
        # A link leads to another file on each machine, and that file is in no commit.
        raise UnreadableError("is a link: put the file itself there")
    try:
        # Opening a pipe without a writer would wait for ever.
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UnreadableError("cannot be read: it is a folder")
        if not stat.S_ISREG(mode):
            raise UnreadableError("cannot be read: it is not a regular file")
        content = path.read_bytes()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise UnreadableError(f"cannot be read: {reason}") from error
    for mark, name in _MARKS:
        if content.startswith(mark):
            raise UnreadableError(f"cannot be read: it begins with {name}; save it as plain UTF-8")
    if not content.strip():
        raise UnreadableError("is empty")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise UnreadableError(
            f"cannot be read: line {line} is not UTF-8 (byte 0x{byte:02x}); save it as UTF-8"
        ) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UnreadableError(
            f"cannot be read: line {line} has a NUL byte: it is not a text file, or it is damaged"
        )
    return text


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text, and return its keys and tables.

    Raises:
        UnreadableError: The text is not TOML, or has a value that Python cannot read.
    """
    try:
        return tomli.loads(text)
    except RecursionError:
        # The parser's own depth is used up: the chain of a thousand frames says nothing.
        raise UnreadableError(
            "not TOML that can be read: its arrays or tables are nested too deeply"
        ) from None
    except ValueError as error:
        # TOMLDecodeError is a ValueError; so is Python's error for an integer of thousands of
        # digits.
        if isinstance(error, tomli.TOMLDecodeError):
            raise UnreadableError(f"not TOML: {error}") from error
        raise UnreadableError("not TOML that can be read: a number has too many digits") from error


def control_characters(value: object, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each string in a value that has a control character.

    Names of keys are strings too. A place is for example ``target.0.python``.
    """
    if isinstance(value, str):
        if CONTROL.search(value):
            yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from control_characters(key, place)
            item_place = f"{place}.{key}" if place else key
            yield from control_characters(item, item_place)
    elif isinstance(value, list):
        for item in value:
            yield from control_characters(item, place)
