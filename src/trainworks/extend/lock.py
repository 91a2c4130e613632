"""The lock of an extension's requirements: uv's lines with hashes, and what
else the image was made of as comments.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from trainworks.errors import ExtendError, OutputError
from trainworks.extend.plan import WheelSource
from trainworks.extend.requirement_inputs import Wanted
from trainworks.extend.requirements import NO_LOCK, ExtendedBase, ExtensionLock

HEADER = "# Written by `python build.py extend`: every file by its hash,"
_DATA = re.compile(r"^# data: (\{.*\})$", re.MULTILINE)


def lock_path_of(requirements: Path, base: str) -> Path:
    """Return where the lock of a requirements file lies: beside it, one for each base."""
    name = re.sub(r"[/:@]", "+", base)
    return requirements.with_name(f"{requirements.stem}.{name}.locked.txt")


def locks_of(requirements: Path) -> list[str]:
    """Return the names of all locks that lie beside a requirements file, whatever their base."""
    return [
        path.name
        for path in requirements.parent.glob(f"{glob.escape(requirements.stem)}.*.locked.txt")
    ]


def locked_commits(path: Path | None) -> dict[str, str]:
    """Return the commits that a lock has, whatever else it fits.

    Raises ``ExtendError`` if it cannot be read.
    """
    found = _DATA.search(_text(path))
    try:
        return dict(json.loads(found[1]).get("commits", {})) if found else {}
    except (TypeError, ValueError) as error:
        raise _spoiled(path) from error


def read_lock(path: Path | None, digest: str) -> ExtensionLock | None:
    """Return a lock; ``None`` where there is none, or one of other requirements or another base.

    Raises:
        ExtendError: Another file is in its place, or it cannot be read.
    """
    text = _text(path)
    if text and not text.startswith(HEADER):
        raise ExtendError(
            [f"{path} exists and was not written by extend: the lock would replace it"]
        )
    try:
        return _parsed(text) if f"# inputs: {digest}\n" in text else None
    except (TypeError, ValueError) as error:
        raise _spoiled(path) from error


def lock_before(path: Path | None) -> ExtensionLock:
    """Return a lock, whatever it is of; an empty one where there is none that can be read."""
    text = _text(path)
    try:
        return (_parsed(text) if text.startswith(HEADER) else None) or NO_LOCK
    except (TypeError, ValueError):
        return NO_LOCK


def _parsed(text: str) -> ExtensionLock | None:
    """Return a lock; ``None`` for a text without its line of data.

    Raises TypeError and ValueError.
    """
    found = _DATA.search(text)
    if found is None:
        return None
    return ExtensionLock(**json.loads(found[1]), pins=text[found.end() :].lstrip("\n"))


def write_lock(path: Path, lock: ExtensionLock, digest: str, base: ExtendedBase) -> None:
    """Write a lock; raises ``OutputError``."""
    head = (
        f"{HEADER} for Python {base.version}\n"
        f"# and what {base.reference} has; delete it to resolve again.\n"
    )
    try:
        path.write_text(f"{head}# inputs: {digest}\n{lock.text}", encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror}", hint="name a folder with --output"
        ) from error


def inputs_digest(
    wanted: Wanted, sources: Sequence[WheelSource], chosen: Mapping[str, object], base: ExtendedBase
) -> str:
    """Return the hash of everything that decides what is installed, but for what indexes have.

    Args:
        wanted: The requirements.
        sources: What wheels are built from.
        chosen: Options of the command.
        base: The base image.
    """
    files = sorted(
        (name, hashlib.sha256(file.content).hexdigest()) for name, file in wanted.files.items()
    )
    parts = (
        wanted.lines,
        wanted.constraints,
        (sorted(wanted.read.items()), [word.rpartition(":")[2] for word in wanted.chosen]),
        files,
        [
            (source.origin, source.subdirectory, source.extras, source.identity)
            for source in sources
        ],
        chosen,
        [each.name for each in fields(ExtensionLock)],  # a lock that has others is resolved anew
        (
            base.full_version,
            base.glibc,
            base.machine,
            [asdict(row) for row in base.distributions],
            dict(base.kept),
        ),
    )
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


def _spoiled(path: Path | None) -> ExtendError:
    problem = (
        f"the data of {path} cannot be read:"
        " take back what changed it, or delete it to resolve again"
    )
    return ExtendError([problem])


def _text(path: Path | None) -> str:
    try:
        return path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""
