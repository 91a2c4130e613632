"""The base image that is extended, and what is built from git. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from packaging.markers import Marker

from trainworks.facts.rows import MACHINES, Architecture


@dataclass(frozen=True, kw_only=True)
class BaseDistribution:
    """A Python distribution that the base image has.

    Attributes:
        name: As its metadata have it.
        version: As its metadata have it.
        removable: Whether pip can replace it.
    """

    name: str
    version: str
    removable: bool = True


@dataclass(frozen=True, kw_only=True)
class ExtendedBase:
    """What has to be known of the image that is extended.

    Attributes:
        reference: As the user named it.
        identifier: ``sha256:...`` of its configuration, in the engine's store.
        digest: ``NAME@sha256:...`` by which its registry knows it; ``""`` where that is not known.
        python: The interpreter that a job would get, an absolute path.
        version: That Python's ``MAJOR.MINOR``.
        glibc: Version of the C library, ``MAJOR.MINOR``.
        machine: ``x86_64`` or ``aarch64``.
        managed: The distribution says that its packages are its own affair (PEP 668).
        pip: Whether this Python has pip.
        distribution: ``ID`` of its os-release: ``debian``, ``ubuntu``, ``amzn``...
        suite: ``VERSION_CODENAME`` of its os-release.
        compiler: Whether a C compiler is on PATH.
        launcher: Whether the image is one of ours, with our launcher.
        environment: The image's environment.
        labels: The image's labels.
        distributions: What is installed.
        kept: What is never replaced, name to version (``kept_of``).
        full_version: That Python's ``MAJOR.MINOR.PATCH``, which some
            requirements ask for; ``""`` for its first.
        components: The components of an image of ours that have a version, name to version.
        uv: Whether this Python's environment has uv.
        missing: Components that an image of ours could have and that this one lacks.
        metadata: What decides which requirements go together, of each
            distribution: name to the lines of a file.
        builds: The build that a framework says of itself, such as ``VERSION+cu121``, by the
            distribution's name.
        user: Who its programs run as; ``""`` is root.
    """

    reference: str
    identifier: str
    python: str
    version: str
    glibc: str
    machine: str
    environment: Mapping[str, str]
    distributions: tuple[BaseDistribution, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    managed: bool = False
    pip: bool = True
    distribution: str = ""
    suite: str = ""
    compiler: bool = False
    launcher: bool = True
    kept: Mapping[str, str] = field(default_factory=dict)
    full_version: str = ""
    components: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    uv: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)
    builds: Mapping[str, str] = field(default_factory=dict)
    user: str = ""

    @property
    def apt(self) -> bool:
        """Whether Debian's package manager installs packages in it."""
        return self.distribution in ("debian", "ubuntu") and bool(self.suite)

    @property
    def markers(self) -> dict[str, str]:
        """The values of environment markers."""
        return {
            "python_version": self.version,
            "python_full_version": self.full_version or f"{self.version}.0",
            "implementation_version": self.full_version or f"{self.version}.0",
            "platform_machine": self.machine,
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }

    @property
    def architecture(self) -> Architecture:
        """What its programs run on, by the name that images give it."""
        return next(
            (name for name, machine in MACHINES.items() if machine == self.machine), "amd64"
        )

    @property
    def source(self) -> str:
        """What FROM names: the digest where it is known, because a tag may be
        another image tomorrow.
        """
        return self.digest or self.reference


def holds(marker: str, base: ExtendedBase) -> bool:
    """Whether a marker, such as ``python_version >= "3.9"``, holds in a base image.

    True for none.
    """
    return not marker or Marker(marker).evaluate(base.markers)


@dataclass(frozen=True, kw_only=True)
class GitRequirement:
    """A distribution that is built from a git repository.

    Attributes:
        place: File, line and text, for messages.
        url: The repository's address, as git takes it.
        reference: Branch, tag or commit; ``""`` for the default branch.
        subdirectory: Where in the repository the project lies; ``""`` for its root.
        name: The distribution's name, where the line says it; else ``""``.
        extras: Such as ``[all]``, or ``""``.
        marker: Such as ``python_version >= "3.9"``, or ``""``.
    """

    place: str
    url: str
    reference: str = ""
    subdirectory: str = ""
    name: str = ""
    extras: str = ""
    marker: str = ""

    def __str__(self) -> str:
        """Return what decides its commit."""
        return f"git+{self.url}@{self.reference or 'HEAD'}"


PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)((?: \\\n    --hash=\S+)*)$", re.MULTILINE)
"""A line of a lock: name, version, hashes."""


@dataclass(frozen=True, kw_only=True)
class ExtensionLock:
    """What is installed. It lies beside the requirements, and the image keeps it.

    Attributes:
        commits: Git requirement to commit.
        local: What does not come from an index, name to version.
        folders: What uv found in projects' own sources, a folder seen from the
            lock to what decides its requirements.
        repositories: The same of git repositories, as uv names them with the commit, to the
            distribution's name.
        project: The distribution that the code itself is; ``""`` for none.
        notes: What the user was told.
        pins: Lines with hashes, as uv writes them, below the options that say where they come from.
    """

    commits: Mapping[str, str] = field(default_factory=dict)
    local: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    repositories: Mapping[str, str] = field(default_factory=dict)
    project: str = ""
    notes: Sequence[str] = ()
    pins: str = ""

    @property
    def text(self) -> str:
        """All of it, as a file."""
        data = {name: value for name, value in asdict(self).items() if name != "pins"}
        return f"# data: {json.dumps(data)}\n{self.pins}"

    @property
    def locked(self) -> tuple[tuple[str, str], ...]:
        """Name and version of everything that is installed, sorted."""
        return tuple(
            sorted(
                [
                    *((name, version) for name, version, _ in PIN.findall(self.pins)),
                    *self.local.items(),
                ]
            )
        )

    @property
    def all_commits(self) -> Mapping[str, str]:
        """The commits of lines, and those of projects' own sources, by what names them."""
        named = {
            address: address.partition("#")[0].rpartition("@")[2] for address in self.repositories
        }
        return {**self.commits, **named}

    @property
    def hashes(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """The sha256 of every file that it allows, by name and version."""
        return {
            (name, version): tuple(re.findall(r"sha256:([0-9a-f]{64})", hashes))
            for name, version, hashes in PIN.findall(self.pins)
        }


NO_LOCK = ExtensionLock()
"""Of an extension that installs nothing, or whose requirements nothing has resolved yet."""
