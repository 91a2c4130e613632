"""Requirements files as pip writes them: their lines become requirements, or problems. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Specification
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from trainworks.extend.reading.text import logical_lines
from trainworks.extend.requirements import ExtendedBase, GitRequirement, PackageRequirement

_HASH = re.compile(r"\s--hash[=\s]\s*sha256:[0-9a-f]{64}\b")
_ANY_HASH = re.compile(r"\s--hash[=\s]\s*\S+")


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
    for number, line in logical_lines(text):
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
