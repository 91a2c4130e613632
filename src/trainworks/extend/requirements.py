"""Requirements, and the base image that they have to fit. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from packaging.markers import Marker
from packaging.requirements import Requirement as Specification
from packaging.tags import Tag
from packaging.utils import NormalizedName, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from trainworks.facts.rows import MACHINES, Architecture
from trainworks.plan.wheel_tags import wheel_tags


@dataclass(frozen=True, kw_only=True)
class BaseDistribution:
    """A Python distribution that the base image has.

    Attributes:
        name: As its metadata have it.
        version: As its metadata have it.
        requires: What its metadata ask for.
        size: Bytes of its files.
        build: The version with the build that it says of itself, such as ``VERSION+cu121``; or ``""``.
        removable: Whether pip can replace it.
    """

    name: str
    version: str
    requires: tuple[str, ...] = ()
    size: int = 0
    build: str = ""
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
        complaints: What ``pip check`` says of the image as it is, line by line.
        kept: What is never replaced, name to version (``kept_of``).
        full_version: That Python's ``MAJOR.MINOR.PATCH``, which some requirements ask for; ``""`` for its first.
        components: The components of an image of ours that have a version, name to version.
        missing: Components that an image of ours could have and that this one lacks.
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
    complaints: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    full_version: str = ""
    components: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

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
            "platform_machine": self.machine,
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }

    @property
    def tags(self) -> list[Tag]:
        """The tags of the wheels that it can load, the best first."""
        return wheel_tags(python=self.version, machine=self.machine, glibc=self.glibc)

    @property
    def architecture(self) -> Architecture:
        """What its programs run on, by the name that images give it."""
        return next((name for name, machine in MACHINES.items() if machine == self.machine), "amd64")

    @property
    def source(self) -> str:
        """What FROM names: the digest where it is known, because a tag may be another image tomorrow."""
        return self.digest or self.reference


@dataclass(frozen=True, kw_only=True)
class PackageRequirement:
    """One requirement of a distribution that has a version.

    Attributes:
        place: File, line and text, for messages.
        specification: What it asks for; exactly the wheel's version where it names a wheel.
        text: As pip reads it; without hashes where it names a wheel.
        hashed: Whether it has hashes.
        wheel: The wheel that it names, as written: a path, or an address; else ``""``.
        hashes: Its sha256 hashes.
    """

    place: str
    specification: Specification
    text: str
    hashed: bool
    wheel: str = ""
    hashes: tuple[str, ...] = ()

    @property
    def name(self) -> NormalizedName:
        """The distribution's name as indexes write it."""
        return canonicalize_name(self.specification.name)

    @property
    def pinned(self) -> bool:
        """Whether it allows one version only."""
        specifiers = list(self.specification.specifier)
        return len(specifiers) == 1 and specifiers[0].operator == "==" and not specifiers[0].version.endswith("*")

    def applies(self, base: ExtendedBase) -> bool:
        """Whether its marker, if it has one, holds in a base image."""
        return _holds(self.specification.marker, base)


def _holds(marker: Marker | None, base: ExtendedBase) -> bool:
    return marker is None or marker.evaluate(base.markers)


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

    def applies(self, base: ExtendedBase) -> bool:
        """Whether its marker, if it has one, holds in a base image."""
        return _holds(Marker(self.marker) if self.marker else None, base)


@dataclass(frozen=True, kw_only=True)
class FolderRequirement:
    """A distribution that is built from a folder of this machine, such as ``-e .`` or ``./lib[extra]``.

    Attributes:
        place: File, line and text, for messages.
        path: The folder, as written.
        name: The distribution's name, where the line says it; else ``""``.
        extras: Such as ``[all]``, or ``""``.
        marker: Such as ``python_version >= "3.9"``, or ``""``.
    """

    place: str
    path: str
    name: str = ""
    extras: str = ""
    marker: str = ""

    def applies(self, base: ExtendedBase) -> bool:
        """Whether its marker, if it has one, holds in a base image."""
        return _holds(Marker(self.marker) if self.marker else None, base)


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel that goes into the image with the build context.

    Attributes:
        file: Its name.
        content: Its bytes.
        requires: What its metadata ask for.
        extras: Which of its extras are wanted, such as ``[all]``; or ``""``.
        built: It was built for this image, from a git repository or from the code; its bytes are in no lock.
    """

    file: str
    content: bytes = field(repr=False)
    requires: tuple[str, ...] = ()
    extras: str = ""
    built: bool = False

    @property
    def name(self) -> NormalizedName:
        """The distribution's name as indexes write it."""
        return parse_wheel_filename(self.file)[0]

    @property
    def version(self) -> str:
        """The distribution's version."""
        return str(parse_wheel_filename(self.file)[1])

    @property
    def sha256(self) -> str:
        """The hash of its bytes."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pin(self) -> str:
        """The line of a requirements file that only this wheel fulfils."""
        return f"{self.name}{self.extras}=={self.version} --hash=sha256:{self.sha256}"


def wrong_builds(locked: Iterable[tuple[str, str]], base: ExtendedBase, companions: Container[str]) -> list[str]:
    """Return what was locked for another build of torch than the base's, which only its local version tells.

    The package index's torchvision asks for a version of torch that the CPU build has too; it was compiled for the
    CUDA build, and fails when it is imported.

    Args:
        locked: Name and version of each distribution.
        base: The image that it is installed in.
        companions: Distributions that are compiled for one build of torch (``Component.companions``).
    """
    versions = [row.version for row in base.distributions if canonicalize_name(row.name) == "torch"]
    build = versions[0].partition("+")[2] if versions else ""
    return [
        f"{name} {version} is not built for the base's torch {versions[0]}: add the index that has {name} +{build} to "
        "pip's settings (PIP_EXTRA_INDEX_URL), such as PyTorch's own for this build"
        for name, version in locked
        if build and name in companions and Version(version).local != build
    ]
