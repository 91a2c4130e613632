"""What an extension's requirements need of this machine: files, folders, repositories, variables. uv reads the lines.

A file that a line names is read at once, and the line names its copy. A folder or a git repository becomes a source
that is built in the base. Everything else goes on as it is.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from packaging.dependency_groups import resolve_dependency_groups
from packaging.markers import InvalidMarker, Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from uv import find_uv_bin

from trainworks.extend.requirements import GitRequirement
from trainworks.extend.source import SourceTree, read_source
from trainworks.facts.rows import SourceFile
from trainworks.host.downloads import without_credentials

INPUTS = "/run/inputs"
"""Stands in lines for the folder that gets the files of ``Wanted``."""

PROJECT = "pyproject.toml"
UV_LOCK = "uv.lock"
PYLOCK = "pylock.toml"
OF_OTHER_TOOLS = {
    "environment.yml": "conda's: `conda run -n NAME python -m pip list --format=freeze > requirements.txt`",
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


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A project in a folder of this machine: how it was named, where it is, and which of its extras are wanted."""

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
        constraints: Of one file of constraints.
        files: What the lines name, below ``INPUTS``.
        repositories: What is built from git.
        folders: What is built from folders.
        links: Folders of this machine with wheels.
        virtual: A ``uv.lock`` says that its project is not installed.
        variables: Names that the lines have as ``${NAME}``.
        notes: What a person should know.
        problems: Why nothing can be made of it.
    """

    lines: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    files: dict[str, SourceFile] = field(default_factory=dict)
    repositories: list[GitRequirement] = field(default_factory=list)
    folders: list[Folder] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)
    virtual: bool = False
    variables: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def hashed(self) -> bool:
        """Whether lines have hashes: then everything has to be in them."""
        return any("--hash" in line for line in self.lines)

    def __bool__(self) -> bool:
        """Say whether anything is asked for."""
        return bool(self.lines or self.repositories or self.folders)


def is_lock(file: Path) -> bool:
    """Whether a file has a project's extras and groups itself: a lock, or a project's file."""
    return file.name in (UV_LOCK, PROJECT) or bool(re.fullmatch(r"pylock(\.[^.]+)?\.toml", file.name))


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
        for place, line, folder in _lines(file, extras, groups, wanted) if file else ():
            _add(line, place, folder, wanted, environment, forbidden)
        if groups and (file is None or file.name not in (UV_LOCK, PROJECT)):
            if project is None:
                wanted.problems.append(f"--group {groups[0]}: there is no {PROJECT} in --source")
            for place, line in _of_groups(project, groups) if project else ():
                _add(line, place, project.parent if project else Path(), wanted, environment, forbidden)
    except ValueError as error:
        wanted.problems.append(str(error))
    return wanted


def _lines(file: Path, extras: Sequence[str], groups: Sequence[str], wanted: Wanted) -> Iterator[tuple[str, str, Path]]:
    """Yield (place, line, the folder that relative paths begin at) of any file that is read. Raises ValueError."""
    name = "environment.yml" if file.suffix in (".yml", ".yaml") else file.name
    if name in OF_OTHER_TOOLS:
        raise ValueError(f"{file} is {OF_OTHER_TOOLS[name]} writes what pip reads")
    if file.name == UV_LOCK:
        own = [row for row in _toml(file).get("package", ()) if "." in row.get("source", {}).values()]
        wanted.virtual = any("virtual" in row["source"] for row in own)
        yield from ((str(file), line, file.parent) for line in _exported(file, extras, groups))
    elif file.name == PROJECT:
        rows = [*_of_project(file, extras), *_of_groups(file, groups)]
        yield from ((place, line, file.parent) for place, line in rows)
    elif is_lock(file):
        yield from ((str(file), line, file.parent) for line in _of_pylock(file))
    else:
        yield from ((place, line, file.parent) for place, line in _of_text(file, wanted, frozenset(), constraint=False))


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
        return content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except UnicodeError:
        raise ValueError(f"{file} is not UTF-8: `iconv -f LATIN1 -t UTF-8` converts it") from None


def _of_text(file: Path, wanted: Wanted, seen: frozenset[Path], *, constraint: bool) -> Iterator[tuple[str, str]]:
    """Yield the lines of a requirements file and of those that it includes; constraints are added at once."""
    text = re.sub(r"\\\r?\n", lambda _: " \0", _read(file))
    number = 1
    for raw in text.splitlines():
        line = re.sub(r"(^|\s+)#.*$", "", raw.replace("\0", "")).strip()
        place = f"{file} line {number}"
        number += 1 + raw.count("\0")
        include = re.fullmatch(r"(-r|--requirement|-c|--constraint)[\s=]*(\S.*)", line)
        if include and "://" not in include[2]:
            other = file.parent / include[2].strip("\"'")
            limits = constraint or "c" in include[1].strip("-")[:1]
            if other.resolve() not in seen | {file.resolve()}:
                yield from _of_text(other, wanted, seen | {file.resolve()}, constraint=limits)
        elif constraint and line:
            wanted.constraints.append(line)
        elif line:
            yield place, line


def _of_project(file: Path, extras: Iterable[str]) -> list[tuple[str, str]]:
    content = _toml(file)
    project = content.get("project", {})
    if not project and "poetry" in content.get("tool", {}):
        raise ValueError(f"{file} is {OF_OTHER_TOOLS['poetry.lock']} writes what pip reads")
    if "dependencies" in project.get("dynamic", ()):
        raise ValueError(
            f"{file}: its dependencies are dynamic: give its folder as --source, or ./ in a requirements file"
        )
    rows = [(f"{file} dependencies", line) for line in project.get("dependencies", ())]
    optional = project.get("optional-dependencies", {})
    for extra in extras:
        if extra not in optional:
            raise ValueError(
                f"--extra {extra}: {file} does not have it: it has {', '.join(sorted(optional)) or 'none'}"
            )
        rows += [(f"{file} extra {extra}", line) for line in optional[extra]]
    return rows


def _of_groups(file: Path, groups: Iterable[str]) -> list[tuple[str, str]]:
    there = _toml(file).get("dependency-groups", {})
    rows = []
    for group in groups:
        try:
            rows += [(f"{file} group {group}", line) for line in resolve_dependency_groups(there, group)]
        except (ValueError, LookupError, TypeError, ExceptionGroup):
            known = ", ".join(sorted(there)) or "none"
            raise ValueError(f"--group {group}: {file} does not have it: it has {known}") from None
    return rows


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read(file))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: this is not TOML: {error}") from error


def _of_pylock(file: Path) -> Iterator[str]:
    """Yield the packages of a lock (PEP 751) as lines, with their hashes."""
    for row in _toml(file).get("packages", ()):
        files = [*row.get("wheels", ()), *filter(None, [row.get("sdist"), row.get("archive")])]
        vcs, place = row.get("vcs"), row.get("archive") or row.get("directory")
        line = f"{row['name']}=={row.get('version')}"
        if vcs:
            line = f"{row['name']} @ {vcs['type']}+{vcs['url']}@{vcs['commit-id']}"
        elif place:
            line = f"{row['name']} @ {place.get('url') or place['path']}"
        hashes = "".join(f" --hash={kind}:{value}" for each in files for kind, value in each["hashes"].items())
        yield f"{line}{hashes if not vcs else ''}" + (f" ; {row['marker']}" if row.get("marker") and not hashes else "")


def _exported(file: Path, extras: Iterable[str], groups: Iterable[str]) -> list[str]:
    """Return what a ``uv.lock`` says, as uv exports it: nothing is resolved, and nothing is run."""
    words = [
        find_uv_bin(),
        "export",
        "--frozen",
        "--no-emit-project",
        "--no-default-groups",
        "--no-header",
        "--no-annotate",
    ]
    chosen = [*(f"--extra={each}" for each in extras), *(f"--group={each}" for each in groups)]
    done = subprocess.run(
        [*words, "--quiet", "--project", str(file.parent), *chosen], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"{file} cannot be read: {done.stderr.strip()}")
    return re.sub(r"\\\n", " ", done.stdout).splitlines()


def _add(
    line: str, place: str, folder: Path, wanted: Wanted, environment: Mapping[str, str], forbidden: tuple[str, ...]
) -> None:
    """Add a line, as it is resolved."""
    variables = re.findall(r"\$\{([A-Z0-9_]+)\}", line)
    shown = f"{place}: {without_credentials(line)[:80]}"
    if missing := [name for name in variables if not environment.get(name)]:
        wanted.problems.append(f"{shown}: the variable {missing[0]} is not set")
        return
    wanted.variables.update(variables)
    for login in re.findall(r"://([^/@\s]*:?[^/@\s]*)@", line):
        if not re.fullmatch(r"(?:[^:]*:)?\$\{[A-Z0-9_]+\}|git", login):
            wanted.problems.append(
                f"{shown}: the address has a password or token in it: put it into ~/.netrc, or into pip's settings for "
                "an index, or name a variable with it: ${NAME}"
            )
            return
    links = re.fullmatch(r"(?:-f|--find-links)[\s=]*(\S.*)", line)
    if links and "://" not in links[1]:
        wanted.links.append(folder / links[1])
        return
    direct = _DIRECT.fullmatch(line)
    if direct is None:
        wanted.lines.append(f"{line}  #@ {place}")
        return
    address, extras, marker = direct["address"], direct["extras"] or direct["more"] or "", direct["marker"] or ""
    try:
        if marker:
            Marker(marker)
        if address.startswith("git+"):
            wanted.repositories.append(_git(direct, shown, marker))
            return
    except (InvalidMarker, ValueError) as error:
        wanted.problems.append(f"{shown}: {error}")
        return
    path = Path(unquote(urlsplit(address).path)) if address.startswith("file:") else folder / Path(address).expanduser()
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
            f"{INPUTS}/{name}{extras}{direct['hashes'] or ''}{f' ; {marker}' if marker else ''}  #@ {place}"
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
        raise ValueError("the address has a password or token in it: give it to git (credential helper, ~/.netrc)")
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
