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
    for pattern, sentence in _OTHERS.items():
        if re.fullmatch(pattern, file.name):
            raise RefusedError(f"{file} {sentence}")
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
        if row.requirement or row.options.editable:
            yield _requirement(python, place, row)
        else:
            yield from _lines_of_options(python, place, row, options)


def _lines_of_options(python: Any, place: str, row: Any, options: set[str]) -> Iterator[Line]:
    """Yield a line of options as lines of uv.

    Those that uv has on its command line only go to ``options``.
    """
    of_row = row.options
    if of_row.pre:
        options.add("--prerelease=allow")
    if of_row.require_hashes:
        options.add("--require-hashes")
    for host in of_row.trusted_host:
        options.add(f"--allow-insecure-host={host}")
    if of_row.prefer_binary:
        python.say(
            f"{place}: --prefer-binary is left out: uv takes the newest release that fits;"
            " --only-binary is kept"
        )
    for address in of_row.requirement:
        yield Line(place, f"-r {address}")
    for address in of_row.constraint:
        yield Line(place, f"-c {address}")
    if of_row.index_url:
        yield Line(place, f"--index-url {of_row.index_url}")
    for address in of_row.extra_index_url:
        yield Line(place, f"--extra-index-url {address}")
    for link in of_row.find_links:
        beside_file = row.file.parent / link
        folder = beside_file.absolute() if beside_file.exists() else link
        yield Line(place, f"--find-links {folder}")
    for name in _names_in(of_row.no_binary):
        yield Line(place, f"--no-binary {name}")
    for name in _names_in(of_row.only_binary):
        yield Line(place, f"--only-binary {name}")
    if of_row.no_index:
        yield Line(place, "--no-index")


def _names_in(values: Iterable[str]) -> list[str]:
    """Return the names in values such as ``numpy,scipy``, in order."""
    names: set[str] = set()
    for value in values:
        names.update(value.split(","))
    return sorted(names)


def _requirement(python: Any, place: str, row: Any) -> Line:
    is_editable = not row.requirement
    text = row.options.editable[0] if is_editable else row.requirement
    if re.match(r"[\w.-]+=[^=]", text):
        raise RefusedError(f"{place}: {text} {_CONDA}")
    local = re.match(r"([\w.-]+)(?:\[.*\])?\s*@\s*file://(/[^;#\s]+)", text)
    if local and not Path(urllib.request.url2pathname(local.group(2))).exists():
        raise RefusedError(
            f"{place}: {local.group(2)} does not exist. A line that `pip freeze` wrote so {_CONDA}"
        )
    wheel = re.search(r"[^/\s@]+\.whl", text)
    if wheel is None:
        wanted = applying(python, text)
    else:
        _, semicolon, marker = text.partition(";")
        wanted = _of_wheel(python, place, wheel.group(), f"{semicolon} {marker}")
    text = f"-e {text}" if is_editable else _with_private_copy(text)
    for digest in row.options.hash:
        text += f" --hash={digest}"
    return Line(place, text, wanted, row.constraint)


def _of_wheel(python: Any, place: str, name_in_address: str, marker: str) -> Any:
    """Return the requirement that the name of a wheel's file states, if it applies.

    Raises RefusedError for a wheel of another Python or system.
    """
    file = urllib.request.url2pathname(name_in_address)
    try:
        name, version, _, tags = parse_wheel_filename(file)
    except ValueError as error:
        raise RefusedError(f"{place}: {error}") from error
    wanted = applying(python, f"{name}=={version}{marker}")
    # As texts: the builder's own packaging has another class for them.
    fitting = [str(tag) for tag in python.tags()]
    if wanted and not any(str(tag) in fitting for tag in tags):
        raise RefusedError(f"{place}: {file} is for another Python or system; this is {fitting[0]}")
    return wanted


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
            match = _SCRIPT.search(text)
            if match is None:
                raise RefusedError(
                    f"{file} has no requirements in its head (`# /// script`): name another file"
                )
            text = re.sub(r"(?m)^# ?", "", match.group(1))
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
        problem = f"{file}: requires-python is {wanted}, and this image has Python {have}: {advice}"
        raise RefusedError(problem, newer={"python": wanted})


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
    own_name = normalised(str(project.get("name", "")))
    sets_of_kind = {
        "extra": project.get("optional-dependencies", {}),
        "group": table.get("dependency-groups", {}),
    }
    rows_of_set: dict[tuple[str, str], list[Any]] = {}
    for kind, sets in sets_of_kind.items():
        for name, set_rows in sets.items():
            rows_of_set[kind, normalised(name)] = set_rows

    rows: list[Any] = list(project.get("dependencies", ()))
    open_sets = [("extra", normalised(name)) for name in extras]
    open_sets += [("group", normalised(name)) for name in groups]
    while rows or open_sets:
        if not rows:
            # Each set is read once: it may include itself.
            rows += rows_of_set.pop(open_sets.pop(), ())
            continue
        row = rows.pop(0)
        if isinstance(row, dict):
            open_sets.append(("group", normalised(str(row.get("include-group", "")))))
            continue
        wanted = applying(python, str(row))
        if wanted and own_name and normalised(wanted.name) == own_name:
            open_sets += [("extra", normalised(name)) for name in wanted.extras]
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
    match = re.fullmatch(r"(?P<path>[^-].*?)(?:\[(?P<extras>[^\]]*)\])?", word)
    if match is None:
        return None
    folder = match["path"]
    if folder.startswith("file://"):
        folder = urllib.request.url2pathname(folder[len("file://") :])
    file = Path(folder, _PROJECT)
    if not file.is_file():
        return None
    extras = [name.strip() for name in (match["extras"] or "").split(",")]
    return file, [name for name in extras if name]


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
        name, version = normalised(row["name"]), str(row.get("version", ""))
        if name not in chosen:
            continue
        # A row or a choice without a version is of any.
        if not version or chosen[name] in ("", version):
            rows.setdefault(name, []).append(row)

    indexes: set[str] = set()
    for several in rows.values():
        row = several[0]
        if len(several) > 1:
            for candidate in several:
                if _fits(python, candidate):
                    row = candidate
                    break
        index = str(row.get("index", "")).rstrip("/")
        if index and index not in indexes:
            indexes.add(index)
            yield Line(str(file), f"--extra-index-url {index}")
        requirement = row["name"]
        if row.get("version"):
            requirement += f"=={row['version']}"
        text = _text_of_row(row, file.parent)
        yield Line(f"{file}: {row['name']}", text, applying(python, requirement))


def _fits(python: Any, row: Mapping[str, Any]) -> bool:
    if not row.get("marker"):
        return True
    try:
        marker = Marker(row["marker"])
        return bool(marker.evaluate({**python.markers(), "extra": ""}))
    except (ValueError, KeyError):
        return True


def _text_of_row(row: Mapping[str, Any], folder: Path) -> str:
    """Return a package of a ``pylock.toml`` as a line of a requirements file."""
    name, repository, archive = row["name"], row.get("vcs"), row.get("archive")
    if repository:
        address = _address_of(repository, folder)
        text = f"{name} @ {repository['type']}+{address}@{repository['commit-id']}"
        if repository.get("subdirectory"):
            text += f"#subdirectory={repository['subdirectory']}"
        return text
    if row.get("directory"):
        return _with_private_copy(f"{name} @ {_address_of(row['directory'], folder)}")

    if archive:
        text = f"{name} @ {_address_of(archive, folder)}"
        files = [archive]
    else:
        text = f"{name}=={row['version']}"
        files = [*row.get("wheels", ())]
        if row.get("sdist"):
            files.append(row["sdist"])
    for file in files:
        for algorithm, digest in file["hashes"].items():
            text += f" --hash={algorithm}:{digest}"
    return text


def _address_of(source: Mapping[str, Any], folder: Path) -> str:
    """Return the address of a source: its own, or that of its path beside the lock."""
    if source.get("url"):
        return str(source["url"])
    return Path(folder, source["path"]).resolve().as_uri()


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
    reading, rest = Reading(python), iter(words)
    files: list[Path] = []
    extras: list[str] = []
    groups: list[str] = []
    for word in rest:
        if word == "-r":
            files.append(Path(next(rest)))
        elif word == "--extra":
            extras.append(next(rest))
        elif word == "--group":
            groups.append(next(rest))
        else:
            reading.words.append(word)
            project = project_in(word)
            if project is not None:
                file, own_extras = project
                _look_at(file, own_extras, (), reading)

    # A group is FILE:NAME where more than one file could have it.
    for group in groups:
        place, colon, name = group.rpartition(":")
        if colon:
            reading.words += ("--group", group)
            _look_at(Path(place), (), (name,), reading)
    of_files = [group for group in groups if ":" not in group]
    for file in files:
        _read(file, extras, of_files, reading, installation)
    return reading


def _look_at(file: Path, extras: Iterable[str], groups: Iterable[str], reading: Reading) -> None:
    refuse_python(reading.python, file)
    reading.looked_at += read_project(reading.python, file, extras, groups)
    reading.sources.update(map(normalised, sources_of(file)))
    reading.project = reading.project or file.parent.absolute()


def _read(
    file: Path, extras: Sequence[str], groups: Sequence[str], reading: Reading, installation: Any
) -> None:
    """Read one file by its kind: a requirements file, a lock, a project or a script."""
    is_pylock = _PYLOCK.fullmatch(file.name) is not None
    is_lock = is_pylock or file.name == _UV_LOCK
    is_script = file.suffix == ".py"
    if not is_lock and not is_script and file.name != _PROJECT:
        reading.lines += read_file(reading.python, file, reading.options)
        return
    if installation is None:
        raise RefusedError(f"{file} is read by uv, and this image has no uv")
    refuse_python(reading.python, file)

    options = []
    for name in extras:
        options += ["--extra", name]
    lock_of_script = file.with_name(f"{file.name}.lock")
    if is_lock or (is_script and lock_of_script.is_file()):
        for name in groups:
            options += ["--group", name]
        if not is_pylock:
            file, options = installation.exported(file, options), []
        lines = list(read_lock(file, options, installation))
        reading.lines += lines
        reading.indexes += [line.text for line in lines if line.text.startswith("--")]
        return

    if is_script:
        settings = table_of(file).get("tool", {}).get("uv", {})
        if settings.get("sources") or settings.get("index"):
            raise RefusedError(
                f"{file} says to uv where its requirements come from, which uv reads of a lock:"
                f" `uv lock --script {file}` writes it"
            )
    _look_at(file, extras, groups, reading)
    reading.words += ["-r", str(file), *options]
    for name in groups:
        reading.words += ["--group", f"{file}:{name}"]
