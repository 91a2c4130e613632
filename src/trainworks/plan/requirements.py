"""Requirements files, and the base image that they are held against: what it has is never replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Specification
from packaging.utils import NormalizedName, canonicalize_name

_HASH = re.compile(r"\s--hash[=\s]\s*sha256:[0-9a-f]{64}\b")
_ANY_HASH = re.compile(r"\s--hash[=\s]\s*\S+")


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A Python distribution that the base image has; ``extras`` are the requirements that only an extra asks for."""

    name: str
    version: str
    extras: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BaseImage:
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
        launcher: Whether the image is one of ours, with our launcher.
        environment: The image's environment.
        labels: The image's labels.
        distributions: What is installed.
        complaints: What ``pip check`` says of the image as it is, line by line.
    """

    reference: str
    identifier: str
    python: str
    version: str
    glibc: str
    machine: str
    environment: Mapping[str, str]
    distributions: tuple[Distribution, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    managed: bool = False
    pip: bool = True
    launcher: bool = True
    complaints: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """What FROM names: the digest where it is known, because a tag may be another image tomorrow."""
        return self.digest or self.reference


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One line of a requirements file: where it stands, what it asks for, and whether it has hashes."""

    line: int
    specification: Specification
    hashed: bool

    @property
    def name(self) -> NormalizedName:
        """The distribution's name as indexes write it."""
        return canonicalize_name(self.specification.name)

    @property
    def pinned(self) -> bool:
        """Whether it allows one version only."""
        specifiers = list(self.specification.specifier)
        return len(specifiers) == 1 and specifiers[0].operator == "==" and not specifiers[0].version.endswith("*")

    def applies(self, base: BaseImage) -> bool:
        """Whether its marker, if it has one, holds in a base image."""
        marker = self.specification.marker
        return marker is None or marker.evaluate(
            {
                "python_version": base.version,
                "python_full_version": f"{base.version}.0",
                "platform_machine": base.machine,
                "platform_system": "Linux",
                "sys_platform": "linux",
                "os_name": "posix",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }
        )


def read_requirements(text: str, where: str) -> tuple[tuple[Requirement, ...], list[str]]:
    """Read a requirements file: names and versions only, with or without hashes.

    Args:
        text: The file's content.
        where: Its name, for messages.

    Returns:
        The requirements, and what is wrong with the file: lines that name no version of an index, and some hashes where
        not all lines have them.
    """
    requirements, problems = [], []
    for number, line in _logical_lines(text):
        place = f"{where} line {number}: {line[:80]}"
        if line.startswith("-"):
            problems.append(f"{place}: {_advice_for_option(line)}")
            continue
        try:
            specification = Specification(_ANY_HASH.sub("", line).strip())
        except InvalidRequirement:
            if re.search(r"://|^[./~]|\.(?:whl|zip|tar\.gz)\b", line):
                problems.append(f"{place}: {_NOT_PINNED}")
            else:
                problems.append(f"{place}: this is no requirement, such as pandas>=2")
            continue
        if specification.url:
            problems.append(f"{place}: {_NOT_PINNED}")
            continue
        requirements.append(
            Requirement(line=number, specification=specification, hashed=_HASH.search(line) is not None)
        )
        if _ANY_HASH.search(line) and not _HASH.search(line):
            problems.append(f"{place}: a hash has the form --hash=sha256: and 64 digits from 0 to f")
    hashed = [requirement for requirement in requirements if requirement.hashed]
    if hashed:
        for requirement in requirements:
            if not requirement.hashed:
                problems.append(
                    f"{where} line {requirement.line}: {requirement.specification} has no hash, and other lines have: "
                    "hash all lines, or none (they are resolved and hashed then)"
                )
            elif not requirement.pinned:
                problems.append(
                    f"{where} line {requirement.line}: {requirement.specification} has a hash and no version: pin it"
                )
    return tuple(requirements), problems


_NOT_PINNED = (
    "a file or an address is not pinned by a version: put the wheel into a folder of pip's find-links, and name it "
    "with its version"
)


def _advice_for_option(line: str) -> str:
    option = re.split(r"[=\s]", line, maxsplit=1)[0]
    if option in ("-r", "--requirement", "-c", "--constraint"):
        return "put the lines of that file here: one file is what the image is made of"
    if option in ("-e", "--editable"):
        return "an editable installation is not pinned: put the code into --source, or name a wheel with its version"
    if option in ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--trusted-host", "--no-index"):
        return "put it into pip's own settings (pip.conf or PIP_... variables): they hold inside the build"
    return "options do not belong here"


def _logical_lines(text: str) -> Iterable[tuple[int, str]]:
    """Yield lines with their numbers, continued ones joined, without comments."""
    parts: list[str] = []
    start = 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        start = start if parts else number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            whole = " ".join(part for part in parts if part)
            if whole:
                yield start, whole
            parts = []
    if any(parts):
        yield start, " ".join(part for part in parts if part)


def conflicts(requirements: Iterable[Requirement], base: BaseImage, where: str) -> list[str]:
    """Return the requirements that the base image's own distributions do not fulfil; both versions are named.

    What the base has is never replaced: its torch is built for its CUDA, and others depend on it.
    """
    installed = {canonicalize_name(row.name): row.version for row in base.distributions}
    problems = []
    for requirement in requirements:
        specification = requirement.specification
        if not requirement.applies(base):
            continue
        version = installed.get(requirement.name)
        if version is not None and not specification.specifier.contains(version, prereleases=True):
            problems.append(
                f"{where} line {requirement.line}: {specification.name}{specification.specifier} is asked for, and "
                f"{base.reference} has {specification.name} {version}, which is not replaced"
            )
    return problems


def locked_versions(requirements: Iterable[Requirement], base: BaseImage) -> tuple[tuple[str, str], ...]:
    """Return name and version of each pinned requirement that holds in a base image, sorted."""
    return tuple(
        sorted(
            (requirement.name, next(iter(requirement.specification.specifier)).version)
            for requirement in requirements
            if requirement.applies(base)
        )
    )


def locked_hashes(requirements: str) -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Return the sha256 of every file that hash-locked requirements allow, by name and version."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for _, line in _logical_lines(requirements):
        specification = Specification(_ANY_HASH.sub("", line).strip())
        version = next(iter(specification.specifier)).version
        hashes = tuple(each.rpartition(":")[2] for each in _HASH.findall(line))
        found[canonicalize_name(specification.name), version] = hashes
    return found
