"""Requirements files, and the base image that they have to fit: what it has is never replaced. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Specification
from packaging.utils import InvalidWheelFilename, NormalizedName, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from trainworks.facts.rows import MACHINES, Architecture

_HASH = re.compile(r"\s--hash[=\s]\s*sha256:[0-9a-f]{64}\b")
_ANY_HASH = re.compile(r"\s--hash[=\s]\s*\S+")


@dataclass(frozen=True, kw_only=True)
class BaseDistribution:
    """A Python distribution that the base image has; ``extras`` are the requirements that only an extra asks for."""

    name: str
    version: str
    extras: tuple[str, ...] = ()


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

    @property
    def apt(self) -> bool:
        """Whether Debian's package manager installs packages in it."""
        return self.distribution in ("debian", "ubuntu") and bool(self.suite)

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
        wheel: The wheel that it names, as written: a path or a ``file://`` address; else ``""``.
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


@dataclass(frozen=True, kw_only=True)
class Include:
    """A line ``-r FILE``, or ``-c FILE`` (``constraint``): ``place`` for messages, ``path`` as written."""

    place: str
    path: str
    constraint: bool


@dataclass(frozen=True, kw_only=True)
class RequirementLines:
    """What one requirements file says, and what is wrong with it."""

    requirements: tuple[PackageRequirement, ...] = ()
    sources: tuple[GitRequirement, ...] = ()
    includes: tuple[Include, ...] = ()
    problems: tuple[str, ...] = ()


def read_requirements(text: str, where: str) -> RequirementLines:
    """Read the text of one requirements file.

    Args:
        text: The file's content.
        where: Its name, for messages.
    """
    requirements: list[PackageRequirement] = []
    sources: list[GitRequirement] = []
    includes: list[Include] = []
    problems: list[str] = []
    for number, line in _logical_lines(text):
        place = f"{where} line {number}: {line[:80]}"
        try:
            if included := _INCLUDE.fullmatch(line):
                path = included["path"].strip("'\"")
                includes.append(Include(place=place, path=path, constraint=included["option"] in _CONSTRAINT))
            elif line.startswith("-"):
                raise ValueError(_advice_for_option(line))
            elif direct := _DIRECT.fullmatch(_ANY_HASH.sub("", line).strip()):
                if direct["address"].startswith("git+"):
                    sources.append(_git_requirement(direct, place))
                else:
                    requirements.append(_wheel_requirement(direct, line, place))
            else:
                requirements.append(_named_requirement(line, place))
        except ValueError as error:
            problems.append(f"{place}: {error}")
    return RequirementLines(
        requirements=tuple(requirements), sources=tuple(sources), includes=tuple(includes), problems=tuple(problems)
    )


_CONSTRAINT = ("-c", "--constraint")
_INCLUDE = re.compile(r"(?P<option>-r|--requirement|-c|--constraint)(?:\s*=\s*|\s+|(?<=-[rc]))(?P<path>[^\s=].*)")
_DIRECT = re.compile(
    r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?P<extras>\[[^\]]*\])?\s*@\s*)?"
    r"(?P<address>[a-z+]+://\S+?|[./~]\S*?|\S+\.(?:whl|zip|tar\.gz))(?P<more>\[[^\]]*\])?(?:\s+;\s*(?P<marker>.+))?"
)
_REFERENCE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")


def _named_requirement(line: str, place: str) -> PackageRequirement:
    try:
        specification = Specification(_ANY_HASH.sub("", line).strip())
    except InvalidRequirement:
        raise ValueError("this is not a requirement such as pandas>=2") from None
    hashes = _hashes(line)
    return PackageRequirement(place=place, specification=specification, text=line, hashed=bool(hashes), hashes=hashes)


def _wheel_requirement(direct: re.Match[str], line: str, place: str) -> PackageRequirement:
    address = direct["address"]
    scheme = address.partition("://")[0] if "://" in address else "file"
    if scheme != "file":
        raise ValueError("a web address is not supported: download the wheel and name the file, such as ./dist/x.whl")
    file = address.partition("#")[0].rsplit("/", 1)[-1]
    if not file.endswith(".whl"):
        raise ValueError(
            "only wheels are installed from files: make one with `pip wheel --no-deps`, or put code into --source"
        )
    try:
        name, version, _, _ = parse_wheel_filename(file)
    except InvalidWheelFilename:
        raise ValueError(f"{file} does not have the name of a wheel") from None
    if direct["name"] and canonicalize_name(direct["name"]) != name:
        raise ValueError(f"{file} is a wheel of {name}, not of {direct['name']}")
    marker = f" ; {direct['marker']}" if direct["marker"] else ""
    text = f"{name}{direct['extras'] or direct['more'] or ''}=={version}{marker}"
    try:
        specification = Specification(text)
    except InvalidRequirement:
        raise ValueError("this is not a requirement such as ./dist/x.whl") from None
    hashes = _hashes(line)
    return PackageRequirement(
        place=place, specification=specification, text=text, hashed=bool(hashes), hashes=hashes, wheel=address
    )


def _git_requirement(direct: re.Match[str], place: str) -> GitRequirement:
    parts = urlsplit(direct["address"].removeprefix("git+"))
    if parts.scheme not in ("https", "http", "ssh", "git", "file"):
        raise ValueError("a git address begins with git+https://, git+ssh:// or git+file://")
    if parts.password or (parts.username and parts.scheme != "ssh"):
        raise ValueError("the address has a password or token in it: give it to git (credential helper, ~/.netrc)")
    path, at, reference = parts.path.rpartition("@") if "@" in parts.path else (parts.path, "", "")
    if at and (not _REFERENCE.fullmatch(reference) or ".." in reference):
        raise ValueError(f"{reference!r} is not the name of a branch, a tag or a commit")
    fragment = parse_qs(parts.fragment)
    subdirectory = fragment.get("subdirectory", [""])[0]
    if subdirectory and (not _REFERENCE.fullmatch(subdirectory) or ".." in subdirectory):
        raise ValueError(f"{subdirectory!r} is not a folder of the repository")
    egg = Specification(fragment["egg"][0]) if "egg" in fragment else None
    extras = f"[{','.join(sorted(egg.extras))}]" if egg and egg.extras else ""
    marker = direct["marker"] or ""
    if marker:
        Specification(f"name ; {marker}")
    return GitRequirement(
        place=place,
        url=parts._replace(path=path, fragment="").geturl(),
        reference=reference,
        subdirectory=subdirectory,
        name=canonicalize_name(direct["name"] or (egg.name if egg else "")),
        extras=direct["extras"] or extras,
        marker=marker,
    )


def _hashes(line: str) -> tuple[str, ...]:
    found = tuple(each.rpartition(":")[2] for each in _HASH.findall(line))
    if _ANY_HASH.search(line) and not found:
        raise ValueError("a hash has the form --hash=sha256: and 64 digits from 0 to f")
    return found


def check_hashes(requirements: Iterable[PackageRequirement], sources: Iterable[GitRequirement] = ()) -> list[str]:
    """Return what is wrong where some requirements have hashes: all have them then, with a version."""
    requirements = tuple(requirements)
    if not any(requirement.hashed for requirement in requirements):
        return []
    problems = []
    for requirement in requirements:
        if not requirement.hashed:
            problems.append(
                f"{requirement.place}: no hash, but other lines have hashes: hash all lines, or none (they are "
                "resolved and hashed then)"
            )
        elif not requirement.pinned:
            problems.append(f"{requirement.place}: a hash without a version: pin the version")
    return problems + [
        f"{source.place}: other lines have hashes: name the commit, @ and its 40 digits"
        for source in sources
        if not re.fullmatch(r"[0-9a-f]{40}", source.reference)
    ]


def _advice_for_option(line: str) -> str:
    option = re.split(r"[=\s]", line, maxsplit=1)[0]
    if option in ("-e", "--editable"):
        return "an editable installation is not pinned: leave out -e for git, and put a project of yours into --source"
    if option in ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--trusted-host", "--no-index"):
        return "put it into pip's own settings (pip.conf or PIP_... variables): they hold inside the build"
    return "options are not allowed in a requirements file of extend"


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


def conflicts(requirements: Iterable[PackageRequirement], base: ExtendedBase) -> list[str]:
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
        if version is None:
            continue
        if requirement.wheel or not specification.specifier.contains(version, prereleases=True):
            problems.append(
                f"{requirement.place}: {base.reference} has {specification.name} {version}, which is not replaced: ask "
                "for that version, or for none"
            )
    return problems


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


def locked_versions(requirements: Iterable[PackageRequirement], base: ExtendedBase) -> tuple[tuple[str, str], ...]:
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
    return {
        (row.name, next(iter(row.specification.specifier)).version): row.hashes
        for row in read_requirements(requirements, "").requirements
    }
