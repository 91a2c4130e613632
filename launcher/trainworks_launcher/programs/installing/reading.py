"""What is asked for: each file is read by what its kind belongs to, pip's line
by line, and what uv reads by uv.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import urllib.request
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

from trainworks_launcher.programs.installing import pip_files
from trainworks_launcher.programs.installing.environment import (
    RUNTIME_DIRECTORY,
    RefusedError,
    applying,
    normalised,
)
from trainworks_launcher.programs.installing.standards import (
    Marker,
    SpecifierSet,
    parse_wheel_filename,
    tomllib,
)

_CONDA = (
    "is conda's: `conda run -n NAME python -m pip list --format=freeze > requirements.txt` writes"
    " what pip reads"
)
_OTHERS = {
    r".*\.ya?ml": _CONDA,
    r"Pipfile(\.lock)?": (
        "is pipenv's: `pipenv requirements > requirements.txt` writes what pip reads"
    ),
    r"poetry\.lock": (
        "is Poetry's: `poetry export -o requirements.txt` (poetry-plugin-export)"
        " writes what pip reads"
    ),
    r"setup\.(py|cfg)": "belongs to a project: name its folder in a requirements file, such as ./",
}
SOURCES = ("--index-url", "--extra-index-url", "--find-links")
_PROJECT, _UV_LOCK = "pyproject.toml", "uv.lock"
_PYLOCK = re.compile(r"pylock(\.[^.]+)?\.toml")
_SCRIPT = re.compile(r"(?m)^# /// script[ \t]*\r?\n((?:#(?: .*)?\r?\n)+?)# ///[ \t]*\r?$")
"""The table in a script's head (PEP 723)."""


class Line(NamedTuple):
    """A line of the user's own.

    Attributes:
        place: Where it stands.
        text: For uv.
        wanted: The requirement that it is, if it applies; ``None`` for an
            option, and for what only uv can read.
        constraint: It only limits.
    """

    place: str
    text: str
    wanted: Any = None
    constraint: bool = False

    @property
    def name(self) -> str:
        """The distribution's name as indexes write it; ``""`` for no requirement."""
        return normalised(self.wanted.name) if self.wanted else ""


def read_file(python: Any, file: Path, options: set[str]) -> Iterator[Line]:
    """Yield the lines of a requirements file and of what it includes, as pip's
    own parser reads them.

    Args:
        python: The Python that is installed for.
        file: The file.
        options: Gets those of pip's options that uv takes on its command line only.

    Raises:
        RefusedError: The file, or a line of it, is another tool's, or pip cannot read it.
    """
    if other := next(
        (sentence for pattern, sentence in _OTHERS.items() if re.fullmatch(pattern, file.name)), ""
    ):
        raise RefusedError(f"{file} {other}")
    try:
        rows = list(pip_files.read_rows(file))
    except UnicodeDecodeError as error:
        raise RefusedError(
            f"{file} is not UTF-8: `iconv -f LATIN1 -t UTF-8` converts it"
        ) from error
    except OSError as error:
        raise RefusedError(f"cannot open {error.filename or file}: {error.strerror}") from error
    except pip_files.SettingsError as error:
        raise RefusedError(str(error)) from error
    for row in rows:
        place = row.place or f"{row.file} line {row.number}"
        if row.options.config_settings or row.options.global_option:
            raise RefusedError(
                f"{place}: options of a build are not handed to it: name the address of a wheel"
            )
        editable = [*row.options.editable, ""][0]
        if text := row.requirement or editable:
            yield _requirement(python, place, text, row)
        else:
            yield from _lines_of_options(python, place, row, options)


def _lines_of_options(python: Any, place: str, row: Any, options: set[str]) -> Iterator[Line]:
    """Yield a line of options as lines of uv.

    Those that uv has on its command line only go to ``options``.
    """
    given = row.options
    options |= {"--prerelease=allow"} if given.pre else set()
    options |= {"--require-hashes"} if given.require_hashes else set()
    options |= {f"--allow-insecure-host={host}" for host in given.trusted_host}
    if given.prefer_binary:
        python.say(
            f"{place}: --prefer-binary is left out: uv takes the newest release that fits;"
            " --only-binary is kept"
        )
    yield from (Line(place, f"-r {address}") for address in given.requirement)
    yield from (Line(place, f"-c {address}") for address in given.constraint)
    if given.index_url:
        yield Line(place, f"--index-url {given.index_url}")
    yield from (Line(place, f"--extra-index-url {address}") for address in given.extra_index_url)
    for link in given.find_links:
        near = row.file.parent / link
        yield Line(place, f"--find-links {near.absolute() if near.exists() else link}")
    for option, values in (("--no-binary", given.no_binary), ("--only-binary", given.only_binary)):
        names = sorted({name for value in values for name in value.split(",")})
        yield from (Line(place, f"{option} {name}") for name in names)
    if given.no_index:
        yield Line(place, "--no-index")


def _requirement(python: Any, place: str, text: str, row: Any) -> Line:
    is_editable = not row.requirement
    if re.match(r"[\w.-]+=[^=]", text):
        raise RefusedError(f"{place}: {text} {_CONDA}")
    local = re.match(r"([\w.-]+)(?:\[.*\])?\s*@\s*file://(/[^;#\s]+)", text)
    if local and not Path(urllib.request.url2pathname(local.group(2))).exists():
        raise RefusedError(
            f"{place}: {local.group(2)} does not exist. A line that `pip freeze` wrote so {_CONDA}"
        )
    wanted = applying(python, text)
    if wheel := re.search(
        r"[^/\s@]+\.whl", text
    ):  # its file name says which release it is, and for what
        file, marker = urllib.request.url2pathname(wheel.group()), text.partition(";")[1:]
        try:
            name, version, _, tags = parse_wheel_filename(file)
        except ValueError as error:
            raise RefusedError(f"{place}: {error}") from error
        wanted = applying(python, f"{name}=={version}{' '.join(marker)}")
        # As texts: the builder's own packaging has another class for them.
        fitting = [str(tag) for tag in python.tags()]
        if wanted and set(map(str, tags)).isdisjoint(fitting):
            raise RefusedError(
                f"{place}: {file} is for another Python or system; this is {fitting[0]}"
            )
    if not is_editable:
        text = _with_private_copy(text)
    hashes = "".join(f" --hash={each}" for each in row.options.hash)
    return Line(place, f"{'-e ' if is_editable else ''}{text}{hashes}", wanted, row.constraint)


_FOLDER = re.compile(
    r"(?P<before>[\w.-]+(?:\[[^\]]*\])?\s*@\s*)?(?:file://)?(?P<path>[^\s;\[#]*/[^\s;\[#]*|\.{1,2})"
)


def _with_private_copy(text: str) -> str:
    """Return a line that names a folder with a copy of it, where a job
    installs: hosts may share the folder.

    What lies around it in the working directory is linked: its version may come from there.
    """
    requirement = _FOLDER.match(text)
    if requirement is None or RUNTIME_DIRECTORY not in os.environ:
        return text
    path = urllib.request.url2pathname(requirement["path"])
    folder = Path(os.path.normpath(path)).absolute()
    if not folder.is_dir():
        return text
    copied = runpy.run_path(str(Path(__file__).parent.with_name("copied.py")))
    copy = Path(copied["copy_of_folder"](str(folder), str(Path.cwd())))
    before, after = requirement["before"] or "", text[requirement.end() :]
    return f"{before}{copy.as_uri()}{after}"


def table_of(file: Path) -> Mapping[str, Any]:
    """Return the content of a TOML file, or of the table in a script's head.

    Raises RefusedError.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            found = _SCRIPT.search(text)
            if found is None:
                raise RefusedError(
                    f"{file} has no requirements in its head (`# /// script`): name another file"
                )
            text = re.sub(r"(?m)^# ?", "", found.group(1))
        return tomllib.loads(text)  # type: ignore[no-any-return, unused-ignore]
    except (OSError, ValueError) as error:
        raise RefusedError(f"cannot read {file}: {error}") from error


def refuse_python(python: Any, file: Path, *, is_asked_for: bool = True) -> None:
    """Raise RefusedError where a project, a lock or a script is for another Python: uv does not
    look at all of them.

    Args:
        python: The Python that is installed for.
        file: The file.
        is_asked_for: Whether its requirements are to be installed. A script
            without a head says nothing otherwise.
    """
    if not is_asked_for and file.suffix == ".py" and not has_head(file):
        return
    table = table_of(file)
    wanted = str(table.get("project", table).get("requires-python", ""))
    have = python.markers().get("python_full_version") or platform.python_version()
    try:
        fits = not wanted or SpecifierSet(wanted).contains(have, prereleases=True)
    except ValueError as error:
        raise RefusedError(f"{file}: requires-python is {wanted}: {error}") from error
    if not fits:
        advice = f"choose an image with Python {wanted}"
        what = f"{file}: requires-python is {wanted}, and this image has Python {have}: {advice}"
        raise RefusedError(what, newer={"python": wanted})


def has_head(script: Path) -> bool:
    """Whether a script says in its head what it requires (PEP 723)."""
    return _SCRIPT.search(script.read_text(encoding="utf-8", errors="replace")) is not None


def read_project(
    python: Any, file: Path, extras: Iterable[str], groups: Iterable[str]
) -> Iterator[Line]:
    """Yield what a project or a script asks for itself, to look at it: uv reads the file, and
    decides what it means.

    Args:
        python: The Python that is installed for.
        file: ``pyproject.toml``, or a script.
        extras: Names of the extras that are wanted. One may name others of its own project.
        groups: Names of dependency groups.
    """
    table = table_of(file)
    project = table if file.suffix == ".py" else table.get("project", {})
    own = normalised(str(project.get("name", "")))
    there = {
        "extra": {
            normalised(name): rows
            for name, rows in project.get("optional-dependencies", {}).items()
        },
        "group": {
            normalised(name): rows for name, rows in table.get("dependency-groups", {}).items()
        },
    }
    rows: list[Any] = list(project.get("dependencies", ()))
    open_sets = [("extra", name) for name in extras] + [("group", name) for name in groups]
    seen: set[tuple[str, str]] = set()
    while rows or open_sets:
        if not rows:
            kind, name = open_sets.pop()
            if (kind, normalised(name)) not in seen:
                seen.add((kind, normalised(name)))
                rows += there[kind].get(normalised(name), ())
            continue
        row = rows.pop(0)
        if isinstance(row, dict):
            open_sets.append(("group", str(row.get("include-group", ""))))
            continue
        wanted = applying(python, str(row))
        if wanted and own and normalised(wanted.name) == own:
            open_sets += [("extra", name) for name in wanted.extras]
        else:
            yield Line(str(file), str(row), wanted)


def sources_of(file: Path) -> Mapping[str, Any]:
    """Return where a project or a script has its requirements from, as it says to uv."""
    own: Mapping[str, Any] = table_of(file).get("tool", {}).get("uv", {})
    return own.get("sources", {})  # type: ignore[no-any-return]


def project_in(word: str) -> tuple[Path, list[str]] | None:
    """Return the ``pyproject.toml`` of a folder that a word names, and its extras.

    None for another word.
    """
    found = re.fullmatch(r"(?P<path>[^-].*?)(?:\[(?P<extras>[^\]]*)\])?", word)
    if not found:
        return None
    is_address = found["path"].startswith("file://")
    place = (
        urllib.request.url2pathname(found["path"][len("file://") :])
        if is_address
        else found["path"]
    )
    extras = [each.strip() for each in (found["extras"] or "").split(",") if each.strip()]
    file = Path(place, _PROJECT)
    return (file, extras) if file.is_file() else None


def read_lock(file: Path, words: Sequence[str], installation: Any) -> Iterator[Line]:
    """Yield what uv takes of a ``pylock.toml`` for this machine, as lines with hashes.

    Raises RefusedError.

    uv installs such a file as a whole or not at all, and so it would replace what the image keeps.
    """
    python = installation.python
    selected = python.selected(installation, ("-r", str(file), *words))
    chosen = {normalised(name): version for name, version in selected.items()}
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in table_of(file).get("packages", ()):
        name = normalised(row["name"])
        if name in chosen and chosen[name] in ("", str(row.get("version", "")) or chosen[name]):
            rows.setdefault(name, []).append(row)
    indexes: set[str] = set()
    for several in rows.values():
        row = several[0]
        if len(several) > 1:
            fitting = [each for each in several if _fits(python, each)]
            row = [*fitting, row][0]
        index = str(row.get("index", "")).rstrip("/")
        if index and index not in indexes:
            indexes.add(index)
            yield Line(str(file), f"--extra-index-url {index}")
        text = _text_of_row(row, file.parent)
        pin = f"{row['name']}=={row['version']}" if row.get("version") else row["name"]
        wanted = applying(python, pin)
        yield Line(f"{file}: {row['name']}", text, wanted)


def _fits(python: Any, row: Mapping[str, Any]) -> bool:
    if not row.get("marker"):
        return True
    try:
        return bool(Marker(row["marker"]).evaluate({**python.markers(), "extra": ""}))
    except (ValueError, KeyError):
        return True


def _text_of_row(row: Mapping[str, Any], folder: Path) -> str:
    """Return a package of a ``pylock.toml`` as a line of a requirements file."""
    name, source, archive = row["name"], row.get("vcs"), row.get("archive")
    if source:
        address = source.get("url") or Path(folder, source["path"]).resolve().as_uri()
        inner = f"#subdirectory={source['subdirectory']}" if source.get("subdirectory") else ""
        return f"{name} @ {source['type']}+{address}@{source['commit-id']}{inner}"
    if row.get("directory"):
        return _with_private_copy(
            f"{name} @ {Path(folder, row['directory']['path']).resolve().as_uri()}"
        )
    files = [archive] if archive else [*row.get("wheels", ()), *filter(None, [row.get("sdist")])]
    hashes = "".join(
        f" --hash={kind}:{value}" for each in files for kind, value in each["hashes"].items()
    )
    if archive:
        address = archive.get("url") or Path(folder, archive["path"]).resolve().as_uri()
        return f"{name} @ {address}{hashes}"
    return f"{name}=={row['version']}{hashes}"


class Reading:
    """What the words of an installation ask for.

    Attributes:
        python: The Python that is installed for.
        lines: The user's own lines, of requirements files and of locks: uv gets them.
        looked_at: What projects and scripts ask for themselves: uv reads their files.
        words: What uv gets beside the lines.
        options: Options of pip's in files, which uv takes on its command line only.
        sources: Names that a project or a script has from elsewhere than an
            index of pip's settings.
        indexes: Lines of indexes that are a lock's.
        project: The folder whose ``[tool.uv]`` counts; None for none.
    """

    def __init__(self, python: Any) -> None:
        """Begin with nothing."""
        self.python = python
        self.lines: list[Line] = []
        self.looked_at: list[Line] = []
        self.words: list[str] = []
        self.options: set[str] = set()
        self.sources: set[str] = set()
        self.indexes: list[str] = []
        self.project: Path | None = None


def read_words(python: Any, words: Sequence[str], installation: Any) -> Reading:
    """Read the files that words name, each with what reads its kind. Raises RefusedError.

    Args:
        python: The Python that is installed for.
        words: Of an installation.
        installation: uv; None where there is none: then only files of pip's are read.
    """
    found, rest = Reading(python), iter(words)
    files: list[Path] = []
    extras: list[str] = []
    groups: list[str] = []
    by_option = {"--extra": extras, "--group": groups}
    for word in rest:
        if word == "-r":
            files.append(Path(next(rest)))
        elif word in by_option:
            by_option[word].append(next(rest))
        else:
            found.words.append(word)
            if (project := project_in(word)) is not None:
                _look_at(project[0], project[1], (), found)
    # uv wants to know whose group it is, where more than one file could have it.
    elsewhere = [group for group in groups if ":" in group]
    for group in elsewhere:
        place, _, name = group.rpartition(":")
        found.words += ("--group", group)
        _look_at(Path(place), (), (name,), found)
    own = [group for group in groups if group not in elsewhere]
    for file in files:
        _read(file, extras, own, found, installation)
    return found


def _look_at(file: Path, extras: Iterable[str], groups: Iterable[str], found: Reading) -> None:
    refuse_python(found.python, file)
    found.looked_at += read_project(found.python, file, extras, groups)
    found.sources.update(map(normalised, sources_of(file)))
    found.project = found.project or file.parent.absolute()


def _read(
    file: Path, extras: Sequence[str], groups: Sequence[str], found: Reading, installation: Any
) -> None:
    is_lock = file.name == _UV_LOCK or _PYLOCK.fullmatch(file.name)
    if not is_lock and file.name != _PROJECT and file.suffix != ".py":
        found.lines += read_file(found.python, file, found.options)
        return
    if installation is None:
        raise RefusedError(f"{file} is read by uv, and this image has no uv")
    refuse_python(found.python, file)
    chosen = [word for name in extras for word in ("--extra", name)]
    lock = file.with_name(f"{file.name}.lock")
    if is_lock or (file.suffix == ".py" and lock.is_file()):
        chosen += [word for name in groups for word in ("--group", name)]
        if not _PYLOCK.fullmatch(file.name):
            file, chosen = installation.exported(file, chosen), []
        lines = list(read_lock(file, chosen, installation))
        found.lines += lines
        found.indexes += [line.text for line in lines if line.text.startswith("--")]
        return
    if file.suffix == ".py":
        own = table_of(file).get("tool", {}).get("uv", {})
        if own.get("sources") or own.get("index"):
            what = f"{file} says to uv where its requirements come from, which uv reads of a lock"
            raise RefusedError(f"{what}: `uv lock --script {file}` writes it")
    _look_at(file, extras, groups, found)
    found.words += ["-r", str(file), *chosen]
    found.words += [word for name in groups for word in ("--group", f"{file}:{name}")]
