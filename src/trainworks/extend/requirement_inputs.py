"""Reads an extension's requirements: the files, folders, repositories and variables that they name.

A file that a line names is read at once, and the line then names its copy. A folder or a git
repository becomes a source that is built in the base. uv reads everything else itself: lines, and
whole files of projects, locks and scripts.
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
from trainworks.host.downloads import remove_credentials

INPUTS = "/run/inputs"
"""In lines: the folder that gets ``RequestedRequirements.files``."""

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
"""Files of other tools, with the command that writes a file for pip."""

_ARCHIVE = re.compile(r"\S+?\.(?:whl|zip|tgz|tar\.\w+)(?=[\s;#\[]|$)")
_DIRECT = re.compile(
    r"(?:-e\s+|--editable[\s=]+)?(?:(?P<name>[A-Za-z0-9][\w.-]*)\s*(?P<extras>\[[^\]]*\])?\s*@\s*)?"
    r"(?P<address>(?:git\+\S+?|file:\S+?|[./~](?:[^;\[]*[^;\[\s])?"
    r"|[^\s;@\[:]+/[^\s;@\[:]*|[^\s:/]+\.(?:whl|zip|tgz|tar\.\w+)))"
    r"(?P<more>\[[^\]]*\])?(?P<hashes>(?:\s+--hash[=\s]\S+)*)(?:\s*;\s*(?P<marker>.+))?"
)
_REFERENCE = re.compile(r"[A-Za-z0-9_][\w./+-]*")
_SECRET_VALUE = re.compile(
    r"""(?ix)
    (?:^|[&;])
    (?:
        [^=&;]*(?:token|key|secret|sig|passw|pwd|auth|credential|bearer|session|hmac)[^=&;]*
        # Short words are the whole name, or a part of it: ``pat``, not ``path``.
        |(?:[^=&;]*[-_.])?(?:pass|pw|pat|jwt|sas)(?:[-_.][^=&;]*)?
    )
    =([^&;]+)
    """
)
"""A value of a query that gives access without a login."""
_HAS_LOGIN = (
    "the address has a password or token in it: put it into ~/.netrc, or into pip's settings for an"
    " index, or name a variable with it: ${NAME}"
)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A project in a folder of this machine, which a requirement names.

    Attributes:
        origin: The path as it was written.
        folder: The folder.
        tree: The files of the folder.
        extras: The extras in the requirement, such as ``[dev,test]``.
        marker: The environment marker of the requirement.
    """

    origin: str
    folder: Path
    tree: SourceTree
    extras: str = ""
    marker: str = ""


@dataclass(frozen=True, kw_only=True)
class OptionalDependencies:
    """Parts of a project's dependencies that are installed only when they are named.

    Attributes:
        extras: Extras of the project, or of the lock.
        groups: Dependency groups of the project, or of the lock.
    """

    extras: Sequence[str] = ()
    groups: Sequence[str] = ()


NOTHING_OPTIONAL = OptionalDependencies()


@dataclass(kw_only=True)
class RequestedRequirements:
    """The requirements of an extension.

    Attributes:
        lines: Lines of a requirements file, for uv.
        file: A project, a lock or a script, which uv reads as a whole; ``None`` for none.
        chosen: Words of uv: the extras and groups of that file, or groups of another project.
        read: Texts of the files that uv reads, by name: the lock depends on them.
        constraints: Lines of constraints.
        files: Wheels and archives that the lines name, by their path below ``INPUTS``.
        repositories: Git repositories that are built.
        folders: Folders that are built.
        links: Folders of this machine with wheels.
        built_whole: Names that a project tells uv to build without build isolation.
        virtual: Whether a ``uv.lock`` says that its project is not installed.
        variables: Names of variables in the lines: ``${NAME}``.
        notes: Notes for the user.
        problems: Reasons to refuse the requirements.
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
        """Whether all packages are named: with hashes, or in a lock."""
        if self.file is not None and is_lock(self.file):
            return True
        return any("--hash" in line for line in self.lines)

    @property
    def words(self) -> list[str]:
        """Words of uv for the file that uv reads itself."""
        if self.file is None:
            return list(self.chosen)
        return ["-r", str(self.file.absolute()), *self.chosen]

    def __bool__(self) -> bool:
        """Return whether there is a requirement."""
        return bool(self.lines or self.words or self.repositories or self.folders)


def is_lock(file: Path) -> bool:
    """Return whether a file is a lock of uv's, or one in the common form (PEP 751)."""
    return file.name == UV_LOCK or bool(re.fullmatch(r"pylock(\.[^.]+)?\.toml", file.name))


def is_for_uv(file: Path) -> bool:
    """Return whether uv reads a file as a whole: a project, a lock, or a script."""
    return file.name == PROJECT or file.suffix == ".py" or is_lock(file)


def read_requirements(
    file: Path | None,
    environment: Mapping[str, str],
    *,
    optional: OptionalDependencies = NOTHING_OPTIONAL,
    project: Path | None = None,
    forbidden: tuple[str, ...] = (),
) -> RequestedRequirements:
    """Read a file of requirements or a lock, and everything that it names.

    Nothing is raised for malformed requirements: they are in ``problems``.

    Args:
        file: The file; ``None`` for none.
        environment: The process's environment.
        optional: The extras and groups that are installed, too.
        project: The project file of the code, which has the groups where ``file`` is a plain one.
        forbidden: Texts of this machine that must not be in an image.
    """
    requested = RequestedRequirements()
    groups = optional.groups
    try:
        if file is not None and is_for_uv(file):
            _give_to_uv(file, optional, requested)
        elif file is not None:
            _refuse_others(file)
            _read_lines(file, requested, environment, forbidden)
        if groups and requested.file is None:
            if project is None:
                raise ValueError(f"--group {groups[0]}: there is no {PROJECT} in --source")
            requested.read[PROJECT] = _text_for_uv(project, requested)
            for name in groups:
                requested.chosen += ["--group", f"{project.absolute()}:{name}"]
    except ValueError as error:
        requested.problems.append(str(error))
    return requested


def _read_lines(
    file: Path,
    requested: RequestedRequirements,
    environment: Mapping[str, str],
    forbidden: tuple[str, ...],
) -> None:
    """Add the lines of a requirements file to ``requested``, with the files that they name."""
    for line in _of_text(file, frozenset(), constraint=False):
        if not _is_safe(line, requested, environment):
            continue
        if line.is_constraint:
            requested.constraints.append(line.text)
        else:
            _add(line, file.parent, requested, forbidden)


def _refuse_others(file: Path) -> None:
    """Raise ValueError for a file of another tool, which uv does not read."""
    name = "environment.yml" if file.suffix in (".yml", ".yaml") else file.name
    if name in OF_OTHER_TOOLS:
        raise ValueError(f"{file} is {OF_OTHER_TOOLS[name]} writes what pip reads")


def _give_to_uv(
    file: Path, optional: OptionalDependencies, requested: RequestedRequirements
) -> None:
    """Note a project, a lock or a script. Raises ValueError for a file that uv cannot read."""
    requested.read[file.name] = _text_for_uv(file, requested)
    if file.suffix == ".toml" or file.name == UV_LOCK:
        _read_project(file, requested)
    for settings_file in (file.with_name(f"{file.name}.lock"), file.with_name("uv.toml")):
        if settings_file.is_file():
            requested.read[settings_file.name] = _text_for_uv(settings_file, requested)
    requested.file = file
    for name in optional.extras:
        requested.chosen += ["--extra", name]
    for name in optional.groups:
        requested.chosen += ["--group", name]


def _read_project(file: Path, requested: RequestedRequirements) -> None:
    """Read the settings of a project or a lock that concern its build into ``requested``.

    Raises:
        ValueError: The file is not TOML, or is of another tool.
    """
    content = _toml(file)
    tools = content.get("tool", {})
    isolation = tools.get("uv", {}).get("no-build-isolation-package", ())
    requested.built_whole += [str(name) for name in isolation]
    if file.name == PROJECT and "project" not in content and "poetry" in tools:
        raise ValueError(f"{file} is {OF_OTHER_TOOLS['poetry.lock']} writes what pip reads")
    if file.name == UV_LOCK:
        for row in content.get("package", ()):
            source = row.get("source", {})
            # The path "." is the project of the lock itself.
            if "." in source.values() and "virtual" in source:
                requested.virtual = True


def _text_for_uv(file: Path, requested: RequestedRequirements) -> str:
    """Return the text of a file that uv reads; a login in the file is a problem."""
    text = _read(file)
    for number, line in enumerate(text.splitlines(), start=1):
        if _login_in(line):
            requested.problems.append(f"{file} line {number}: {_HAS_LOGIN}")
    return text


def _read(file: Path) -> str:
    """Return the text of a UTF-8 file, or of a UTF-16 file with a byte order mark.

    Raises:
        ValueError: The file cannot be read, or is neither.
    """
    try:
        content = file.read_bytes()
        is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        return content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except UnicodeError:
        raise ValueError(f"{file} is not UTF-8: `iconv -f LATIN1 -t UTF-8` converts it") from None


@dataclass(frozen=True)
class _Line:
    """A line of a requirements file.

    Attributes:
        place: File and number, such as ``requirements.txt line 3``.
        text: The line without its comment.
        is_constraint: Whether the line only limits a version.
    """

    place: str
    text: str
    is_constraint: bool

    @property
    def shown(self) -> str:
        """The line for messages, without possible secrets."""
        text = re.sub(r"[?][^#\s]*", "?...", remove_credentials(self.text))
        return f"{self.place}: {text[:80]}"

    @property
    def noted(self) -> str:
        """The line with its place, which the installer repeats in messages."""
        return f"{self.text}  #@ {self.place}"


def _of_text(file: Path, seen: frozenset[Path], *, constraint: bool) -> Iterator[_Line]:
    """Yield the lines of a requirements file and of the files that it includes.

    Args:
        file: The file.
        seen: The files that include this one, which are not read again.
        constraint: Whether the lines only limit versions.

    Raises:
        ValueError: A file cannot be read.
    """
    seen |= {file.resolve()}
    # NUL marks a continued line, so that later lines keep their numbers.
    text = re.sub(r"\\\r?\n", lambda _: " \0", _read(file))
    number = 1
    for raw in text.splitlines():
        line = re.sub(r"(^|\s+)#.*$", "", raw.replace("\0", "")).strip()
        place = f"{file} line {number}"
        number += 1 + raw.count("\0")
        include = re.fullmatch(r"(-r|--requirement|-c|--constraint)[\s=]*(\S.*)", line)
        if include and "://" not in include[2]:
            included = file.parent / include[2].strip("\"'")
            is_constraint = include[1] in ("-c", "--constraint")
            if included.resolve() not in seen:
                yield from _of_text(included, seen, constraint=is_constraint)
        elif line:
            yield _Line(place, line, constraint)


def _toml(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file; raises ``ValueError`` if it is not TOML."""
    try:
        return tomllib.loads(_read(file))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: this is not TOML: {error}") from error


def _login_in(line: str) -> bool:
    """Return whether an address in a line has a password or a token, and no variable instead.

    A token may be before the host, or a value of the query, as in presigned addresses.
    """
    logins = re.findall(r"://([^/\s\"]*)@", line)
    queries = re.findall(r"://[^\s\"'?#]*\?([^\s\"'#]*)", line)
    values = _SECRET_VALUE.findall("&".join(queries))
    harmless = re.compile(r"(?:[^:]*:)?\$\{[A-Z0-9_]+\}|git")
    return any(not harmless.fullmatch(login) for login in (*logins, *values))


def _is_safe(line: _Line, requested: RequestedRequirements, environment: Mapping[str, str]) -> bool:
    """Return whether a line has no secret, and its variables are set; else note a problem."""
    variables = re.findall(r"\$\{([A-Z0-9_]+)\}", line.text)
    unset = [name for name in variables if not environment.get(name)]
    if unset:
        requested.problems.append(f"{line.shown}: the variable {unset[0]} is not set")
        return False
    requested.variables.update(variables)
    if _login_in(line.text):
        requested.problems.append(f"{line.shown}: {_HAS_LOGIN}")
        return False
    return True


def _add(
    line: _Line, folder: Path, requested: RequestedRequirements, forbidden: tuple[str, ...]
) -> None:
    """Add a line: what uv resolves, or the folder, file or repository that it names.

    Args:
        line: The line.
        folder: The folder that relative paths start from.
        requested: Gets the line.
        forbidden: Texts of this machine that must not be in an image.
    """
    links = re.fullmatch(r"(?:-f|--find-links)[\s=]*(\S.*)", line.text)
    if links and "://" not in links[1]:
        requested.links.append(folder / links[1])
        return
    direct = _DIRECT.fullmatch(line.text)
    if direct is None:
        requested.lines.append(line.noted)
        return

    address = direct["address"]
    extras = direct["extras"] or direct["more"] or ""
    marker = direct["marker"] or ""
    try:
        if marker:
            Marker(marker)
        if address.startswith("git+"):
            requested.repositories.append(_git(direct, line.shown, marker))
            return
    except (InvalidMarker, ValueError) as error:
        requested.problems.append(f"{line.shown}: {error}")
        return

    path = _path_at(address, folder)
    if path.is_dir():
        tree = read_source(path, name=line.shown, forbidden=forbidden)
        requested.folders.append(
            Folder(origin=address, folder=path, tree=tree, extras=extras, marker=marker)
        )
        requested.problems += tree.problems
    elif path.is_file() and _ARCHIVE.fullmatch(path.name):
        name = f"files/{path.name}"
        requested.files[name] = SourceFile(path=name, content=path.read_bytes())
        requirement = f"{INPUTS}/{name}{extras}{direct['hashes'] or ''}"
        if marker:
            requirement += f" ; {marker}"
        requested.lines.append(f"{requirement}  #@ {line.place}")
    elif re.match(r"/(?:croot|tmp/build|.*/conda|opt/conda)", str(path)):
        # A line of `pip freeze` in a conda environment: the installer recognises it.
        requested.lines.append(line.noted)
    else:
        requested.problems.append(
            f"{line.shown}: {path} is not a folder, a wheel or a source archive"
        )


def _path_at(address: str, folder: Path) -> Path:
    """Return the path that a requirement means, relative to its file or, as pip has it, to here."""
    if address.startswith("file:"):
        path = Path(unquote(urlsplit(address).path))
    else:
        path = folder / Path(address).expanduser()
    if not path.exists() and Path(address).exists():
        return Path(address)
    return path


def _git(direct: re.Match[str], place: str, marker: str) -> GitRequirement:
    """Return the repository of a requirement; raises ValueError with its problem."""
    parts = urlsplit(direct["address"].removeprefix("git+"))
    if parts.scheme not in ("https", "http", "ssh", "git", "file"):
        raise ValueError("a git address begins with git+https://, git+ssh:// or git+file://")
    if parts.password or (parts.username and parts.scheme != "ssh"):
        raise ValueError(
            "the address has a password or token in it:"
            " give it to git (credential helper, ~/.netrc)"
        )
    path, reference = parts.path, ""
    if "@" in path:
        path, _, reference = path.rpartition("@")
        if not _is_reference(reference):
            raise ValueError(f"{reference!r} is not the name of a branch, a tag or a commit")

    fragment = parse_qs(parts.fragment)
    subdirectory = fragment.get("subdirectory", [""])[0]
    if subdirectory and not _is_reference(subdirectory):
        raise ValueError(f"{subdirectory!r} is not a folder of the repository")
    name = direct["name"] or ""
    extras = direct["extras"] or direct["more"] or ""
    if "egg" in fragment:
        egg = Requirement(fragment["egg"][0])
        name = name or egg.name
        if egg.extras and not extras:
            extras = f"[{','.join(sorted(egg.extras))}]"
    return GitRequirement(
        place=place,
        url=parts._replace(path=path, fragment="").geturl(),
        reference=reference,
        subdirectory=subdirectory,
        name=canonicalize_name(name),
        extras=extras,
        marker=marker,
    )


def _is_reference(text: str) -> bool:
    """Return whether a text can be a branch, a tag, a commit or a path in a repository."""
    return _REFERENCE.fullmatch(text) is not None and ".." not in text
