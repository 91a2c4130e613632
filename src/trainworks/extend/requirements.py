"""The base image that is extended, git requirements, and the lock of an extension. Pure."""

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
        name: The name in its metadata.
        version: The version in its metadata.
        removable: Whether pip can replace it.
    """

    name: str
    version: str
    removable: bool = True


@dataclass(frozen=True, kw_only=True)
class ExtendedBase:
    """The image that is extended, as far as an extension depends on it.

    Attributes:
        reference: The user's name for it.
        identifier: ``sha256:...`` of its configuration, in the engine's store.
        digest: ``NAME@sha256:...`` in its registry; ``""`` where that is not known.
        python: The interpreter that a job would get, an absolute path.
        version: That Python's ``MAJOR.MINOR``.
        glibc: Version of the C library, ``MAJOR.MINOR``.
        machine: ``x86_64`` or ``aarch64``.
        managed: Whether the distribution marks its Python as externally managed (PEP 668).
        pip: Whether this Python has pip.
        distribution: ``ID`` of its os-release: ``debian``, ``ubuntu``, ``amzn``...
        suite: ``VERSION_CODENAME`` of its os-release.
        compiler: Whether a C compiler is on PATH.
        launcher: Whether the image is one of ours, with our launcher.
        environment: The image's environment.
        labels: The image's labels.
        distributions: The installed distributions.
        kept: Distributions that are never replaced, name to version (``kept_of``).
        full_version: That Python's ``MAJOR.MINOR.PATCH``; ``""`` for the first patch.
        components: The components of an image of ours that have a version, name to version.
        uv: Whether this Python's environment has uv.
        missing: Components that an image of ours could have and that this one lacks.
        metadata: Metadata that a resolver needs, by the distribution's name: lines of ``METADATA``.
        builds: The build in a framework's own version, such as ``VERSION+cu121``, by the
            distribution's name.
        user: The user that its programs run as; ``""`` is root.
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
        """The architecture's name in image platforms, such as ``amd64``."""
        for name, machine in MACHINES.items():
            if machine == self.machine:
                return name
        return "amd64"

    @property
    def source(self) -> str:
        """The name for FROM: with the digest if known, because a tag may be moved."""
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
        url: The repository's address for git.
        reference: Branch, tag or commit; ``""`` for the default branch.
        subdirectory: The project's folder in the repository; ``""`` for its root.
        name: The distribution's name in the line, or ``""``.
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
        """Return address and reference, which decide the commit."""
        return f"git+{self.url}@{self.reference or 'HEAD'}"


PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)((?: \\\n    --hash=\S+)*)$", re.MULTILINE)
"""A line of a lock: name, version, hashes."""


@dataclass(frozen=True, kw_only=True)
class ExtensionLock:
    """The distributions of an extension. The file lies beside the requirements and in the image.

    Attributes:
        commits: Git requirement to commit.
        local: Distributions that do not come from an index, name to version.
        folders: Folders that projects of the user name (``tool.uv.sources``): path relative to the
            lock, to ``WheelSource.identity``.
        repositories: Repositories that such projects name: ``git+URL@COMMIT``, to the
            distribution's name.
        project: The distribution of the code itself; ``""`` for none.
        notes: Lines that the user was told.
        pins: Lines with hashes, as uv writes them, below the options for their indexes.
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
        """The text of the file."""
        data = {name: value for name, value in asdict(self).items() if name != "pins"}
        return f"# data: {json.dumps(data)}\n{self.pins}"

    @property
    def locked(self) -> tuple[tuple[str, str], ...]:
        """Name and version of each distribution, sorted."""
        pinned = [(name, version) for name, version, _ in PIN.findall(self.pins)]
        return tuple(sorted([*pinned, *self.local.items()]))

    @property
    def all_commits(self) -> Mapping[str, str]:
        """The commits of all repositories, by requirement or address."""
        commits = dict(self.commits)
        for address in self.repositories:
            commits[address] = address.partition("#")[0].rpartition("@")[2]
        return commits

    @property
    def hashes(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """The sha256 of every file that the lock allows, by name and version."""
        return {
            (name, version): tuple(re.findall(r"sha256:([0-9a-f]{64})", hashes))
            for name, version, hashes in PIN.findall(self.pins)
        }


NO_LOCK = ExtensionLock()
"""The lock of an extension that installs nothing, or that is not resolved yet."""
