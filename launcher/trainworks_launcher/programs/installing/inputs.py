"""Read the requested requirements: pip's files line by line, other files with uv."""

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
    normalised,
    parse_applicable,
)
from trainworks_launcher.programs.installing.standards import (
    Marker,
    SpecifierSet,
    parse_wheel_filename,
    tomllib,
)

_CONDA_ADVICE = (
    "is conda's: `conda run -n NAME python -m pip list --format=freeze > requirements.txt` writes"
    " what pip reads"
)
_FILES_OF_OTHER_TOOLS = {
    r".*\.ya?ml": _CONDA_ADVICE,
    r"Pipfile(\.lock)?": (
        "is pipenv's: `pipenv requirements > requirements.txt` writes what pip reads"
    ),
    r"poetry\.lock": (
        "is Poetry's: `poetry export -o requirements.txt` (poetry-plugin-export)"
        " writes what pip reads"
    ),
    r"setup\.(py|cfg)": "belongs to a project: name its folder in a requirements file, such as ./",
}
_LINE_OF_CONDA = re.compile(
    r"""(?x)
    [\w.-]+=[^=]                                         # conda list --export: numpy=1.26.4=py311_0
    | [\w.-]+::                                          # conda-forge::numpy
    | [\w.-]+\s+\d\S*\s+\w+(\s+\S+)?$                  # conda list: numpy  1.26.4  py311h64a7726_0
    | @EXPLICIT$                                         # conda list --explicit
    | (name|channels|dependencies|prefix|variables):     # environment.yml
    | -(\s|$)                                            # an item of its lists
    """
)
SOURCES = ("--index-url", "--extra-index-url", "--find-links")
_PROJECT, _UV_LOCK = "pyproject.toml", "uv.lock"
_PYLOCK_NAME = re.compile(r"pylock(\.[^.]+)?\.toml")
_HEAD_OF_SCRIPT = re.compile(r"(?m)^# /// script[ \t]*\r?\n((?:#(?: .*)?\r?\n)+?)# ///[ \t]*\r?$")
"""The table in the head of a script (PEP 723)."""


class Line(NamedTuple):
    """A line of the user.

    Attributes:
        place: Its file and number, for people.
        text: The line for uv.
        requirement: Its requirement, if that applies to this system; ``None`` for an option, and
            for a form that only uv can read.
        constraint: Whether the line only constrains.
    """

    place: str
    text: str
    requirement: Any = None
    constraint: bool = False

    @property
    def name(self) -> str:
        """The distribution's name as indexes write it; ``""`` without a requirement."""
        if not self.requirement:
            return ""
        return normalised(self.requirement.name)


def read_file(python: Any, file: Path, options: set[str]) -> Iterator[Line]:
    """Yield the lines of a requirements file and of included files, as pip reads them.

    Args:
        python: The Python that gets the packages.
        file: The file.
        options: Gets options of pip that uv has on its command line only.

    Raises:
        RefusedError: The file is of another tool, or pip cannot read it or lines of it: all of
            them.
    """
    # By its name, the file is another tool's: the sentence says what writes a file for pip.
    for pattern, sentence in _FILES_OF_OTHER_TOOLS.items():
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
    problems = _problems_of_conda(rows)
    for row in rows:
        if _LINE_OF_CONDA.match(row.requirement):
            continue
        try:
            yield from _lines_of(python, row, options)
        except RefusedError as refusal:
            problems += refusal.problems
    if problems:
        raise RefusedError(*problems)


def _problems_of_conda(rows: Sequence[Any]) -> list[str]:
    """Return the problem of a file that conda wrote, which may have hundreds of such lines.

    One sentence about the first of the lines and the number of the others; ``[]`` without any.
    """
    lines = [row for row in rows if _LINE_OF_CONDA.match(row.requirement)]
    if not lines:
        return []
    first = f"{_place_of(lines[0])}: {lines[0].requirement}"
    if len(lines) > 1:
        first += f" (and {len(lines) - 1} more)"
    return [f"{first} {_CONDA_ADVICE}"]


def _place_of(row: Any) -> str:
    """Return file and number of a line, for people."""
    return row.place or f"{row.file} line {row.number}"


def _lines_of(python: Any, row: Any, options: set[str]) -> Iterator[Line]:
    """Yield a line of a requirements file as lines for uv.

    Args:
        python: The Python that gets the packages.
        row: The line.
        options: Gets options of pip that uv has on its command line only.

    Raises:
        RefusedError: The line cannot be read, or names what does not exist or does not fit.
    """
    place = _place_of(row)
    if row.problem:
        raise RefusedError(f"{place}: {row.problem}")
    if row.options.config_settings or row.options.global_option:
        raise RefusedError(
            f"{place}: options of a build are not handed to it: name the address of a wheel"
        )
    if row.requirement or row.options.editable:
        yield _requirement(python, place, row)
    else:
        yield from _lines_of_options(python, place, row, options)


def _lines_of_options(python: Any, place: str, row: Any, options: set[str]) -> Iterator[Line]:
    """Yield a line of options as lines for uv, one for each value.

    Args:
        python: Prints a line about an option that is left out.
        place: File and number of the line, for people.
        row: The line.
        options: Gets the options that uv has on its command line only.
    """
    row_options = row.options
    if row_options.pre:
        options.add("--prerelease=allow")
    if row_options.require_hashes:
        options.add("--require-hashes")
    for host in row_options.trusted_host:
        options.add(f"--allow-insecure-host={host}")
    if row_options.prefer_binary:
        python.say(
            f"{place}: --prefer-binary is left out: uv takes the newest release that fits;"
            " --only-binary is kept"
        )
    for address in row_options.requirement:
        yield Line(place, f"-r {address}")
    for address in row_options.constraint:
        yield Line(place, f"-c {address}")
    if row_options.index_url:
        yield Line(place, f"--index-url {row_options.index_url}")
    for address in row_options.extra_index_url:
        yield Line(place, f"--extra-index-url {address}")
    for link in row_options.find_links:
        beside_file = row.file.parent / link
        folder = beside_file.absolute() if beside_file.exists() else link
        yield Line(place, f"--find-links {folder}")
    for name in _names_in(row_options.no_binary):
        yield Line(place, f"--no-binary {name}")
    for name in _names_in(row_options.only_binary):
        yield Line(place, f"--only-binary {name}")
    if row_options.no_index:
        yield Line(place, "--no-index")


def _names_in(values: Iterable[str]) -> list[str]:
    """Return the names in values such as ``numpy,scipy``, in order."""
    names: set[str] = set()
    for value in values:
        names.update(value.split(","))
    return sorted(names)


def _requirement(python: Any, place: str, row: Any) -> Line:
    """Return a line of a requirement for uv; a folder in it is replaced by a private copy.

    Args:
        python: The Python that gets the packages.
        place: File and number of the line, for people.
        row: The line.

    Raises:
        RefusedError: The line names a file that does not exist, or a wheel for another Python.
    """
    is_editable = not row.requirement
    text = row.options.editable[0] if is_editable else row.requirement
    local = re.match(r"([\w.-]+)(?:\[.*\])?\s*@\s*file://(/[^;#\s]+)", text)
    if local and not Path(urllib.request.url2pathname(local.group(2))).exists():
        raise RefusedError(
            f"{place}: {local.group(2)} does not exist."
            f" A line that `pip freeze` wrote so {_CONDA_ADVICE}"
        )
    wheel = re.search(r"[^/\s@]+\.whl", text)
    if wheel is None:
        requirement = parse_applicable(python, text)
    else:
        _, semicolon, marker = text.partition(";")
        requirement = _of_wheel(python, place, wheel.group(), f"{semicolon} {marker}")
    text = f"-e {text}" if is_editable else _with_private_copy(text)
    for digest in row.options.hash:
        text += f" --hash={digest}"
    return Line(place, text, requirement, row.constraint)


def _of_wheel(python: Any, place: str, name_in_address: str, marker: str) -> Any:
    """Return the requirement in the file name of a wheel; None if its marker is not true here.

    Args:
        python: The Python that gets the packages.
        place: File and number of the line, for people.
        name_in_address: For example ``numpy-2.1-cp311-cp311-linux_x86_64.whl``, perhaps quoted for
            an address.
        marker: Semicolon and marker of the line; ``""`` for none.

    Raises:
        RefusedError: The wheel is for another Python or system.
    """
    file = urllib.request.url2pathname(name_in_address)
    try:
        name, version, _, tags = parse_wheel_filename(file)
    except ValueError as error:
        raise RefusedError(f"{place}: {error}") from error
    requirement = parse_applicable(python, f"{name}=={version}{marker}")
    # As texts: the builder's own packaging has another class for them.
    fitting = [str(tag) for tag in python.tags()]
    if requirement and not any(str(tag) in fitting for tag in tags):
        raise RefusedError(f"{place}: {file} is for another Python or system; this is {fitting[0]}")
    return requirement


_FOLDER = re.compile(
    r"(?P<before>[\w.-]+(?:\[[^\]]*\])?\s*@\s*)?(?:file://)?(?P<path>[^\s;\[#]*/[^\s;\[#]*|\.{1,2})"
)


def _with_private_copy(text: str) -> str:
    """Replace a folder in a line by a private copy, in a job: hosts may share the folder.

    Other entries of the working directory are linked beside the copy: the project's version may
    come from them. A line without a folder, and any line outside of a job, is returned as it is.

    Args:
        text: For example ``./library`` or ``name @ file:///code/library``.
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
    """Parse a TOML file, or the table in the head of a script.

    Raises RefusedError if the file cannot be read, is not TOML, or is a script without a head.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            match = _HEAD_OF_SCRIPT.search(text)
            if match is None:
                raise RefusedError(
                    f"{file} has no requirements in its head (`# /// script`): name another file"
                )
            text = re.sub(r"(?m)^# ?", "", match.group(1))
        return tomllib.loads(text)  # type: ignore[no-any-return, unused-ignore]
    except (OSError, ValueError) as error:
        raise RefusedError(f"cannot read {file}: {error}") from error


def refuse_python(python: Any, file: Path, *, is_asked_for: bool = True) -> None:
    """Raise RefusedError if a project, a lock or a script is for another Python.

    uv does not check all of them.

    Args:
        python: The Python that gets the packages.
        file: The file.
        is_asked_for: Whether its requirements are installed. Otherwise a script without a head is
            for every Python.
    """
    if not is_asked_for and file.suffix == ".py" and not has_head(file):
        return
    table = table_of(file)
    requirement = str(table.get("project", table).get("requires-python", ""))
    present = python.markers().get("python_full_version") or platform.python_version()
    try:
        fits = not requirement or SpecifierSet(requirement).contains(present, prereleases=True)
    except ValueError as error:
        raise RefusedError(f"{file}: requires-python is {requirement}: {error}") from error
    if not fits:
        advice = f"choose an image with Python {requirement}"
        problem = f"{file}: requires-python is {requirement}, and this image has Python {present}"
        raise RefusedError(f"{problem}: {advice}", newer={"python": requirement})


def has_head(script: Path) -> bool:
    """Return whether a script has a head with its requirements (PEP 723)."""
    return _HEAD_OF_SCRIPT.search(script.read_text(encoding="utf-8", errors="replace")) is not None


def read_project(
    python: Any, file: Path, extras: Iterable[str], groups: Iterable[str]
) -> Iterator[Line]:
    """Yield the requirements of a project or a script, for checks. uv itself reads the file.

    Args:
        python: The Python that gets the packages.
        file: ``pyproject.toml``, or a script.
        extras: Names of the requested extras. One may name others of its own project.
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
        requirement = parse_applicable(python, str(row))
        if requirement and own_name and normalised(requirement.name) == own_name:
            open_sets += [("extra", normalised(name)) for name in requirement.extras]
        else:
            yield Line(str(file), str(row), requirement)


def sources_of(file: Path) -> Mapping[str, Any]:
    """Return the sources of requirements that a project or a script declares to uv."""
    own: Mapping[str, Any] = table_of(file).get("tool", {}).get("uv", {})
    return own.get("sources", {})  # type: ignore[no-any-return]


def project_in(word: str) -> tuple[Path, list[str]] | None:
    """Return the ``pyproject.toml`` of a folder that a word names, and its extras.

    For example of ``./code[gpu]``. None for another word.
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
    """Yield the packages of a ``pylock.toml`` that uv selects here, as lines with hashes.

    uv itself installs such a file as a whole or not at all, and so would replace packages that the
    image keeps.

    Args:
        file: The lock.
        words: Options of uv for extras and groups.
        installation: Calls of uv, which selects the packages without installing them.

    Raises:
        RefusedError: uv cannot use the lock, or the file cannot be read.
    """
    python = installation.python
    selected = python.selected(installation, ("-r", str(file), *words))
    chosen = {normalised(name): version for name, version in selected.items()}
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in table_of(file).get("packages", ()):
        name, version = normalised(row["name"]), str(row.get("version", ""))
        if name not in chosen:
            continue
        # A row or a selection without a version matches any version.
        if not version or chosen[name] in ("", version):
            rows.setdefault(name, []).append(row)

    indexes: set[str] = set()
    for several in rows.values():
        # Of several rows of a package the first whose marker is true; else the first one.
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
        yield Line(f"{file}: {row['name']}", text, parse_applicable(python, requirement))


def _fits(python: Any, row: Mapping[str, Any]) -> bool:
    """Return whether the marker of a lock's package is true; also if it cannot be evaluated."""
    if not row.get("marker"):
        return True
    try:
        marker = Marker(row["marker"])
        return bool(marker.evaluate({**python.markers(), "extra": ""}))
    except (ValueError, KeyError):
        return True


def _text_of_row(row: Mapping[str, Any], folder: Path) -> str:
    """Return a package of a ``pylock.toml`` as a line of a requirements file, with its hashes.

    Args:
        row: The package's table.
        folder: Folder of the lock, for relative paths.
    """
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
    """The requested requirements.

    Attributes:
        python: The Python that gets the packages.
        lines: Lines of the user, of requirements files and of locks, for uv.
        project_lines: Requirements of projects and scripts; uv reads their files itself.
        words: Other words for uv.
        options: Options of pip in files that uv has on its command line only.
        sources: Names that a project or a script takes from another source than an index.
        indexes: Lines of indexes from a lock.
        project: The folder with the ``[tool.uv]`` that counts; None for none.
    """

    def __init__(self, python: Any) -> None:
        """Begin with nothing."""
        self.python = python
        self.lines: list[Line] = []
        self.project_lines: list[Line] = []
        self.words: list[str] = []
        self.options: set[str] = set()
        self.sources: set[str] = set()
        self.indexes: list[str] = []
        self.project: Path | None = None


def read_words(python: Any, words: Sequence[str], installation: Any) -> Reading:
    """Read the files in the words of ``pip install``, each by its kind.

    Nothing is installed. uv may be called to read a lock. In a job, folders in requirements files
    are copied (``_with_private_copy``).

    Args:
        python: The Python that gets the packages.
        words: The words.
        installation: Calls of uv; None without uv, where only pip's files can be read.

    Raises:
        RefusedError: A file or a line cannot be read, or is for another Python or another tool.
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
                _add_project(file, own_extras, (), reading)

    # A group is FILE:NAME if several files could have the group.
    for group in groups:
        place, colon, name = group.rpartition(":")
        if colon:
            reading.words += ("--group", group)
            _add_project(Path(place), (), (name,), reading)
    of_files = [group for group in groups if ":" not in group]
    for file in files:
        _read(file, extras, of_files, reading, installation)
    return reading


def _add_project(
    file: Path, extras: Iterable[str], groups: Iterable[str], reading: Reading
) -> None:
    """Add the requirements and sources of a project or script to a reading.

    Raises RefusedError if the file cannot be read, or is for another Python.
    """
    refuse_python(reading.python, file)
    reading.project_lines += read_project(reading.python, file, extras, groups)
    reading.sources.update(map(normalised, sources_of(file)))
    reading.project = reading.project or file.parent.absolute()


def _read(
    file: Path, extras: Sequence[str], groups: Sequence[str], reading: Reading, installation: Any
) -> None:
    """Read one file by its kind into a reading: a requirements file, lock, project or script.

    Args:
        file: The file.
        extras: Names of the requested extras.
        groups: Names of dependency groups.
        reading: Gets the lines and words.
        installation: Calls of uv; None without uv.

    Raises:
        RefusedError: The file cannot be read, or only uv could read it.
    """
    is_pylock = _PYLOCK_NAME.fullmatch(file.name) is not None
    is_lock = is_pylock or file.name == _UV_LOCK
    is_script = file.suffix == ".py"
    # Any other name is that of a requirements file of pip.
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
            file, options = installation.export_lock(file, options), []
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
    _add_project(file, extras, groups, reading)
    reading.words += ["-r", str(file), *options]
    for name in groups:
        reading.words += ["--group", f"{file}:{name}"]
