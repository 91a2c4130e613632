"""What of another tool's lock a base image gets. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.pylock import Pylock
from packaging.requirements import Requirement as Specification
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from trainworks.extend.reading.lines import OptionLine
from trainworks.extend.reading.text import without_credentials
from trainworks.extend.requirements import ExtendedBase, FolderRequirement, GitRequirement, PackageRequirement

Table = Mapping[str, Any]
"""A table of TOML."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What of a base is never replaced.

    Attributes:
        versions: Name to version.
        patterns: Names that belong to it, with ``*``: the libraries of another build of it are not installed.
    """

    versions: Mapping[str, str]
    patterns: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Whether a distribution is kept, or is a part of what is kept."""
        return name in self.versions or any(fnmatchcase(name, pattern) for pattern in self.patterns)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What of a lock a base image gets.

    Attributes:
        requirements: Each distribution with its version; wheels by their address or path.
        constraints: Versions that hold where something asks for the distribution.
        sources: Git repositories at their commits.
        folders: Folders of this machine.
        options: Indexes that the lock names, apart from pip's default.
        hashes: Name and version to the hashes of the files that the lock has.
        notes: What a person should know.
        problems: Why it cannot be installed.
    """

    requirements: tuple[PackageRequirement, ...] = ()
    constraints: tuple[PackageRequirement, ...] = ()
    sources: tuple[GitRequirement, ...] = ()
    folders: tuple[FolderRequirement, ...] = ()
    options: tuple[OptionLine, ...] = ()
    hashes: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A lock, as it was read.

    Attributes:
        where: Its name, for messages.
        content: ``uv.lock`` as tables, or a ``Pylock``.
        extras: Extras of the project that are wanted.
        groups: Groups of the project that are wanted.
    """

    where: str
    content: Table | Pylock = field(repr=False)
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def virtual(self) -> bool:
        """Whether it says that the project itself is not installed."""
        if isinstance(self.content, Pylock):
            return False
        return any(row.get("source", {}).get("virtual") == "." for row in self.content.get("package", ()))


class Chosen:
    """What was chosen so far."""

    def __init__(self, lock: Lock, base: ExtendedBase, kept: Kept) -> None:
        """Begin with nothing."""
        self.lock, self.base, self.kept = lock, base, kept
        self.pins: dict[str, PackageRequirement] = {}
        self.limits: dict[str, PackageRequirement] = {}
        self.sources: list[GitRequirement] = []
        self.folders: list[FolderRequirement] = []
        self.indexes: dict[str, None] = {}
        self.links: dict[str, None] = {}
        self.hashes: dict[tuple[str, str], tuple[str, ...]] = {}
        self.own: list[str] = []
        self.left: list[str] = []
        self.problems: list[str] = []

    def place(self, name: str, version: str = "") -> str:
        """Return where a package stands, for messages."""
        return f"{self.lock.where}: {name} {version}".rstrip()

    def check_python(self, wanted: SpecifierSet | None) -> None:
        """Add a problem where the lock is for other versions of Python than the base's."""
        version = _full_version(self.base)
        if wanted is not None and not wanted.contains(version, prereleases=True):
            self.problems.append(f"{self.lock.where}: it is for Python {wanted}, and the base has {self.base.version}")

    def add_pin(self, name: str, version: str, hashes: Iterable[str], *, needed: bool = True) -> None:
        """Add a version of an index, or a limit of it only, with the hashes of its files where the lock has them."""
        name = canonicalize_name(name)
        pin = _pin(name, version, self.place(name, version))
        self.limits[name] = pin
        if needed:
            self.pins[name] = pin
        if found := tuple(sorted({each.removeprefix("sha256:") for each in hashes})):
            self.hashes[name, version] = found

    def add_wheel(self, name: str, version: str, address: str, hashes: Iterable[str]) -> None:
        """Add a wheel by its address or path."""
        name = canonicalize_name(name)
        if not unquote(urlsplit(address).path).endswith(".whl"):
            self.problems.append(f"{self.place(name, version)}: {address} is a source archive: lock a wheel of it")
            return
        pin = _pin(name, version, self.place(name, version))
        digests = tuple(each.removeprefix("sha256:") for each in hashes)
        self.pins[name] = replace(pin, wheel=address, hashes=digests)

    def add_git(self, name: str, url: str, commit: str, subdirectory: str) -> None:
        """Add a git repository at a commit."""
        self.sources.append(
            GitRequirement(
                place=self.place(name),
                url=url,
                reference=commit,
                subdirectory=subdirectory,
                name=canonicalize_name(name),
            )
        )

    def add_folder(self, name: str, path: str) -> None:
        """Add a folder beside the lock."""
        # The project of the lock itself is installed from --source.
        path = posixpath.normpath(path)
        if path != ".":
            self.folders.append(FolderRequirement(place=self.place(name), path=path, name=canonicalize_name(name)))

    def leave(self, name: str, version: str) -> None:
        """Leave out what is kept: the base's own counts."""
        own = self.kept.versions.get(name)
        if own is None:
            self.left.append(name)
        elif _public(own) != _public(version):
            self.own.append(f"{self.place(name, version)} is not installed: the image keeps its own {name} {own}")

    def selection(self) -> Selection:
        """Return what was chosen."""
        notes = list(self.own)
        if self.left:
            names = ", ".join(self.left[:4]) + (f" and {len(self.left) - 4} more" if len(self.left) > 4 else "")
            notes.append(f"{self.lock.where}: not installed, part of what the image keeps: {names}")
        links = [("--find-links", link) for link in self.links]
        options = [*links, *(("--extra-index-url", url) for url in self.indexes)]
        return Selection(
            requirements=tuple(self.pins.values()),
            constraints=tuple(self.limits.values()),
            sources=tuple(self.sources),
            folders=tuple(self.folders),
            options=tuple(
                OptionLine(place=f"{self.lock.where}: {shown}", name=name, value=value, written=shown)
                for name, value in options
                for shown in (without_credentials(value),)
            ),
            hashes=self.hashes,
            notes=tuple(notes),
            problems=tuple(self.problems),
        )


def _public(version: str) -> str:
    """Return a version without its build: an index has the same release for several CUDA versions."""
    try:
        return Version(version).public
    except InvalidVersion:
        return version


def _pin(name: str, version: str, place: str) -> PackageRequirement:
    text = f"{name}=={version}"
    return PackageRequirement(place=place, specification=Specification(text), text=text, hashed=False)


def _full_version(base: ExtendedBase) -> str:
    return base.markers["python_full_version"]


def add_index(index: str, chosen: Chosen) -> None:
    """Add the index that a lock has a file from: an address, or a folder of files."""
    if "://" in index:
        chosen.indexes.setdefault(index.rstrip("/"))
    else:
        chosen.links.setdefault(index)


def check_names(chosen: Chosen, option: str, wanted: Sequence[str], there: Iterable[str]) -> None:
    """Add a problem for each extra or group that is wanted and not there."""
    names = {canonicalize_name(each): each for each in there}
    for each in wanted:
        if canonicalize_name(each) not in names:
            known = f": it has {', '.join(sorted(names.values()))}" if names else ": it has none"
            chosen.problems.append(f"--{option} {each}: {chosen.lock.where} does not have it{known}")
