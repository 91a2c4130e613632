"""Locks of other tools, ``pylock.toml`` (PEP 751) and ``uv.lock``. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

from packaging.pylock import Pylock, PylockUnsupportedVersionError, PylockValidationError

from trainworks.extend.reading.pylock import select_pylock
from trainworks.extend.reading.selection import Chosen, Kept, Lock, Selection, Table
from trainworks.extend.reading.uv_lock import select_uv
from trainworks.extend.requirements import ExtendedBase

UV_VERSION = 1
"""The version of the format of ``uv.lock`` that is read; revisions of it only add."""


def read_lock(text: str, where: str, *, uv: bool, extras: Sequence[str] = (), groups: Sequence[str] = ()) -> Lock:
    """Read a lock.

    Args:
        text: Its content.
        where: Its name, for messages.
        uv: Whether it is a ``uv.lock``.
        extras: Extras of the project that are wanted.
        groups: Groups of the project that are wanted.

    Raises:
        ValueError: It is not one, or of a version that is not known.
    """
    try:
        table: Table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"this is not TOML: {error}") from None
    content: Table | Pylock = table
    if uv:
        if table.get("version") != UV_VERSION:
            raise ValueError(
                f"its format has version {table.get('version')}, and {UV_VERSION} is read: write a pylock.toml with "
                "`uv export --format pylock.toml -o pylock.toml`"
            )
    else:
        try:
            content = Pylock.from_dict(table)
        except PylockUnsupportedVersionError as error:
            raise ValueError(f"its format is not read: {error}") from None
        except PylockValidationError as error:
            raise ValueError(f"this is not a lock as PEP 751 has it: {error}") from None
    return Lock(where=where, content=content, extras=tuple(extras), groups=tuple(groups))


def select(lock: Lock, base: ExtendedBase, kept: Kept) -> Selection:
    """Return what of a lock a base image gets: what its markers and files allow there, without what is kept."""
    chosen = Chosen(lock, base, kept)
    try:
        if isinstance(lock.content, Pylock):
            select_pylock(lock.content, chosen)
        else:
            select_uv(lock.content, chosen)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        chosen.problems.append(f"{lock.where}: it cannot be read: {type(error).__name__}: {error}")
    return chosen.selection()
