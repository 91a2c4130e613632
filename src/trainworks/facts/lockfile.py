"""The files of ``images/lock``: the only place that knows their format, for
reading and for writing.

``TARGET.toml`` has every Python file of a target; all targets share ``artifacts.toml``,
``base-images.toml`` and ``archives.toml``. ``build.py lock`` writes them, and ``facts.load`` reads
them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainworks.errors import OutputError
from trainworks.facts.reader import Reader
from trainworks.facts.rows import (
    Lock,
    LockedArchive,
    LockedArtifact,
    LockedBaseImage,
    LockedPackage,
)

Row = TypeVar("Row")

LOCK = "lock"
"""Their folder, in ``images``."""

ARTIFACTS = "artifacts.toml"
BASE_IMAGES = "base-images.toml"
ARCHIVES = "archives.toml"
"""The files that all targets share; every other one is a target's."""

KEYS: Mapping[type[Any], str] = {
    LockedPackage: "package",
    LockedArtifact: "artifact",
    LockedBaseImage: "base_image",
    LockedArchive: "archive",
}
"""The key of each row's table, by its type: ``[[KEY]]``."""

HEADER = "# Written by `python build.py lock`; do not edit. {what}\n"
WHAT: Mapping[type[Any], str] = {
    LockedPackage: "Every file that the target's Python layers are made of.",
    LockedArtifact: "What the files of images/artifacts.toml are, as first seen or as published.",
    LockedBaseImage: "Which images the tags of images/base-images.toml and images/bases.toml mean.",
    LockedArchive: (
        "The state of each suite of the package archives;"
        " an image's system packages are of this day."
    ),
}


def lock_path(root: Path, target: str) -> Path:
    """Return the file of a target's lock below a checkout."""
    return root / "images" / LOCK / f"{target}.toml"


def read_locks(reader: Reader, images: Path) -> dict[str, Lock]:
    """Return the locks of all targets, by the target's name; the reader has their problems."""
    locks: dict[str, Lock] = {}
    for path in sorted((images / LOCK).glob("*.toml")):
        if path.name not in {ARTIFACTS, BASE_IMAGES, ARCHIVES}:
            packages = tuple(_read(reader, path, LockedPackage))
            reader.problems += [
                f"{reader.name(path)}: {name} is in two rows" for name in _repeated(packages)
            ]
            reader.problems += [
                f"{reader.name(path)}: {problem}" for problem in _of_files(packages)
            ]
            locks[path.stem] = Lock(target=path.stem, packages=packages)
    return locks


def read_shared(reader: Reader, images: Path, name: str, row_type: type[Row]) -> tuple[Row, ...]:
    """Return the rows of a lock that all targets share; it may not be there yet."""
    path = images / LOCK / name
    return tuple(_read(reader, path, row_type)) if os.path.lexists(path) else ()


def _read(reader: Reader, path: Path, row_type: type[Row]) -> list[Row]:
    return reader.rows(row_type, KEYS[row_type], reader.toml(path), reader.name(path))


def _repeated(packages: Iterable[LockedPackage]) -> list[str]:
    """Return the names of packages that are there twice.

    What is needed to build and what is installed are two sets: `setuptools` may well be in both.
    """
    seen: set[tuple[str, bool]] = set()
    twice: dict[str, None] = {}
    for package in packages:
        if (key := (package.name, package.build)) in seen:
            twice[f"package {package.name + ' (build)' * package.build!r}"] = None
        seen.add(key)
    return sorted(twice)


def _of_files(packages: Iterable[LockedPackage]) -> Iterator[str]:
    """Yield the rows with the sum of another file.

    Files of other packages are found where a lock meets its target.
    """
    files: dict[str, str] = {}
    for package in packages:
        if files.setdefault(package.sha256, package.file) != package.file:
            yield (
                f"package {package.name!r}: key 'sha256': that is the sum of"
                f" {files[package.sha256]}, too"
            )


def as_toml(row_type: type[Row], rows: Iterable[Row]) -> str:
    """Return the text of a lock: its rows in this order, without the keys that
    have their default.
    """
    return HEADER.format(what=WHAT[row_type]) + rows_as_toml(KEYS[row_type], rows)


def rows_as_toml(key: str, rows: Iterable[object]) -> str:
    """Return rows as tables ``[[KEY]]``, without the keys that have their default."""
    return "".join(f"\n[[{key}]]\n{_lines(row)}" for row in rows)


def _lines(row: object) -> str:
    values = {each.name: (getattr(row, each.name), each) for each in dataclasses.fields(row)}  # type: ignore[arg-type]
    # Strings, numbers, truth values and lists of them are written alike in JSON and TOML.
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        for name, (value, field) in values.items()
        if value != field.default
    )


def write(path: Path, text: str) -> None:
    """Write a file of facts: all of it, or nothing. Raises ``OutputError``."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error
