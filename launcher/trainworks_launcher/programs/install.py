"""Installs requirements with uv and keeps what the image was built around: one program, for a job and for an extension.

Run as ``python -I install.py [--manifest FILE] [--strict] -- WORDS``, with the Python that it installs for. WORDS are
those of ``pip install``: folders, ``-r FILE``, options that uv has too. The image's manifest says what is kept
(``protected``), what is compiled against that (``companions``), what other builds of it need (``libraries``), what
compiles with a component that the image lacks: later (``compiled_by``), or while it is installed (``needs``); and what
is built with the image's packages in sight (``built_whole``).

1. The files are read: those of pip's line by line (``pip_files.py``), projects, locks and scripts by uv. What asks for
   an older or another build of what is kept is answered with what the image has, and printed; a newer one is refused.
2. uv gets the other lines, with what is kept as constraints and with pip's settings. It resolves and installs.
3. What of the image lost a requirement is asked for in a second call.
4. What must fit what is kept, or what went back, is imported once; what moved is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import runpy
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

from pip._vendor.packaging.markers import Marker  # type: ignore[import-not-found, unused-ignore]
from pip._vendor.packaging.requirements import Requirement  # type: ignore[import-not-found, unused-ignore]
from pip._vendor.packaging.specifiers import SpecifierSet  # type: ignore[import-not-found, unused-ignore]
from pip._vendor.packaging.version import Version  # type: ignore[import-not-found, unused-ignore]

# Beside this file: it runs with the user's Python, which has nothing else of ours.
sys.path.insert(0, str(Path(__file__).parent))

import pip_files  # type: ignore[import-not-found]

sys.path.pop(0)

# Those of contract/names.py.
_RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"
_MANIFEST_VARIABLE, _MANIFEST = "TRAINWORKS_IMAGE_MANIFEST", "/opt/trainworks/image.json"
_CONSTRAINTS = "constraints.txt"
"""Beside the manifest: the image's own for pip and uv. In an image built on ours another version may be installed."""
_IMPORT_SECONDS = 300
_CONDA = "is conda's: `conda run -n NAME python -m pip list --format=freeze > requirements.txt` writes what pip reads"
_OTHERS = {
    r".*\.ya?ml": _CONDA,
    r"Pipfile(\.lock)?": "is pipenv's: `pipenv requirements > requirements.txt` writes what pip reads",
    r"poetry\.lock": "is Poetry's: `poetry export -o requirements.txt` (poetry-plugin-export) writes what pip reads",
    r"setup\.(py|cfg)": "belongs to a project: name its folder in a requirements file, such as ./",
}
_SOURCES = ("--index-url", "--extra-index-url", "--find-links")
_PROJECT, _UV_LOCK = "pyproject.toml", "uv.lock"
_PYLOCK = re.compile(r"pylock(\.[^.]+)?\.toml")
_SCRIPT = re.compile(r"(?m)^# /// script[ \t]*\r?\n((?:#(?: .*)?\r?\n)+?)# ///[ \t]*\r?$")
"""The table in a script's head (PEP 723)."""
_TRAPS = {"pytorch": "torch", "apex": "apex @ git+ the address of NVIDIA's repository"}
"""Names under which the package index has something else than what people mean."""
_LEFT_OUT = (
    *("cudatoolkit", "pkg-resources", "pypiwin32", "pyobjc", "pyobjc-core", "python", "pywin32", "pywinpty"),
    *("tensorflow-macos", "tensorflow-metal", "windows-curses"),
)
"""What pip freeze writes on other systems or by a mistake of Debian's, and conda's own; no index has it for Linux."""


class RefusedError(Exception):
    """Why nothing is installed, for a person; ``newer``: what another image would have to have, name to specifier."""

    def __init__(self, *problems: str, newer: Mapping[str, str] | None = None) -> None:
        """problems: a line each."""
        super().__init__("; ".join(problems))
        self.problems, self.newer = problems, dict(newer or {})


def say(text: str) -> None:
    """Print a line for the log."""
    sys.stderr.write(f"trainworks: {text}\n")
    sys.stderr.flush()


# --------------------------------------------------------------------------------------------- what is installed
def normalised(name: str) -> str:
    """Return a distribution's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Here:
    """The Python that is installed for: the one that runs this file.

    The builder installs for a Python that it may not run, and puts another one of these in the place of ``HERE``.
    """

    words: tuple[str, ...] = ("--python", sys.executable)
    """What names it for uv."""

    def distributions(self) -> Iterable[metadata.Distribution]:
        """Return what it has, in the order of its search path."""
        return metadata.distributions()

    def markers(self) -> dict[str, str]:
        """Return what environment markers are compared with, beside what this process knows."""
        return {}

    def tags(self) -> Iterable[Any]:
        """Return the tags of wheels that fit."""
        from pip._vendor.packaging.tags import sys_tags  # type: ignore[import-not-found, unused-ignore]

        return sys_tags()  # type: ignore[no-any-return, unused-ignore]

    def install(self, installation: Installation, words: Sequence[str], *, quiet: bool) -> int:
        """Install with uv, and return its status."""
        return installation.call("pip", "install", *self.words, *words, quiet=quiet).returncode

    def selected(self, installation: Installation, words: Sequence[str]) -> dict[str, str]:
        """Return what uv takes of a lock: name to version, ``""`` where it says none. Raises RefusedError."""
        nothing = str(installation.folder / "nothing")
        form = ("--quiet", "--dry-run", "--output-format", "json", "--target", nothing)
        done = installation.call("pip", "install", *self.words, *form, *words, quiet=True, stdout=subprocess.PIPE)
        if done.returncode:
            raise RefusedError(f"uv cannot use {words[1]}: {done.stderr.decode('utf-8', 'replace').strip()}")
        return {row["name"]: row.get("version", "") for row in json.loads(done.stdout)["changes"]}

    def import_error(self, modules: Sequence[str]) -> str:
        """Import modules as a script would, and return the last words of it; ``""`` for success."""
        return import_error(*modules)


def distributions() -> dict[str, metadata.Distribution]:
    """Return what the Python has, by name; of two of one name the first is imported."""
    found: dict[str, metadata.Distribution] = {}
    for each in HERE.distributions():
        if each.metadata["Name"]:
            found.setdefault(normalised(each.metadata["Name"]), each)
    return found


def versions() -> dict[str, str]:
    """Return the versions of what the Python has."""
    return {name: each.version for name, each in distributions().items()}


def applying(text: str) -> Any:
    """Return a requirement that applies to this machine; None for another, and for what is not a requirement."""
    try:
        wanted = Requirement(text)
    except ValueError:
        return None
    return wanted if wanted.marker is None or wanted.marker.evaluate({**HERE.markers(), "extra": ""}) else None


def needs_of(each: metadata.Distribution) -> Iterator[Any]:
    """Yield what a distribution requires on this machine."""
    return filter(None, map(applying, each.requires or ()))


def losing() -> dict[str, Any]:
    """Return the distributions that lack what they require, in a version that they accept: name to the first one."""
    found = distributions()
    lacking: dict[str, Any] = {}
    for name, each in found.items():
        for wanted in needs_of(each):
            other = found.get(normalised(wanted.name))
            if other is None or not wanted.specifier.contains(other.version, prereleases=True):
                lacking.setdefault(name, wanted)
    return lacking


def is_later(version: str, have: str) -> bool:
    """Whether a version is of a later release than another; its build does not count."""
    try:
        return bool(Version(version.replace(".*", "")).release > Version(have).release)
    except ValueError:
        return False


def build_of(name: str, version: str) -> str:
    """Return the version with its build that a module says of itself, such as ``VERSION+cu121``; or the version."""
    try:
        path = Path(str(distributions()[name].locate_file(f"{name}/version.py")))
        said = re.search(r"(?m)^__version__\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)", path.read_text(errors="replace"))
    except (KeyError, OSError):
        return version
    return said.group(1) if said and said.group(1).startswith(f"{version}+") else version


# --------------------------------------------------------------------------------------------- what the user asks for
class Line(NamedTuple):
    """A line of the user's own.

    Attributes:
        place: Where it stands.
        text: For uv.
        wanted: The requirement that it is, if it applies; ``None`` for an option, and for what only uv can read.
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


def read_file(file: Path, options: set[str]) -> Iterator[Line]:
    """Yield the lines of a requirements file and of what it includes, as pip's own parser reads them.

    Args:
        file: The file.
        options: Gets those of pip's options that uv takes on its command line only.

    Raises:
        RefusedError: The file, or a line of it, is another tool's, or pip cannot read it.
    """
    if other := next((sentence for pattern, sentence in _OTHERS.items() if re.fullmatch(pattern, file.name)), ""):
        raise RefusedError(f"{file} {other}")
    try:
        rows = list(pip_files.read_rows(file))
    except UnicodeDecodeError as error:
        raise RefusedError(f"{file} is not UTF-8: `iconv -f LATIN1 -t UTF-8` converts it") from error
    except OSError as error:
        raise RefusedError(f"cannot open {error.filename or file}: {error.strerror}") from error
    except pip_files.SettingsError as error:
        raise RefusedError(str(error)) from error
    for row in rows:
        place = row.place or f"{row.file} line {row.number}"
        editable = [*row.options.editable, ""][0]
        if text := row.requirement or editable:
            yield _requirement(place, text, row, is_editable=not row.requirement)
        else:
            yield from _lines_of_options(place, row, options)


def _lines_of_options(place: str, row: Any, options: set[str]) -> Iterator[Line]:
    """Yield a line of options as lines of uv; those that uv has on its command line only go to ``options``."""
    given = row.options
    options |= {"--prerelease=allow"} if given.pre else set()
    options |= {"--require-hashes"} if given.require_hashes else set()
    options |= {f"--allow-insecure-host={host}" for host in given.trusted_host}
    if given.prefer_binary:
        say(f"{place}: --prefer-binary is left out: uv takes the newest release that fits; --only-binary is kept")
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


def _requirement(place: str, text: str, row: Any, *, is_editable: bool) -> Line:
    if re.match(r"[\w.-]+=[^=]", text):
        raise RefusedError(f"{place}: {text} {_CONDA}")
    local = re.match(r"([\w.-]+)(?:\[.*\])?\s*@\s*file://(/[^;#\s]+)", text)
    if local and not Path(urllib.request.url2pathname(local.group(2))).exists():
        raise RefusedError(f"{place}: {local.group(2)} does not exist. A line that `pip freeze` wrote so {_CONDA}")
    if row.options.config_settings or row.options.global_option:
        raise RefusedError(f"{place}: options of a build are not handed to it: name the address of a wheel")
    wanted = applying(text)
    if wheel := re.search(r"[^/\s@]+\.whl", text):  # its file name says which release it is, and for what
        from pip._vendor.packaging.utils import parse_wheel_filename  # type: ignore[import-not-found, unused-ignore]

        file, marker = urllib.request.url2pathname(wheel.group()), text.partition(";")[1:]
        try:
            name, version, _, tags = parse_wheel_filename(file)
        except ValueError as error:
            raise RefusedError(f"{place}: {error}") from error
        wanted = applying(f"{name}=={version}{' '.join(marker)}")
        # As texts: the builder's own packaging has another class for them.
        fitting = [str(tag) for tag in HERE.tags()]
        if wanted and set(map(str, tags)).isdisjoint(fitting):
            raise RefusedError(f"{place}: {file} is for another Python or system; this is {fitting[0]}")
    if not is_editable:
        text = _with_private_copy(text)
    hashes = "".join(f" --hash={each}" for each in row.options.hash)
    return Line(place, f"{'-e ' if is_editable else ''}{text}{hashes}", wanted, row.constraint)


_FOLDER = re.compile(r"(?P<before>[\w.-]+(?:\[[^\]]*\])?\s*@\s*)?(?:file://)?(?P<path>[^\s;\[#]*/[^\s;\[#]*|\.{1,2})")


def _with_private_copy(text: str) -> str:
    """Return a line that names a folder with a copy of it, where a job installs: hosts may share the folder.

    What lies around it in the working directory is linked: its version may come from there.
    """
    found = _FOLDER.match(text)
    folder = Path(os.path.normpath(urllib.request.url2pathname(found["path"]))).absolute() if found else None
    if found is None or folder is None or _RUNTIME_DIRECTORY not in os.environ or not folder.is_dir():
        return text
    copy = runpy.run_path(str(Path(__file__).with_name("copied.py")))["copy_of_folder"]
    return f"{found['before'] or ''}{Path(copy(str(folder), str(Path.cwd()))).as_uri()}{text[found.end() :]}"


def table_of(file: Path) -> Mapping[str, Any]:
    """Return the content of a TOML file, or of the table in a script's head. Raises RefusedError."""
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        from pip._vendor import tomli as tomllib  # type: ignore[import-not-found, no-redef, unused-ignore]
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            found = _SCRIPT.search(text)
            if found is None:
                raise RefusedError(f"{file} has no requirements in its head (`# /// script`): name another file")
            text = re.sub(r"(?m)^# ?", "", found.group(1))
        return tomllib.loads(text)  # type: ignore[no-any-return, unused-ignore]
    except (OSError, ValueError) as error:
        raise RefusedError(f"cannot read {file}: {error}") from error


def refuse_python(file: Path) -> None:
    """Raise RefusedError where a project, a lock or a script is for another Python: uv does not look at all of them."""
    table = table_of(file)
    wanted = str(table.get("project", table).get("requires-python", ""))
    have = HERE.markers().get("python_full_version") or platform.python_version()
    if wanted and not SpecifierSet(wanted).contains(have, prereleases=True):
        advice = f"choose an image with Python {wanted}"
        raise RefusedError(f"{file}: requires-python is {wanted}, and this image has Python {have}: {advice}")


def read_project(file: Path, extras: Iterable[str], groups: Iterable[str]) -> Iterator[Line]:
    """Yield what a project or a script asks for itself, to look at it: uv reads the file, and decides what it means.

    Args:
        file: ``pyproject.toml``, or a script.
        extras: Names of the extras that are wanted. One may name others of its own project.
        groups: Names of dependency groups.
    """
    table = table_of(file)
    project = table if file.suffix == ".py" else table.get("project", {})
    own = normalised(str(project.get("name", "")))
    there = {
        "extra": {normalised(name): rows for name, rows in project.get("optional-dependencies", {}).items()},
        "group": {normalised(name): rows for name, rows in table.get("dependency-groups", {}).items()},
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
        wanted = applying(str(row))
        if wanted and own and normalised(wanted.name) == own:
            open_sets += [("extra", name) for name in wanted.extras]
        else:
            yield Line(str(file), str(row), wanted)


def sources_of(file: Path) -> Mapping[str, Any]:
    """Return where a project or a script has its requirements from, as it says to uv."""
    own: Mapping[str, Any] = table_of(file).get("tool", {}).get("uv", {})
    return own.get("sources", {})  # type: ignore[no-any-return]


def project_in(word: str) -> tuple[Path, list[str]] | None:
    """Return the ``pyproject.toml`` of a folder that a word names, and its extras; None for another word."""
    found = re.fullmatch(r"(?P<path>[^-].*?)(?:\[(?P<extras>[^\]]*)\])?", word)
    if not found:
        return None
    is_address = found["path"].startswith("file://")
    place = urllib.request.url2pathname(found["path"][len("file://") :]) if is_address else found["path"]
    extras = [each.strip() for each in (found["extras"] or "").split(",") if each.strip()]
    file = Path(place, _PROJECT)
    return (file, extras) if file.is_file() else None


def read_lock(file: Path, words: Sequence[str], installation: Installation) -> Iterator[Line]:
    """Yield what uv takes of a ``pylock.toml`` for this machine, as lines with hashes. Raises RefusedError.

    uv installs such a file as a whole or not at all, and so it would replace what the image keeps.
    """
    chosen = {
        normalised(name): version for name, version in HERE.selected(installation, ("-r", str(file), *words)).items()
    }
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in table_of(file).get("packages", ()):
        name = normalised(row["name"])
        if name in chosen and chosen[name] in ("", str(row.get("version", "")) or chosen[name]):
            rows.setdefault(name, []).append(row)
    indexes: set[str] = set()
    for several in rows.values():
        row = several[0] if len(several) == 1 else next(filter(_is_for_us, several), several[0])
        index = str(row.get("index", "")).rstrip("/")
        if index and index not in indexes and not pip_files.is_default(index):
            indexes.add(index)
            yield Line(str(file), f"--extra-index-url {index}")
        text = _text_of_row(row, file.parent)
        wanted = applying(f"{row['name']}=={row['version']}" if row.get("version") else row["name"])
        yield Line(f"{file}: {row['name']}", text, wanted)


def _is_for_us(row: Mapping[str, Any]) -> bool:
    try:
        return not row.get("marker") or bool(Marker(row["marker"]).evaluate({**HERE.markers(), "extra": ""}))
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
        return _with_private_copy(f"{name} @ {Path(folder, row['directory']['path']).resolve().as_uri()}")
    files = [archive] if archive else [*row.get("wheels", ()), *filter(None, [row.get("sdist")])]
    hashes = "".join(f" --hash={kind}:{value}" for each in files for kind, value in each["hashes"].items())
    if archive:
        address = archive.get("url") or Path(folder, archive["path"]).resolve().as_uri()
        return f"{name} @ {address}{hashes}"
    return f"{name}=={row['version']}{hashes}"


class Reading:
    """What the words of an installation ask for.

    Attributes:
        lines: The user's own lines, of requirements files and of locks: uv gets them.
        looked_at: What projects and scripts ask for themselves: uv reads their files.
        words: What uv gets beside the lines.
        options: Options of pip's in files, which uv takes on its command line only.
        sources: Names that a project or a script has from elsewhere than an index of pip's settings.
        indexes: Lines of indexes that are a lock's.
        project: The folder whose ``[tool.uv]`` counts; None for none.
    """

    def __init__(self) -> None:
        """Of nothing."""
        self.lines: list[Line] = []
        self.looked_at: list[Line] = []
        self.words: list[str] = []
        self.options: set[str] = set()
        self.sources: set[str] = set()
        self.indexes: list[str] = []
        self.project: Path | None = None


def read_words(words: Sequence[str], installation: Installation | None) -> Reading:
    """Read the files that words name, each with what reads its kind. Raises RefusedError.

    Args:
        words: Of an installation.
        installation: uv; None where there is none: then only files of pip's are read.
    """
    found, rest = Reading(), iter(words)
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
    refuse_python(file)
    found.looked_at += read_project(file, extras, groups)
    found.sources.update(map(normalised, sources_of(file)))
    found.project = found.project or file.parent.absolute()


def _read(
    file: Path, extras: Sequence[str], groups: Sequence[str], found: Reading, installation: Installation | None
) -> None:
    is_lock = file.name == _UV_LOCK or _PYLOCK.fullmatch(file.name)
    if not is_lock and file.name != _PROJECT and file.suffix != ".py":
        found.lines += read_file(file, found.options)
        return
    if installation is None:
        raise RefusedError(f"{file} is read by uv, and this image has no uv")
    refuse_python(file)
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


class Answer:
    """What of the user's own lines is answered with what the image has.

    Attributes:
        kept: Name to version.
        excluded: Names that uv leaves out wherever they are asked for.
        freed: Companions of which a project asks for a version that goes with another framework: uv takes any.
        said: Lines for the log: what is not installed as it was asked for.
        lines: What uv gets.
        left: Where indexes are named that are left out.
    """

    def __init__(self, manifest: Mapping[str, Any], reading: Reading) -> None:
        """Look at what is asked for. Raises RefusedError with all lines that ask for what the image cannot give."""
        lines = [*reading.lines, *reading.looked_at]
        there = distributions()
        protected, companions = manifest.get("protected", {}), manifest.get("companions", {})
        self.kept = {name: there[name].version if name in there else version for name, version in protected.items()}
        self.excluded, self.said, self.lines = set(_LEFT_OUT), [], list(reading.lines)
        self.left: list[str] = []
        refused, newer = [], {}
        needs = [(owner, each) for owner in self.kept if owner in there for each in needs_of(there[owner])]
        for line in lines:
            name, place = line.name, line.place
            if not name:
                self._look_at_index(line, manifest.get("wheel_index", ""))
                continue
            have, specifier, asked = self.kept.get(name, ""), line.wanted.specifier, f"{name}{line.wanted.specifier}"
            newer.update({name: str(specifier)} if name in companions and specifier else {})
            if name in _TRAPS and not line.wanted.url:
                refused.append(f"{place}: {name} of the package index is something else: ask for {_TRAPS[name]}")
            elif name in _LEFT_OUT:
                self.said.append(f"{place}: {asked} is left out: it is not for this system")
            elif have and not _holds(line.wanted, have):
                if any(is_later(each.version, have) for each in specifier if each.operator[0] not in "<!"):
                    newer[name] = str(specifier)
                    refused.append(f"{place}: {asked}, and this image has {name} {have}: choose an image with {asked}")
                elif not _holds(line.wanted, build_of(name, have)):
                    what = "an address" if line.wanted.url else asked
                    self.said.append(f"{place}: {what} is not installed: this image keeps {name} {have}")
                self.excluded.add(name)
            elif not have:
                exact = [each.version for each in specifier if re.match(r"==[^*]+$", str(each))]
                for owner, need in needs if exact else ():
                    if normalised(need.name) == name and not need.specifier.contains(exact[0], prereleases=True):
                        what = f"this image's {owner} {self.kept[owner]} needs {name}{need.specifier}"
                        self.said.append(f"{place}: {asked} is not installed: {what}")
                        self.excluded.add(name)
        self.freed = self._free_companions(lines, companions)
        if self.excluded & set(self.kept):
            self.excluded |= set(self.kept)
        if self.excluded - set(_LEFT_OUT):  # so these lines are of another build of the framework
            missing = {normalised(name) for name in manifest.get("libraries", ())} - set(there)
            named = sorted({line.name for line in lines} & missing)
            self.said += [f"{', '.join(named)}: not installed, only another build needs them"] if named else []
            self.excluded |= missing
        if refused:
            raise RefusedError(*refused, newer=newer)
        # A project has them from an index of another build, or from a folder of its own.
        self.without_source = sorted(reading.sources & {*self.kept, *companions})
        self.said += [f"the source of {name} is not used: this image has its own" for name in self.without_source]

    def _free_companions(self, lines: Sequence[Line], companions: Mapping[str, str]) -> list[str]:
        """Let companions of a framework that is answered have any version: theirs goes with the one that was asked for.

        Args:
            lines: What is asked for.
            companions: Names to the names of their frameworks.

        Returns:
            Names of those that a project asks for: its file is uv's to read.
        """
        freed = []
        for line in lines:
            framework = companions.get(line.name, "")
            if not framework:
                continue
            exact = [each.version for each in line.wanted.specifier if re.match(r"===?[^*]+$", str(each))]
            own = build_of(framework, self.kept.get(framework, "")).partition("+")[2]
            builds = {version.partition("+")[2] for version in exact} - {"", own}
            is_answered = framework in self.excluded and (exact or line.wanted.url)
            if not is_answered and not builds:
                continue
            asked = "an address" if line.wanted.url else f"{line.name}{line.wanted.specifier}"
            have = f"{framework} {self.kept.get(framework, '')}"
            self.said.append(f"{line.place}: {asked} goes with another {framework}: the release for {have} is taken")
            if line in self.lines:
                name = Requirement(line.name)
                self.lines[self.lines.index(line)] = Line(line.place, line.name, name, line.constraint)
            else:
                freed.append(line.name)
        return freed

    def _look_at_index(self, line: Line, own: str) -> None:
        """Leave out an index of the framework's vendor that has another build than the image's own."""
        option, _, address = line.text.partition(" ")
        host = re.match(r"https?://[^/]+/", own)
        if option in _SOURCES and host and address.startswith(host.group()) and address.rstrip("/") != own:
            say(f"{line.place}: {address} is not needed: it has another build than this image")
            self.lines.remove(line)
            self.left.append(line.place)


def _holds(wanted: Any, version: str) -> bool:
    return not wanted.url and bool(wanted.specifier.contains(version, prereleases=True))


# --------------------------------------------------------------------------------------------- pip's settings, for uv
def settings_of_pip() -> Any:
    """Return what ``pip install`` would use. Raises RefusedError."""
    try:
        return pip_files.read_settings()
    except pip_files.SettingsError as error:
        raise RefusedError(str(error)) from error


def for_uv(pip: Any, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return what pip would use as variables and options of uv; what may have a password is in a file of this folder.

    Args:
        pip: pip's settings.
        folder: A private one.
    """
    has_keyring = pip.keyring_provider != "disabled" and shutil.which("keyring")
    rows: dict[str, object] = {
        "keyring-provider": "subprocess" if has_keyring else "disabled",
        "find-links": [each if "://" in each else str(Path(each).expanduser().absolute()) for each in pip.find_links],
        "allow-insecure-host": pip.trusted_hosts,
        "no-build-isolation": not pip.build_isolation,
        "no-index": pip.no_index,
        **({"prerelease": "allow"} if pip.pre else {}),
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in rows.items())
    text += "".join(f"\n[[index]]\nurl = {json.dumps(each)}\n" for each in pip.extra_index_urls)
    if pip.index_url:
        text += f"\n[[index]]\nurl = {json.dumps(pip.index_url)}\ndefault = true\n"
    # uv's place for a system's settings: those of a project count, too, and come first.
    file = folder / "settings" / "uv" / "uv.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")
    bundle = next(filter(None, [pip.cert, *map(os.environ.get, ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))]), "")
    found = {
        "XDG_CONFIG_DIRS": str(folder / "settings"),
        "UV_PROJECT": str(folder),
        "UV_NO_PROGRESS": "1",
        "UV_SYSTEM_CERTS": "1",
        "SSL_CERT_FILE": bundle,
        "SSL_CLIENT_CERT": pip.client_cert,
        "UV_HTTP_TIMEOUT": str(math.ceil(float(pip.timeout))) if pip.timeout else "",
        "UV_HTTP_RETRIES": pip.retries,
        "HTTP_PROXY": pip.proxy,
        "HTTPS_PROXY": pip.proxy,
        "UV_CACHE_DIR": "" if os.access(str(Path.home()), os.W_OK) else str(folder / "cache"),
        "UV_BREAK_SYSTEM_PACKAGES": "1" if pip.break_system_packages else "",
        # With several indexes pip asks all; with one only, uv says more of what is wrong with it.
        "UV_INDEX_STRATEGY": "unsafe-best-match" if pip.extra_index_urls else "",
    }
    values: dict[str, Iterable[str]] = {
        "no-binary": pip.no_binary,
        "only-binary": pip.only_binary,
        "constraint": _without_the_images(pip.constraints),
        "target": filter(None, [pip.target]),
        "prefix": filter(None, [pip.prefix]),
    }
    options = [f"--{name}={each}" for name, several in values.items() for each in sorted(several)]
    options += ["--no-deps"] if pip.no_deps else []
    own = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
    own["UV_CONSTRAINT"] = " ".join(_without_the_images(own.get("UV_CONSTRAINT", "").split()))
    return {**{name: value for name, value in found.items() if value}, **own}, options


def _without_the_images(constraints: Iterable[str]) -> list[str]:
    """Return files of constraints without the image's own: what is installed counts, and is a constraint already."""
    manifest = os.environ.get(_MANIFEST_VARIABLE) or _MANIFEST
    own = {str(Path(file).with_name(_CONSTRAINTS)) for file in (manifest, _MANIFEST)}
    return [each for each in constraints if each not in own]


# --------------------------------------------------------------------------------------------- the installation
def find_uv() -> str:
    """Return the path of uv: beside this Python, or on PATH; ``""`` where there is none."""
    return (
        shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))) or ""
    )


class Installation:
    """Calls of uv for this Python, one after the other.

    Attributes:
        folder: A private one, for uv's files.
        before: The versions before the first one.
        pinned: Names of which a line of the user's own asks for one version.
        pip: The options that ``pip install`` would have.
    """

    def __init__(self, uv: str, folder: Path) -> None:
        """folder: a private one, for uv's files."""
        self.before, self._lacking = versions(), losing()
        self._uv, self.folder = uv, folder
        self.pinned: set[str] = set()
        self.pip = settings_of_pip()
        variables, more = for_uv(self.pip, folder)
        self.environment = {**os.environ, **variables}
        self.options = more
        self._kept: tuple[str, ...] = ()
        self._sources: tuple[str, ...] = ()

    def file(self, name: str, lines: Iterable[str]) -> str:
        """Write a file for uv, and return its path."""
        path = self.folder / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    def call(self, *words: str, quiet: bool = False, **more: Any) -> subprocess.CompletedProcess[Any]:
        """Call uv with pip's settings. quiet: what it says is shown where it succeeds only."""
        errors = subprocess.PIPE if quiet else None
        done = subprocess.run((self._uv, *words), env=self.environment, check=False, stderr=errors, **more)
        if quiet and done.returncode == 0:
            sys.stderr.write(done.stderr.decode("utf-8", "replace"))
        return done

    def exported(self, file: Path, words: Sequence[str]) -> Path:
        """Return a ``uv.lock``, or the lock of a script, as a ``pylock.toml``: nothing is resolved, and nothing is run.

        Args:
            file: The lock of a project, or the script.
            words: Extras and groups.

        Raises:
            RefusedError: uv cannot read it.
        """
        target = self.folder / f"of-{file.stem}" / "pylock.toml"
        target.parent.mkdir(exist_ok=True)
        own = ("--script", str(file)) if file.suffix == ".py" else ("--project", str(file.parent.absolute()))
        plain = ("--no-emit-project", "--no-default-groups") if file.suffix != ".py" else ()
        form = ("--frozen", "--quiet", "--no-header", "--format", "pylock.toml", "--output-file", str(target))
        done = self.call("export", *own, *plain, *form, *words, quiet=True, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise RefusedError(f"{file} cannot be read: {done.stderr.decode('utf-8', 'replace').strip()}")
        return target

    def install(self, *words: str, quiet: bool = False) -> int:
        """Install, and return uv's status."""
        return int(HERE.install(self, (*self.options, *words), quiet=quiet))

    def first(self, words: Sequence[str], answer: Answer, needs: Mapping[str, str]) -> int:
        """Install what is asked for, without indexes of the user's file that do not answer, as pip does.

        Return uv's status. Raises RefusedError for what would be compiled, and cannot be.
        """
        kept = [f"{name}=={version}" for name, version in answer.kept.items()]
        self._kept = ("-c", self.file("kept.txt", kept)) if kept else ()
        excluded = ["--excludes", self.file("excluded.txt", sorted(answer.excluded))]
        if answer.freed:
            excluded += ["--overrides", self.file("freed.txt", answer.freed)]
        lines = answer.lines
        self.pinned = {line.name for line in lines if line.name and _is_pin(line.wanted)}
        asked = [line for line in lines if line.text.startswith(_SOURCES[1:]) and "://" in line.text]
        if any(line.text.startswith(_SOURCES[1]) for line in asked):
            self.environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        while True:
            limits = [line.text for line in lines if line.constraint]
            options = [line.text for line in lines if line.text.startswith("--")]
            self._sources = ("-r", self.file("sources.txt", options)) if options else ()
            given = (
                ["-r", self.file("wanted.txt", [line.text for line in lines if not line.constraint])] if lines else []
            )
            given += ["-c", self.file("limits.txt", limits)] if limits else []
            self._refuse_compiled([line for line in lines if line.name in needs], options, needs)
            status = self.install(*words, *given, *excluded, *self._kept)
            dead = [line for line in asked if status and line in lines and not self._answers(line.text.split(" ")[1])]
            if not dead:
                return status
            for line in dead:
                say(f"{line.place}: {_plain(line.text)} does not answer: it is left out, as pip does")
                answer.left.append(line.place)
            lines = [line for line in lines if line not in dead]

    def _refuse_compiled(self, lines: Sequence[Line], options: Sequence[str], needs: Mapping[str, str]) -> None:
        """Raise RefusedError for lines whose distributions have no wheel, and whose compiler is not there."""
        refused = []
        for line in [line for line in lines if not line.wanted.url and not line.constraint]:
            one = self.file("one.txt", [*options, re.sub(r" --hash=.*", "", line.text)])
            dry = ("--dry-run", "--no-deps", "--only-binary=:all:", "--target", str(self.folder / "none"))
            if self.call("pip", "install", *HERE.words, *dry, "-r", one, quiet=True).returncode == 1:
                name = needs[line.name]
                refused.append(
                    f"{line.place}: {line.name} is compiled by {name}, which is not there, and no wheel fits; use "
                    f"`--with {name}` on a target of CUDA 13, name the address of a wheel, or leave it out"
                )
        if refused:
            raise RefusedError(*refused)

    def _answers(self, address: str) -> bool:
        """Whether a package index can be reached: any answer counts."""
        proxy = self.pip.proxy
        proxies = urllib.request.ProxyHandler({"http": proxy, "https": proxy} if proxy else None)
        try:
            urllib.request.build_opener(proxies).open(_plain(address), timeout=20).close()
        except urllib.error.HTTPError:
            return True
        except (OSError, ValueError) as error:
            return isinstance(getattr(error, "reason", None), ssl.SSLError)
        return True

    def mend(self, answer: Answer, companions: Mapping[str, str]) -> None:
        """Let what lost its requirements move, too: wheels only, as nobody asked for it.

        Raises RefusedError for what the image keeps, and for what the user's own lines ask for in just this version.
        """
        tried: set[str] = set()
        while True:
            lacking, now = losing(), distributions()
            new = sorted(name for name in lacking if name not in self._lacking and name not in tried)
            # A project of the user's own stays, and a line said what it does not get.
            lost = [name for name in new if '"dir_info"' not in (now[name].read_text("direct_url.json") or "")]
            tried.update(new)
            if not lost:
                return
            for name in lost:
                what, need = f"{name} {now[name].version}", f"{lacking[name].name}{lacking[name].specifier}"
                have = answer.kept.get(normalised(lacking[name].name), "")
                if name in answer.kept:
                    what = f"the requirements take from this image's {what} what it requires ({need})"
                    raise RefusedError(f"{what}; ask for other versions")
                if have and name in self.pinned and name not in companions:
                    raise RefusedError(
                        f"{what} requires {need}, and this image has {lacking[name].name} {have}; ask for a version of"
                        f" {name} that fits {have}, or choose an image with {need}"
                    )
            if not self.moved(lost):
                for name in [name for name in lost if not self.moved([name])]:
                    need = f"{lacking[name].name}{lacking[name].specifier}"
                    say(f"{name} {now[name].version} stays, and does not go with the requirements: it requires {need}")

    def moved(self, wanted: Sequence[str], *more: str) -> bool:
        """Ask for distributions beside what was brought, which stays as it is; return whether that went."""
        names = [re.split("[<=]", each)[0] for each in wanted]
        now = {name: version for name, version in versions().items() if name not in names}
        brought = [f"{name}=={version}" for name, version in now.items() if self.before.get(name) != version]
        limits = (*self._sources, *self._kept, "-c", self.file("brought.txt", brought))
        only = [f"--only-binary={name}" for name in names]
        return self.install(*wanted, *only, *more, *limits, quiet=True) == 0


def _is_pin(wanted: Any) -> bool:
    return bool(wanted.url or any(each.operator.startswith("==") for each in wanted.specifier))


def _plain(address: str) -> str:
    return re.sub(r"(://)[^/@]*@", r"\1", address)


def elsewhere(home: str) -> Mapping[str, str]:
    """Return an environment for imports: what packages write when they are first imported goes to this folder."""
    return {**os.environ, "HOME": home, "XDG_CACHE_HOME": home, "MPLCONFIGDIR": home}


def import_error(*modules: str) -> str:
    """Import modules in a process of their own, as a script would, and return its last words; ``""`` for success."""
    words, nothing = (sys.executable, "-I", "-B", "-c", f"import {', '.join(modules)}"), subprocess.DEVNULL
    try:
        with tempfile.TemporaryDirectory(dir=os.environ.get(_RUNTIME_DIRECTORY)) as home:
            given: Any = {"stdin": nothing, "timeout": _IMPORT_SECONDS, "env": elsewhere(home)}
            done = subprocess.run(words, capture_output=True, check=False, **given)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    said = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return "" if done.returncode == 0 else (said or [f"import ended with status {done.returncode}"])[-1]


def modules_of(name: str) -> list[str]:
    """Return the top modules of a distribution that has compiled code; none for another."""
    files = distributions()[name].files or ()
    tops = {file.parts[0].split(".")[0] for file in files if len(file.parts) > 1 or file.suffix == ".py"}
    compiled = {file.parts[0].split(".")[0] for file in files if file.suffix == ".so"}
    return sorted(top for top in tops & compiled if top.isidentifier() and f"{top}/__init__.py" in map(str, files))


def look_at_companions(manifest: Mapping[str, Any], installation: Installation) -> None:
    """Import what was compiled against what the image keeps; raise RefusedError where that fails."""
    before, after, index = installation.before, versions(), manifest.get("wheel_index", "")
    has_source = installation.pip.names_a_source
    for name, framework in manifest.get("companions", {}).items():
        module = name.replace("-", "_")
        error = HERE.import_error((module,)) if after.get(name) != before.get(name) else ""
        if error and index and not has_source:
            say(f"{name} is taken from {index}, which has the build for this image")
            installation.environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
            installation.moved([name], f"--reinstall-package={name}", f"--index={index}")
            error = HERE.import_error((module,))
        if error:
            what = f"{name} {versions().get(name, '')} does not work with this image's {framework} {after[framework]}"
            way = f"add --extra-index-url {index} to the requirements file" if index else "ask for a build that fits"
            raise RefusedError(f"{what} ({error}); {way}, or remove it")


def look_at_older(installation: Installation) -> None:
    """Take an older release of what fails beside what went back, as pyarrow does beside numpy 1: no metadata say it."""
    before, after = installation.before, versions()
    back = [name for name, old in before.items() if is_later(old, after.get(name, old))]
    for name in [name for name in after if back and after[name] != before.get(name) and name not in back]:
        modules = modules_of(name)
        error = HERE.import_error(modules) if modules else ""
        if not any(other in error.lower() for other in back):
            continue
        major, works = int(re.match(r"\d*", after[name]).group() or 0), ""  # type: ignore[union-attr]
        for limit in range(major, max(major - 4, 0), -1):
            if installation.moved([f"{name}<{limit}"]) and not HERE.import_error(modules):
                works = versions()[name]
                break
        if works and name not in installation.pinned:
            say(f"{name} {after[name]} cannot be imported beside the requirements ({error}): {works} is taken")
            continue
        installation.moved([f"{name}=={after[name]}"])
        advice = f"; {name}=={works} works" if works else ""
        say(f"warning: {name} {after[name]} cannot be imported beside the requirements ({error}){advice}")


HERE: Any = Here()


class Task:
    """An installation whose files are read and answered.

    Attributes:
        reading: What is asked for.
        answer: What of it is answered with what the image has.
        installation: Calls of uv; None where there is none.
    """

    def __init__(self, given: argparse.Namespace, words: Sequence[str], folder: Path) -> None:
        """Read and answer.

        Args:
            given: The manifest, and whether the answer may change a line (``strict``).
            words: Of the installation.
            folder: A private one.

        Raises:
            RefusedError: A line cannot be read, or asks for what the image cannot give.
        """
        is_there = given.manifest.is_file()
        self._manifest = json.loads(given.manifest.read_text(encoding="utf-8")) if is_there else {}
        self._words, self._folder = words, folder
        uv = find_uv()
        self.installation = Installation(uv, folder) if uv else None
        self.reading = read_words(words, self.installation)
        self.answer = Answer(self._manifest, self.reading)
        for note in self.answer.said:
            say(note)
        if self.answer.said and given.strict:
            raise RefusedError("--strict: lines are not answered with what the image has")

    def run(self, *more: str) -> int:
        """Install what is asked for, and these; return the installer's status. Raises RefusedError."""
        if self.installation is None:
            return self._by_pip()
        manifest, installation = self._manifest, self.installation
        installation.options += sorted(self.reading.options)
        installation.options += [f"--no-build-isolation-package={name}" for name in manifest.get("built_whole", ())]
        installation.options += [f"--no-sources-package={name}" for name in self.answer.without_source]
        if self.reading.project is not None:
            installation.environment["UV_PROJECT"] = str(self.reading.project)
        status = installation.first([*self.reading.words, *more], self.answer, manifest.get("needs", {}))
        if status:
            return status
        installation.mend(self.answer, manifest.get("companions", {}))
        look_at_companions(manifest, installation)
        look_at_older(installation)
        after = versions()
        for name, old in sorted(installation.before.items()):
            if after.get(name) != old:
                say(f"{name} {old} -> {after.get(name, 'removed')}")
        for name, component in manifest.get("compiled_by", {}).items():
            if after.get(name) != installation.before.get(name):
                what = f"{name} may compile code for GPUs when it is first used, and this image has no {component}"
                say(f"warning: {what}: take an image that was built --with {component}")
        return 0

    def _by_pip(self) -> int:
        say("this image has no uv: pip installs, and what of the image loses a requirement is not looked after")
        kept = self._folder / "kept.txt"
        rows = [f"{name}=={version}\n" for name, version in self.answer.kept.items()]
        kept.write_text("".join(rows), encoding="utf-8")
        pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *self._words, "-c", str(kept))
        own = " ".join(_without_the_images(os.environ.get("PIP_CONSTRAINT", "").split()))
        return subprocess.run(pip, env={**os.environ, "PIP_CONSTRAINT": own}, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Install; the installer's status, or 1 with one line on standard error."""
    split = list(arguments).index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--manifest", type=Path, default=Path(os.environ.get(_MANIFEST_VARIABLE) or _MANIFEST))
    parser.add_argument("--strict", action="store_true")
    given = parser.parse_args(arguments[:split])
    with tempfile.TemporaryDirectory(dir=os.environ.get(_RUNTIME_DIRECTORY)) as folder:
        try:
            return Task(given, arguments[split + 1 :], Path(folder)).run()
        except RefusedError as error:
            say(str(error))
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
