"""The files of ``images/lock``: the only place that knows their format, for
reading and for writing.

``TARGET.toml`` has every Python file of a target; all targets share ``artifacts.toml``,
``base-images.toml`` and ``archives.toml``. ``build.py lock`` writes them, and ``facts.load`` reads
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import Counter
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

HEADER = "# Written by `python build.py lock`; do not edit. {summary}\n"
SUMMARIES: Mapping[type[Any], str] = {
    LockedPackage: "Every file that the target's Python layers are made of.",
    LockedArtifact: "What the files of images/artifacts.toml are, as first seen or as published.",
    LockedBaseImage: "Which images the tags of images/base-images.toml and images/bases.toml mean.",
    LockedArchive: (
        "The state of each suite of the package archives;"
        " an image's system packages are of this day."
    ),
}


def lock_path(root: Path, target: str) -> Path:
    """Return the path of a target's lock below a checkout; the file may not exist."""
    return root / "images" / LOCK / f"{target}.toml"


def read_locks(reader: Reader, images: Path) -> dict[str, Lock]:
    """Read the locks of all targets, by the target's name; the reader gets their problems."""
    locks: dict[str, Lock] = {}
    for path in sorted((images / LOCK).glob("*.toml")):
        if path.name in {ARTIFACTS, BASE_IMAGES, ARCHIVES}:
            continue
        packages = tuple(_read(reader, path, LockedPackage))
        problems = [f"{name} is in two rows" for name in _repeated(packages)]
        problems += _file_problems(packages)
        reader.problems += [f"{reader.name(path)}: {problem}" for problem in problems]
        locks[path.stem] = Lock(target=path.stem, packages=packages)
    return locks


def read_shared(reader: Reader, images: Path, name: str, row_type: type[Row]) -> tuple[Row, ...]:
    """Read the rows of a lock that all targets share; none if the lock does not exist yet.

    Args:
        reader: Gets the problems.
        images: The folder ``images``.
        name: The name of the file: ``ARTIFACTS``.
        row_type: The type of its rows.
    """
    path = images / LOCK / name
    # A link that leads nowhere exists: it is a problem, and no missing lock.
    if not os.path.lexists(path):
        return ()
    return tuple(_read(reader, path, row_type))


def _read(reader: Reader, path: Path, row_type: type[Row]) -> list[Row]:
    """Read the rows of one file of locks; the reader gets the problems."""
    return reader.rows(row_type, KEYS[row_type], reader.toml(path), reader.name(path))


def _repeated(packages: Iterable[LockedPackage]) -> list[str]:
    """Return the packages with two rows: ``package 'setuptools (build)'``.

    The packages of the build and the installed ones are two sets: `setuptools` may be in both.
    """
    counts = Counter((package.name, package.build) for package in packages)
    labels = []
    for (name, build), count in counts.items():
        if count > 1:
            label = f"{name} (build)" if build else name
            labels.append(f"package {label!r}")
    return sorted(labels)


def _file_problems(packages: Iterable[LockedPackage]) -> Iterator[str]:
    """Yield a problem for each row with the sum of another file.

    Files of other targets are compared where a lock is used for its target.
    """
    file_by_sum: dict[str, str] = {}
    for package in packages:
        first_file = file_by_sum.setdefault(package.sha256, package.file)
        if first_file != package.file:
            yield f"package {package.name!r}: key 'sha256': that is the sum of {first_file}, too"


def as_toml(row_type: type[Row], rows: Iterable[Row]) -> str:
    """Return the text of a lock's file: a header, and the rows in their order.

    Keys that have their default are left out.
    """
    header = HEADER.format(summary=SUMMARIES[row_type])
    return header + rows_as_toml(KEYS[row_type], rows)


def rows_as_toml(key: str, rows: Iterable[object]) -> str:
    """Return rows as tables ``[[KEY]]`` of TOML, without the keys that have their default."""
    return "".join(f"\n[[{key}]]\n{_row_as_toml(row)}" for row in rows)


def _row_as_toml(row: object) -> str:
    """Return the keys of one row, a dataclass, as lines of TOML."""
    lines = []
    for field in dataclasses.fields(row):  # type: ignore[arg-type]
        value = getattr(row, field.name)
        if value != field.default:
            # Strings, numbers, truth values and lists of them are written alike in JSON and TOML.
            text = json.dumps(value, ensure_ascii=False)
            lines.append(f"{field.name} = {text}\n")
    return "".join(lines)


def write(path: Path, text: str) -> None:
    """Write a file of facts, complete or not at all; its folder is created.

    Raises:
        OutputError: The file cannot be written; no part of it is left.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error
