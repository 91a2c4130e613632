"""What is asked of a resolution, and what it answers, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trainworks.extend.reading.options import Choice
from trainworks.extend.requirements import Wheel


@dataclass(frozen=True, kw_only=True)
class Resolvable:
    """What a lock is made for.

    Attributes:
        lines: Requirements of names and versions, as pip reads them.
        constraints: Lines of the same form.
        wheels: Wheels that are installed whatever an index has.
        commits: Git requirement to its commit.
        choice: Which versions and files count.
        options: Lines that say where packages come from, for the digest of the inputs.
        hashes: Name and version to the hashes of the files that a lock of another tool has.
    """

    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    wheels: tuple[Wheel, ...] = ()
    commits: Mapping[str, str] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)
    options: tuple[str, ...] = ()
    hashes: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A release that is built from its source archive; ``sha256`` is the archive's."""

    name: str
    version: str
    file: str
    sha256: str

    def __str__(self) -> str:
        """Return what the user knows it by."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True, kw_only=True)
class LockedRelease:
    """One distribution of a resolution.

    Attributes:
        name: Normalised.
        version: Exact.
        hashes: sha256 of its wheels that fit the base, or of the archive that it is built from.
        archive: What it is built from; ``None`` for a wheel.
        wheel: Address or file of the wheel that pip would take; ``""`` without one.
        parents: Names of what requires it; ``-r requirements.in`` is the user's own.
        released: When its file was published, ``YYYY-MM-DD``; ``""`` where the index does not say.
    """

    name: str
    version: str
    hashes: tuple[str, ...]
    archive: Archive | None = None
    wheel: str = ""
    parents: tuple[str, ...] = ()
    released: str = ""


BuildArchives = Callable[[Sequence[Archive]], Sequence[Wheel]]
"""Builds archives in the base image and returns their wheels, in the same order."""


@dataclass(frozen=True, kw_only=True)
class Older:
    """A direct requirement that is not locked at the newest release that it allows, and why."""

    name: str
    version: str
    newest: str
    reason: str

    def __str__(self) -> str:
        """Return the line for the user."""
        return f"{self.name} {self.version} is not the newest that is asked for, {self.newest}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What requirements are resolved to.

    Attributes:
        releases: What has to be installed, by name, without what the base has already.
        removed: What of the base is removed: it cannot stay with them, and no wheel of it can replace it.
        notes: Lines for the user: what moves and who asks for it, what is removed, what is older than it could be.
    """

    releases: tuple[LockedRelease, ...] = ()
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
