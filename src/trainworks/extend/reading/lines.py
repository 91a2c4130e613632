"""Requirements files as pip writes them: their lines become requirements, or problems. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Specification
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from trainworks.extend.reading.text import logical_lines, with_variables, without_credentials
from trainworks.extend.requirements import ExtendedBase, FolderRequirement, GitRequirement, PackageRequirement

_HASH = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Include:
    """A line ``-r FILE``, or ``-c FILE`` (``constraint``): ``place`` for messages, ``path`` as written."""

    place: str
    path: str
    constraint: bool


@dataclass(frozen=True, kw_only=True)
class OptionLine:
    """A line that changes where packages come from, or which.

    Attributes:
        place: File, line and text, for messages.
        name: pip's long name of the option.
        value: Its value; may have a password that a variable has.
        written: The same without that, for the digest of the inputs.
    """

    place: str
    name: str
    value: str = field(default="", repr=False)
    written: str = ""


@dataclass(frozen=True, kw_only=True)
class RequirementLines:
    """What one requirements file says, what a person should know of it, and what is wrong with it."""

    requirements: tuple[PackageRequirement, ...] = ()
    sources: tuple[GitRequirement, ...] = ()
    folders: tuple[FolderRequirement, ...] = ()
    includes: tuple[Include, ...] = ()
    options: tuple[OptionLine, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def read_requirements(text: str, where: str, environment: Mapping[str, str] | None = None) -> RequirementLines:
    """Read the text of one requirements file.

    Args:
        text: The file's content.
        where: Its name, for messages.
        environment: Variables that lines may name as ``${NAME}``.
    """
    found = _Lines()
    for number, raw in logical_lines(text):
        place = f"{where} line {number}: {without_credentials(raw)[:80]}"
        try:
            found.add(with_variables(raw, environment or {}), raw, place)
        except ValueError as error:
            found.problems.append(f"{place}: {error}")
    return found.lines()


def read_texts(texts: Iterable[tuple[str, str]]) -> RequirementLines:
    """Read requirements that stand in another file than pip's, each with its place there."""
    found = _Lines()
    for where, text in texts:
        place = f"{where}: {without_credentials(str(text))[:80]}"
        try:
            found.add_requirement(text, [], place)
        except (ValueError, TypeError) as error:
            found.problems.append(f"{place}: {error}")
    return found.lines()


_SHORT = {"-r": "--requirement", "-c": "--constraint", "-e": "--editable", "-i": "--index-url", "-f": "--find-links"}
_ADDRESSES = ("--index-url", "--extra-index-url", "--find-links")
_VALUED = ("--requirement", "--constraint", "--editable", *_ADDRESSES, "--trusted-host", "--no-binary", "--only-binary")
_FLAGS = ("--no-index", "--pre", "--prefer-binary", "--require-hashes")
_DIRECT = re.compile(
    r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?P<extras>\[[^\]]*\])?\s*@\s*)?"
    r"(?P<address>[a-z+]+://\S+?|[./~]\S*?|[^\s;@\[]+/[^\s;@\[]*|\S+\.(?:whl|zip|tar\.\w+))(?P<more>\[[^\]]*\])?"
    r"(?:\s+;\s*(?P<marker>.+))?"
)
_REFERENCE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
_ARCHIVE = re.compile(r".+\.(?:zip|tgz|tbz|txz|tar|tar\.\w+)", re.IGNORECASE)


class _Lines:
    """What was read so far."""

    def __init__(self) -> None:
        self.requirements: list[PackageRequirement] = []
        self.sources: list[GitRequirement] = []
        self.folders: list[FolderRequirement] = []
        self.includes: list[Include] = []
        self.options: list[OptionLine] = []
        self.notes: list[str] = []
        self.problems: list[str] = []

    def lines(self) -> RequirementLines:
        """Return what was read."""
        return RequirementLines(
            requirements=tuple(self.requirements),
            sources=tuple(self.sources),
            folders=tuple(self.folders),
            includes=tuple(self.includes),
            options=tuple(self.options),
            notes=tuple(self.notes),
            problems=tuple(self.problems),
        )

    def add(self, line: str, raw: str, place: str) -> None:
        """Add a line; ``raw`` has its variables by name. Raises ``ValueError`` for one that is wrong."""
        words = line.split(" ")
        # As pip splits it: what comes before the first option may have quotes of its own, in a marker.
        count = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
        wanted, options = " ".join(words[:count]).strip(), _options(" ".join(words[count:]))
        if wanted:
            other = next((name for name, _ in options if name != "--hash"), "")
            if other:
                raise ValueError(f"{other} cannot stand behind a requirement: pip reads --hash there")
            self.add_requirement(wanted, [value for _, value in options], place)
            return
        for name, value in options:
            if name in ("--requirement", "--constraint"):
                self.includes.append(Include(place=place, path=value, constraint=name == "--constraint"))
            elif name == "--editable":
                self.notes.append(f"{place}: installed as a wheel: an image has no code that changes")
                # pip takes a bare name for a folder here.
                is_path = "://" in value or value.startswith((".", "/", "~"))
                self.add_requirement(value if is_path else f"./{value}", [], place)
            elif name in _ADDRESSES:
                _check_credentials(value, raw)
                self._add_option(name, value, place)
            elif name in (*_VALUED, *_FLAGS):
                self._add_option(name, value, place)
            else:
                raise ValueError(f"{name} is not an option that extend knows in a requirements file")

    def _add_option(self, name: str, value: str, place: str) -> None:
        self.options.append(OptionLine(place=place, name=name, value=value, written=without_credentials(value)))

    def add_requirement(self, wanted: str, hashes: list[str], place: str) -> None:
        """Add a requirement without its options. Raises ``ValueError`` for one that is wrong."""
        if any(not _HASH.fullmatch(each) for each in hashes):
            raise ValueError("a hash has the form --hash=sha256: and 64 digits from 0 to f")
        digests = tuple(each.removeprefix("sha256:") for each in hashes)
        direct = _DIRECT.fullmatch(wanted)
        if direct is None:
            self.requirements.append(_named_requirement(wanted, digests, place))
            return
        address = direct["address"]
        scheme, _, rest = address.partition("://") if "://" in address else ("file", "", address)
        path = unquote(urlsplit(address).path if "://" in address else address.partition("#")[0])
        if scheme.startswith("git+"):
            self.sources.append(_git_requirement(direct, place))
        elif scheme not in ("file", "http", "https"):
            raise ValueError(f"{scheme}:// is not supported: git repositories, web addresses and files are")
        elif scheme != "file" and urlsplit(address).username is not None:
            raise ValueError(_CREDENTIALS)
        elif path.endswith(".whl"):
            self.requirements.append(_wheel_requirement(direct, path, digests, place))
        elif scheme != "file" or _ARCHIVE.fullmatch(path):
            raise ValueError("this is not a wheel: make one with `pip wheel --no-deps`, or name the git repository")
        else:
            self.folders.append(_folder_requirement(direct, rest if scheme == "file" else address, place))


_CREDENTIALS = "the address has a password or token in it: put it into ~/.netrc, or into pip's settings for an index"


def _check_credentials(value: str, raw: str) -> None:
    """Refuse an address of an index with a password, unless a variable has it: the file itself goes into images."""
    if missing := re.search(r"\$\{([A-Z0-9_]+)\}", value):
        raise ValueError(f"the variable {missing[1]} is not set")
    for login in re.findall(r"://([^/@\s]*)@", raw):
        if not re.fullmatch(r"(?:[^:]*:)?\$\{[A-Z0-9_]+\}", login):
            raise ValueError(f"{_CREDENTIALS}, or name a variable with it: ${{NAME}}")


def _options(text: str) -> list[tuple[str, str]]:
    """Return the options of a line with their values, by pip's long names; raises ``ValueError``."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"the quotes do not fit together ({error})") from None
    found: list[tuple[str, str]] = []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            raise ValueError(f"{word!r} belongs to no option: put a value with spaces into quotes")
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            name, value, equals = name[:2], f"{name[2:]}{equals}{value}", name[2:]
        name = _SHORT.get(name, name)
        if name in (*_VALUED, "--hash") and not equals:
            if not words:
                raise ValueError(f"{name} needs a value")
            value = words.pop(0)
        found.append((name, value))
    return found


def _named_requirement(wanted: str, hashes: tuple[str, ...], place: str) -> PackageRequirement:
    try:
        specification = Specification(wanted)
    except InvalidRequirement:
        raise ValueError("this is not a requirement such as pandas>=2") from None
    text = f"{wanted}{''.join(f' --hash=sha256:{each}' for each in hashes)}"
    return PackageRequirement(place=place, specification=specification, text=text, hashed=bool(hashes), hashes=hashes)


def _wheel_requirement(direct: re.Match[str], path: str, hashes: tuple[str, ...], place: str) -> PackageRequirement:
    file = path.rsplit("/", 1)[-1]
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
    address = direct["address"]
    # A hash in the address is checked, and makes no file of hashes: pip, too, asks for none on the other lines then.
    said = parse_qs(urlsplit(address).fragment).get("sha256", []) if "://" in address else []
    return PackageRequirement(
        place=place,
        specification=specification,
        text=text,
        hashed=bool(hashes),
        hashes=hashes or tuple(said),
        wheel=address,
    )


def _folder_requirement(direct: re.Match[str], path: str, place: str) -> FolderRequirement:
    marker = direct["marker"] or ""
    if marker:
        Specification(f"name ; {marker}")
    return FolderRequirement(
        place=place,
        path=unquote(path.partition("#")[0]) if "://" in direct["address"] else path,
        name=canonicalize_name(direct["name"] or ""),
        extras=direct["extras"] or direct["more"] or "",
        marker=marker,
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


def check_hashes(
    requirements: Iterable[PackageRequirement],
    sources: Iterable[GitRequirement] = (),
    folders: Iterable[FolderRequirement] = (),
    *,
    all_hashed: bool = False,
) -> list[str]:
    """Return what is wrong where some requirements, or ``all_hashed``, have hashes: all have them, with a version."""
    requirements = tuple(requirements)
    if not all_hashed and not any(requirement.hashed for requirement in requirements):
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
    problems += [f"{folder.place}: other lines have hashes, and a folder has none" for folder in folders]
    return problems + [
        f"{source.place}: other lines have hashes: name the commit, @ and its 40 digits"
        for source in sources
        if not re.fullmatch(r"[0-9a-f]{40}", source.reference)
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
