"""Databases of advisories: files that a person names, and the published ones, kept on this machine with their age."""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trainworks.errors import LockError, OutputError
from trainworks.facts.rows import Database
from trainworks.host.downloads import Client, without_credentials
from trainworks.vulnerabilities.advisory import Advisory, MalformedAdvisoryError, ecosystems_of, read_advisory

FRESH_SECONDS = 24 * 3600
"""How old a downloaded database may be before it is downloaded again."""

LARGEST = 64 << 20
"""Bytes of one advisory: the largest real ones have some megabytes, and a zip may promise anything."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """What was read of one database.

    Attributes:
        name: What a person calls it.
        advisories: Those about wanted packages.
        counts: How many advisories it has of each ecosystem.
        modified: When the newest of them was changed, as it is written; ``""`` where none says it.
        unreadable: How many of its files are no advisories, and what is wrong with the first; ``""`` where all are.
    """

    name: str
    advisories: tuple[Advisory, ...]
    counts: Mapping[str, int]
    modified: str
    unreadable: str = ""


def read_given(value: str, wanted: Collection[tuple[str, str]], client: Client, folder: Path) -> Read:
    """Read what ``--database`` names: an address, a zip, a JSON file, or a folder with such files in it.

    Args:
        value: As given.
        wanted: Ecosystems and names of packages.
        client: Downloads.
        folder: Where to download to.

    Raises:
        OutputError: It is not there, cannot be had or read, or has no advisories in it.
    """
    name = without_credentials(value)
    path = Path(value).expanduser()
    if urlsplit(value).scheme in ("http", "https"):
        path = folder / hashlib.sha256(value.encode()).hexdigest()
        try:
            client.download(value, path)
        except LockError as error:
            raise OutputError(f"--database: {error.message}", hint=GIVE) from error
    elif path.exists():
        # Reports are handed on: where a file lies on this machine is of no use to others.
        name = path.resolve().name
    else:
        raise OutputError(f"--database {value}: no such file or folder", hint=GIVE)
    found = read_database(path, name, wanted)
    if not found.counts:
        raise OutputError(f"--database {name}: there is no advisory in the OSV format in it", hint=GIVE)
    return found


GIVE = (
    "--database takes advisories in the OSV format: a zip with all of an ecosystem (the addresses are in "
    "images/databases.toml), one JSON file, or a folder of either"
)


def published(
    row: Database,
    wanted: Collection[tuple[str, str]],
    client: Client,
    cache: Path,
    now: float,
    report: Callable[[str], None],
) -> tuple[Read, str]:
    """Read a published database: the copy on this machine where that is fresh, else a new one.

    Args:
        row: Which.
        wanted: Ecosystems and names of packages.
        client: Downloads.
        cache: Folder of the copies.
        now: Seconds since 1970.
        report: Told what is being done.

    Returns:
        What it has, and how old the copy is, for people.

    Raises:
        LockError: It cannot be had, and there is no copy.
        OutputError: The copy cannot be written or read.
    """
    copy = cache / f"{row.name.lower()}-{hashlib.sha256(row.url.encode()).hexdigest()[:12]}.zip"
    problem = ""
    if not copy.is_file() or now - copy.stat().st_mtime > FRESH_SECONDS:
        report(f"  downloading the advisories of {row.name}")
        try:
            return _download(row, copy, wanted, client), "downloaded just now"
        except LockError as error:
            if not copy.is_file():
                raise
            problem = f"; a newer one cannot be had: {error.message}"
    age = max(0.0, now - copy.stat().st_mtime)
    return read_database(copy, row.name, wanted), f"downloaded {_ago(age)}{problem}"


def _download(row: Database, copy: Path, wanted: Collection[tuple[str, str]], client: Client) -> Read:
    """Replace a copy, but only by what can be read: a server's page of excuses cannot."""
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        new = copy.with_suffix(".new")
        client.download(row.url, new)
        try:
            read = read_database(new, row.name, wanted)
        except OutputError as error:
            new.unlink()
            raise LockError(f"{without_credentials(row.url)} gives no advisories: {error.message}") from error
        if not read.counts:
            new.unlink()
            raise LockError(f"{without_credentials(row.url)} gives a zip without an advisory")
        new.replace(copy)
    except OSError as error:
        raise OutputError(f"{error.filename or copy}: {error.strerror}") from error
    return read


def read_database(path: Path, name: str, wanted: Collection[tuple[str, str]]) -> Read:
    """Read a zip, a JSON file or a folder of either. One file that is no advisory does not cost all the others.

    Raises:
        OutputError: It cannot be read, or nothing in it is an advisory; says why.
    """
    advisories: list[Advisory] = []
    counts: Counter[str] = Counter()
    modified = ""
    others: list[str] = []
    for member, content in _files(path):
        where = f"{name}: {member}" if member else name
        try:
            value = json.loads(content)
            advisory = read_advisory(value, name, wanted)
            ecosystems = ecosystems_of(value)
        except (ValueError, RecursionError) as error:
            others.append(f"{where}: {error if isinstance(error, MalformedAdvisoryError) else 'no JSON'}")
            continue
        if advisory is not None:
            advisories.append(advisory)
        counts.update(ecosystems)
        modified = max(modified, str(value.get("modified") or ""))
    if others and not counts:
        raise OutputError(others[0], hint=GIVE)
    unreadable = f"{len(others)} without an advisory in the OSV format, first {others[0]}" if others else ""
    return Read(name=name, advisories=tuple(advisories), counts=counts, modified=modified, unreadable=unreadable)


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the advisories of a path: name within it (``""``: it is one itself) and content."""
    try:
        if path.is_dir():
            for each in sorted(path.rglob("*")):
                if each.suffix in (".json", ".zip") and each.is_file():
                    for member, content in _files(each):
                        yield f"{each.relative_to(path)}{f': {member}' if member else ''}", content
        elif _is_zip(path):
            yield from _members(path)
        else:
            yield "", path.read_bytes()
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror or error}") from error


def _is_zip(path: Path) -> bool:
    """Say whether a file begins as a zip does: one that was cut off has no list of its members any more."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.filename.endswith(".json"):
                    continue
                if member.file_size > LARGEST:
                    raise OutputError(
                        f"{path.name}: {member.filename} has {member.file_size} bytes: that is no advisory"
                    )
                yield member.filename, archive.read(member)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise OutputError(f"{path.name} is no whole zip: {error}", hint="download it again") from error


def _ago(seconds: float) -> str:
    """Return an age for people."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        number = int(seconds // length)
        if number:
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"
