"""What uv says, and what it is told: the form of its output, of its messages and of the metadata that it reads."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Specification
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from trainworks.errors import LockError
from trainworks.extend.resolving.releases import Archive, LockedRelease

NO_ANSWER = "No solution found"
"""What uv says where no releases fit each other; an index that does not answer is another matter."""

LINE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*(?:==(?P<version>[^\s;]+)|@\s*\S+)"
    r"[^#]*(?:# via (?P<via>.+))?$"
)
UNBUILT = re.compile(r"[Ff]ailed to (?:download and )?build `(?P<name>[^`=\s]+)==(?P<version>[^`\s]+)`")
PRE_RELEASE = re.compile(r"`?(?P<name>[a-z0-9-]+)`? was requested with a pre-release marker")


def is_of(text: str, name: str) -> bool:
    """Whether a requirement is one of this distribution."""
    try:
        return canonicalize_name(Specification(text).name) == name
    except InvalidRequirement:
        return False


def without_extra(text: str) -> str:
    """Return a requirement of an extra as one of everybody."""
    return text.partition(";")[0] if EXTRA.search(text) else text


def because(message: str) -> str:
    """Return the first reason in uv's words, in one line."""
    words = " ".join(line.strip() for line in message.splitlines()[1:])
    found = re.search(r"[Bb]ecause (.+?)(?:, we can conclude|\. And |\.$|$)", words)
    return found[1] if found else words[:200]


def metadata(assumed: tuple[tuple[str, str], Sequence[str]]) -> str:
    """Return what uv has to know of a release that it must not build."""
    (name, version), requires = assumed
    extras = sorted({extra for text in requires for extra in EXTRA.findall(text)})

    def texts(values: Iterable[str]) -> str:
        return ", ".join(f"'{value}'" if "'" not in value else f'"{value}"' for value in values)

    return (
        f'\n[[dependency-metadata]]\nname = "{name}"\nversion = "{version}"\n'
        f"requires-dist = [{texts(requires)}]\nprovides-extra = [{texts(extras)}]\n"
    )


EXTRA = re.compile(r"extra\s*==\s*[\"']([^\"']+)")


def release_of(
    row: Mapping[str, Any], name: str, version: str, tags: Mapping[Tag, int], parents: tuple[str, ...]
) -> LockedRelease:
    """Return what a row of uv's pylock.toml says of a release; the wheel is the one that pip would take.

    Args:
        row: Its package.
        name: Normalised.
        version: Exact.
        tags: Each tag of the base's Python to its rank; 0 is what pip likes best.
        parents: Names of what requires it.

    Raises:
        LockError: No file of it is for this base.
    """
    fitting = []
    for wheel in row.get("wheels", ()):
        file = _file_of(wheel)
        try:
            ranks = [tags[tag] for tag in parse_wheel_filename(file)[3] if tag in tags]
        except InvalidWheelFilename:
            continue
        fitting += [(min(ranks), file, wheel)] if ranks else []
    if fitting:
        fitting.sort(key=lambda found: found[:2])
        hashes = tuple(dict.fromkeys(wheel["hashes"]["sha256"] for _, _, wheel in fitting))
        address = str(fitting[0][2].get("url") or fitting[0][2].get("path", ""))
        released = _date_of(fitting[0][2])
        return LockedRelease(
            name=name, version=version, hashes=hashes, wheel=address, parents=parents, released=released
        )
    source = row.get("sdist")
    if source is None:
        raise LockError(f"{name} {version} has no file for this Python and C library")
    sha256 = source["hashes"]["sha256"]
    archive = Archive(name=name, version=version, file=_file_of(source), sha256=sha256)
    return LockedRelease(
        name=name, version=version, hashes=(sha256,), archive=archive, parents=parents, released=_date_of(source)
    )


def _date_of(file: Mapping[str, Any]) -> str:
    uploaded = file.get("upload-time")
    return uploaded.date().isoformat() if isinstance(uploaded, datetime) else ""


def _file_of(file: Mapping[str, Any]) -> str:
    return unquote(str(file.get("name") or file.get("url") or file.get("path", ""))).rsplit("/", 1)[-1]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file of lines."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def metadata_in(wheel: Path) -> str:
    """Return the head of a wheel's metadata; ``""`` for a file that has none."""
    with contextlib.suppress(OSError, StopIteration, zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return archive.read(name).decode("utf-8", "replace").partition("\n\n")[0]
    return ""


def takes(requires_python: str, version: str) -> bool:
    """Whether a release is for a Python; what cannot be read excludes none."""
    try:
        return SpecifierSet(requires_python).contains(version, prereleases=True)
    except InvalidSpecifier:
        return True


def is_version(text: str) -> bool:
    """Whether packaging can read a version."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
