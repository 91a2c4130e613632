"""The lock of an extension's requirements: uv's lines with hashes, below comments with the other
inputs of the image.
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
from trainworks.extend.requirement_inputs import RequestedRequirements
from trainworks.extend.requirements import NO_LOCK, ExtendedBase, ExtensionLock

HEADER = "# Written by `python build.py extend`: every file by its hash,"
_DATA = re.compile(r"^# data: (\{.*\})$", re.MULTILINE)


def lock_path_of(requirements: Path, base: str) -> Path:
    """Return the path of a requirements file's lock: beside it, one for each base."""
    name = re.sub(r"[/:@]", "+", base)
    return requirements.with_name(f"{requirements.stem}.{name}.locked.txt")


def locks_of(requirements: Path) -> list[str]:
    """Return the names of all locks beside a requirements file, for any base."""
    pattern = f"{glob.escape(requirements.stem)}.*.locked.txt"
    return [path.name for path in requirements.parent.glob(pattern)]


def locked_commits(path: Path | None) -> dict[str, str]:
    """Return the commits in a lock, also if it is of other requirements.

    Raises ``ExtendError`` if it cannot be read.
    """
    data = _DATA.search(_text(path))
    if data is None:
        return {}
    try:
        return dict(json.loads(data[1]).get("commits", {}))
    except (TypeError, ValueError) as error:
        raise _spoiled(path) from error


def read_lock(path: Path | None, digest: str) -> ExtensionLock | None:
    """Return a lock; ``None`` if there is none, or if it is of other requirements or another base.

    Raises:
        ExtendError: Another file is in its place, or it cannot be read.
    """
    text = _text(path)
    if text and not text.startswith(HEADER):
        raise ExtendError(
            [f"{path} exists and was not written by extend: the lock would replace it"]
        )
    if f"# inputs: {digest}\n" not in text:
        return None
    try:
        return _parsed(text)
    except (TypeError, ValueError) as error:
        raise _spoiled(path) from error


def lock_before(path: Path | None) -> ExtensionLock:
    """Return a lock of any requirements; an empty one if there is none that can be read."""
    text = _text(path)
    if not text.startswith(HEADER):
        return NO_LOCK
    try:
        return _parsed(text) or NO_LOCK
    except (TypeError, ValueError):
        return NO_LOCK


def _parsed(text: str) -> ExtensionLock | None:
    """Return a lock; ``None`` for a text without its line of data.

    Raises TypeError and ValueError.
    """
    data = _DATA.search(text)
    if data is None:
        return None
    pins = text[data.end() :].lstrip("\n")
    return ExtensionLock(**json.loads(data[1]), pins=pins)


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
    requested: RequestedRequirements,
    sources: Sequence[WheelSource],
    chosen: Mapping[str, object],
    base: ExtendedBase,
) -> str:
    """Return the hash of everything that a lock depends on, except the releases of indexes.

    Args:
        requested: The requirements.
        sources: The sources of wheels.
        chosen: Options of the command.
        base: The base image.
    """
    files = []
    for name, file in sorted(requested.files.items()):
        files.append((name, hashlib.sha256(file.content).hexdigest()))
    source_parts = [
        (source.origin, source.subdirectory, source.extras, source.identity) for source in sources
    ]
    # Without the folder of a project's group: the lock does not depend on its place.
    words = [word.rpartition(":")[2] for word in requested.chosen]
    # A lock with other fields, of another version of ours, is resolved anew.
    lock_fields = [field.name for field in fields(ExtensionLock)]
    base_parts = (
        base.full_version,
        base.glibc,
        base.machine,
        [asdict(row) for row in base.distributions],
        dict(base.kept),
    )
    parts = (
        requested.lines,
        requested.constraints,
        (sorted(requested.read.items()), words),
        files,
        source_parts,
        chosen,
        lock_fields,
        base_parts,
    )
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


def _spoiled(path: Path | None) -> ExtendError:
    """Return the error for a lock that was changed by hand."""
    problem = (
        f"the data of {path} cannot be read:"
        " take back what changed it, or delete it to resolve again"
    )
    return ExtendError([problem])


def _text(path: Path | None) -> str:
    """Return the text of a file, or ``""`` if it cannot be read."""
    try:
        if path is not None and path.is_file():
            return path.read_text(encoding="utf-8")
        return ""
    except (OSError, UnicodeDecodeError):
        return ""
