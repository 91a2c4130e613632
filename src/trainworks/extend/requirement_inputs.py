"""What an extension's requirements need of this machine: files, folders,
repositories, variables. uv reads the rest.

A file that a line names is read at once, and the line names its copy. A folder or a git repository
becomes a source that is built in the base. Everything else goes on as it is: lines, and whole files
of projects, locks and scripts.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from packaging.markers import InvalidMarker, Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainworks.extend.requirements import GitRequirement
from trainworks.extend.user_code import SourceTree, read_source
from trainworks.facts.rows import SourceFile
from trainworks.host.downloads import without_credentials

INPUTS = "/run/inputs"
"""Stands in lines for the folder that gets the files of ``Wanted``."""

PROJECT = "pyproject.toml"
UV_LOCK = "uv.lock"
PYLOCK = "pylock.toml"
OF_OTHER_TOOLS = {
    "environment.yml": (
        "conda's: `conda run -n NAME python -m pip list --format=freeze > requirements.txt`"
    ),
    "Pipfile": "pipenv's: `pipenv requirements > requirements.txt`",
    "Pipfile.lock": "pipenv's: `pipenv requirements > requirements.txt`",
    "poetry.lock": "Poetry's: `poetry export -o requirements.txt` (plug-in poetry-plugin-export)",
}
"""Files of other tools, with what writes a file that is read."""

_ARCHIVE = re.compile(r"\S+?\.(?:whl|zip|tgz|tar\.\w+)(?=[\s;#\[]|$)")
_DIRECT = re.compile(
    r"(?:-e\s+|--editable[\s=]+)?(?:(?P<name>[A-Za-z0-9][\w.-]*)\s*(?P<extras>\[[^\]]*\])?\s*@\s*)?"
    r"(?P<address>(?:git\+\S+?|file:\S+?|[./~](?:[^;\[]*[^;\[\s])?"
    r"|[^\s;@\[:]+/[^\s;@\[:]*|[^\s:/]+\.(?:whl|zip|tgz|tar\.\w+)))"
    r"(?P<more>\[[^\]]*\])?(?P<hashes>(?:\s+--hash[=\s]\S+)*)(?:\s*;\s*(?P<marker>.+))?"
)
_REFERENCE = re.compile(r"[A-Za-z0-9_][\w./+-]*")
_SECRET_VALUE = re.compile(
    r"(?i)(?:^|&)[^=&]*(?:token|key|secret|sig|signature|passw|pwd|auth|credential)[^=&]*=([^&]+)"
)
"""A value of a query that gives access by itself."""
_HAS_LOGIN = (
    "the address has a password or token in it: put it into ~/.netrc, or into pip's settings for an"
    " index, or name a variable with it: ${NAME}"
)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A project in a folder of this machine: how it was named, where it is, and
    which of its extras are wanted.
    """

    origin: str
    folder: Path
    tree: SourceTree
    extras: str = ""
    marker: str = ""


@dataclass(kw_only=True)
class Wanted:
    """What requirements ask for.

    Attributes:
        lines: Of one requirements file, as they are resolved.
        file: A project, a lock or a script, which uv reads as a whole; ``None`` for none.
        chosen: Words of uv: the extras and groups of that file, or groups of another project.
        read: What decides what such files mean: name to text.
        constraints: Of one file of constraints.
        files: What the lines name, below ``INPUTS``.
        repositories: What is built from git.
        folders: What is built from folders.
        links: Folders of this machine with wheels.
        built_whole: Names that a project tells uv to build with everything that
            is installed in sight.
        virtual: A ``uv.lock`` says that its project is not installed.
        variables: Names that the lines have as ``${NAME}``.
        notes: What a person should know.
        problems: Why nothing can be made of it.
    """

    lines: list[str] = field(default_factory=list)
    file: Path | None = None
    chosen: list[str] = field(default_factory=list)
    read: dict[str, str] = field(default_factory=dict)
    constraints: list[str] = field(default_factory=list)
    files: dict[str, SourceFile] = field(default_factory=dict)
    repositories: list[GitRequirement] = field(default_factory=list)
    folders: list[Folder] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)
    built_whole: list[str] = field(default_factory=list)
    virtual: bool = False
    variables: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def hashed(self) -> bool:
        """Whether everything that is installed is named: with hashes, or in a lock."""
        return any("--hash" in line for line in self.lines) or (
            self.file is not None and is_lock(self.file)
        )

    @property
    def words(self) -> list[str]:
        """Words of uv for what it reads itself."""
        return [*(("-r", str(self.file.absolute())) if self.file is not None else ()), *self.chosen]

    def __bool__(self) -> bool:
        """Say whether anything is asked for."""
        return bool(self.lines or self.words or self.repositories or self.folders)


def is_lock(file: Path) -> bool:
    """Whether a file is a lock of uv's, or one in the common form (PEP 751)."""
    return file.name == UV_LOCK or bool(re.fullmatch(r"pylock(\.[^.]+)?\.toml", file.name))


def is_for_uv(file: Path) -> bool:
    """Whether uv reads a file as a whole, with extras and groups: a project, a
    lock, or a script.
    """
    return file.name == PROJECT or file.suffix == ".py" or is_lock(file)


def read_wanted(
    file: Path | None,
    environment: Mapping[str, str],
    *,
    extras: Sequence[str] = (),
    groups: Sequence[str] = (),
    project: Path | None = None,
    forbidden: tuple[str, ...] = (),
) -> Wanted:
    """Read a file of requirements or a lock.

    Args:
        file: The file; ``None`` for none.
        environment: The process's.
        extras: Extras of the project, or of the lock, that are wanted.
        groups: The same of dependency groups.
        project: The project file of the code, which has the groups where ``file`` is a plain one.
        forbidden: Texts of this machine that must not be in an image.
    """
    wanted = Wanted()
    try:
        if file is not None and is_for_uv(file):
            _give_to_uv(file, extras, groups, wanted)
        elif file is not None:
            _refuse_others(file)
            for place, line, limits in _of_text(file, frozenset(), constraint=False):
                if not _is_safe(line, place, wanted, environment):
                    continue
                if limits:
                    wanted.constraints.append(line)
                else:
                    _add(line, place, file.parent, wanted, forbidden)
        if groups and wanted.file is None:
            if project is None:
                raise ValueError(f"--group {groups[0]}: there is no {PROJECT} in --source")
            wanted.read[PROJECT] = _text_for_uv(project, wanted)
            wanted.chosen += [
                word for name in groups for word in ("--group", f"{project.absolute()}:{name}")
            ]
    except ValueError as error:
        wanted.problems.append(str(error))
    return wanted


def _refuse_others(file: Path) -> None:
    """Raise ValueError for a file of another tool, which uv does not read."""
    name = "environment.yml" if file.suffix in (".yml", ".yaml") else file.name
    if name in OF_OTHER_TOOLS:
        raise ValueError(f"{file} is {OF_OTHER_TOOLS[name]} writes what pip reads")


def _give_to_uv(file: Path, extras: Sequence[str], groups: Sequence[str], wanted: Wanted) -> None:
    """Note a project, a lock or a script. Raises ValueError for what uv does not read."""
    wanted.read[file.name] = _text_for_uv(file, wanted)
    if file.suffix == ".toml" or file.name == UV_LOCK:
        content = _toml(file)
        own = content.get("tool", {}).get("uv", {})
        wanted.built_whole += map(str, own.get("no-build-isolation-package", ()))
        if (
            file.name == PROJECT
            and "project" not in content
            and "poetry" in content.get("tool", {})
        ):
            raise ValueError(f"{file} is {OF_OTHER_TOOLS['poetry.lock']} writes what pip reads")
        if file.name == UV_LOCK:
            itself = [
                row for row in content.get("package", ()) if "." in row.get("source", {}).values()
            ]
            wanted.virtual = any("virtual" in row["source"] for row in itself)
    for beside in (file.with_name(f"{file.name}.lock"), file.with_name("uv.toml")):
        if beside.is_file():
            wanted.read[beside.name] = _text_for_uv(beside, wanted)
    wanted.file = file
    wanted.chosen += [word for name in extras for word in ("--extra", name)]
    wanted.chosen += [word for name in groups for word in ("--group", name)]


def _text_for_uv(file: Path, wanted: Wanted) -> str:
    """Return the text of a file that uv reads; a login in it is a problem."""
    text = _read(file)
    for number, line in enumerate(text.splitlines(), start=1):
        if _login_in(line):
            wanted.problems.append(f"{file} line {number}: {_HAS_LOGIN}")
    return text


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
        return content.decode(
            "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        )
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except UnicodeError:
        raise ValueError(f"{file} is not UTF-8: `iconv -f LATIN1 -t UTF-8` converts it") from None


def _of_text(
    file: Path, seen: frozenset[Path], *, constraint: bool
) -> Iterator[tuple[str, str, bool]]:
    """Yield place and text of the lines of a requirements file and of those that it includes.

    And which only limit.
    """
    text = re.sub(r"\\\r?\n", lambda _: " \0", _read(file))
    number = 1
    for raw in text.splitlines():
        line = re.sub(r"(^|\s+)#.*$", "", raw.replace("\0", "")).strip()
        place = f"{file} line {number}"
        number += 1 + raw.count("\0")
        include = re.fullmatch(r"(-r|--requirement|-c|--constraint)[\s=]*(\S.*)", line)
        if include and "://" not in include[2]:
            other = file.parent / include[2].strip("\"'")
            limits = include[1].strip("-").startswith("c")
            if other.resolve() not in seen | {file.resolve()}:
                yield from _of_text(other, seen | {file.resolve()}, constraint=limits)
        elif line:
            yield place, line, constraint


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read(file))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: this is not TOML: {error}") from error


def _login_in(line: str) -> bool:
    """Whether an address in a line has a password or a token, and not the name
    of a variable in its place.

    It may be before the host, or a value of the query, as presigned addresses have it.
    """
    logins = re.findall(r"://([^/@\s\"']*:?[^/@\s\"']*)@", line)
    queries = re.findall(r"://[^\s\"'?#]*\?([^\s\"'#]*)", line)
    values = _SECRET_VALUE.findall("&".join(queries))
    return any(
        not re.fullmatch(r"(?:[^:]*:)?\$\{[A-Z0-9_]+\}|git", login) for login in (*logins, *values)
    )


def _is_safe(line: str, place: str, wanted: Wanted, environment: Mapping[str, str]) -> bool:
    """Whether a line has no secret, and its variables are set; else that is a problem."""
    variables = re.findall(r"\$\{([A-Z0-9_]+)\}", line)
    shown = _shown(line, place)
    if missing := [name for name in variables if not environment.get(name)]:
        wanted.problems.append(f"{shown}: the variable {missing[0]} is not set")
        return False
    wanted.variables.update(variables)
    if _login_in(line):
        wanted.problems.append(f"{shown}: {_HAS_LOGIN}")
        return False
    return True


def _shown(line: str, place: str) -> str:
    """Return a line as messages show it: without what may be a secret."""
    return f"{place}: {re.sub(r'[?][^#;, ]*', '?...', without_credentials(line))[:80]}"


def _add(line: str, place: str, folder: Path, wanted: Wanted, forbidden: tuple[str, ...]) -> None:
    """Add a line, as it is resolved."""
    shown = _shown(line, place)
    links = re.fullmatch(r"(?:-f|--find-links)[\s=]*(\S.*)", line)
    if links and "://" not in links[1]:
        wanted.links.append(folder / links[1])
        return
    direct = _DIRECT.fullmatch(line)
    if direct is None:
        wanted.lines.append(f"{line}  #@ {place}")
        return
    address, extras, marker = (
        direct["address"],
        direct["extras"] or direct["more"] or "",
        direct["marker"] or "",
    )
    try:
        if marker:
            Marker(marker)
        if address.startswith("git+"):
            wanted.repositories.append(_git(direct, shown, marker))
            return
    except (InvalidMarker, ValueError) as error:
        wanted.problems.append(f"{shown}: {error}")
        return
    path = (
        Path(unquote(urlsplit(address).path))
        if address.startswith("file:")
        else folder / Path(address).expanduser()
    )
    if not path.exists() and Path(address).exists():
        path = Path(address)  # pip's own reading
    if path.is_dir():
        wanted.folders.append(
            Folder(
                origin=address,
                folder=path,
                tree=read_source(path, name=shown, forbidden=forbidden),
                extras=extras,
                marker=marker,
            )
        )
        wanted.problems += wanted.folders[-1].tree.problems
    elif path.is_file() and _ARCHIVE.fullmatch(path.name):
        name = f"files/{path.name}"
        wanted.files[name] = SourceFile(path=name, content=path.read_bytes())
        wanted.lines.append(
            f"{INPUTS}/{name}{extras}{direct['hashes'] or ''}{f' ; {marker}' if marker else ''}"
            f"  #@ {place}"
        )
    elif re.match(r"/(?:croot|tmp/build|.*/conda|opt/conda)", str(path)):
        wanted.lines.append(f"{line}  #@ {place}")  # the installer knows conda's
    else:
        wanted.problems.append(f"{shown}: {path} is not a folder, a wheel or a source archive")


def _git(direct: re.Match[str], place: str, marker: str) -> GitRequirement:
    parts = urlsplit(direct["address"].removeprefix("git+"))
    if parts.scheme not in ("https", "http", "ssh", "git", "file"):
        raise ValueError("a git address begins with git+https://, git+ssh:// or git+file://")
    if parts.password or (parts.username and parts.scheme != "ssh"):
        raise ValueError(
            "the address has a password or token in it:"
            " give it to git (credential helper, ~/.netrc)"
        )
    path, at, reference = parts.path.rpartition("@") if "@" in parts.path else (parts.path, "", "")
    if at and (not _REFERENCE.fullmatch(reference) or ".." in reference):
        raise ValueError(f"{reference!r} is not the name of a branch, a tag or a commit")
    fragment = parse_qs(parts.fragment)
    subdirectory = fragment.get("subdirectory", [""])[0]
    if subdirectory and (not _REFERENCE.fullmatch(subdirectory) or ".." in subdirectory):
        raise ValueError(f"{subdirectory!r} is not a folder of the repository")
    egg = Requirement(fragment["egg"][0]) if "egg" in fragment else None
    extras = f"[{','.join(sorted(egg.extras))}]" if egg and egg.extras else ""
    return GitRequirement(
        place=place,
        url=parts._replace(path=path, fragment="").geturl(),
        reference=reference,
        subdirectory=subdirectory,
        name=canonicalize_name(direct["name"] or (egg.name if egg else "")),
        extras=direct["extras"] or direct["more"] or extras,
        marker=marker,
    )
