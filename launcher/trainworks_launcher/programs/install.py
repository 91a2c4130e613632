"""Runs pip so that it keeps what the image was built around; a program of its own.

Run as ``python -I install.py --keep NAME==VERSION... [--companions NAME=FRAMEWORK...] [--compiled-by NAME=COMPONENT...]
[--index URL] -- PIP...``, with the Python that pip installs for. What is kept goes to pip as constraints, in a file of
the host's runtime directory. Where an image built on ours has another version installed, that version is kept. A
requirement that contradicts a constraint is refused before pip starts, because pip may download other packages first.
What pip cannot resolve, pip reports. A line that names the build of what is kept (``torch==VERSION+cu121``) names what
is installed.

pip looks at what it installs, and not at what is there already: a distribution that loses what it requires is asked for
beside the requirements, so that it moves too. ``build.py extend`` has these rules as well (``extend/kept.py``).

Companions are compiled against a framework. Their metadata does not say for which build of it, so each companion that
the installation brought is imported once, and refused if that fails. What may compile with a component that the image
lacks is named in a warning.
"""

from __future__ import annotations

import argparse
import codecs
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Callable, Iterator, Mapping, NamedTuple, Sequence
from urllib.parse import unquote

_RUNTIME_DIRECTORY = (
    "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE; this file imports nothing of ours
)
_IMPORT_SECONDS = 300
_WHEEL = re.compile(r"([A-Za-z0-9._]+)-([^-/]+)(?:-\d[^-/]*)?-[^-/]+-[^-/]+-[^-/]+\.whl")
_SHOWN = 4
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    # Before UTF-16, whose little-endian mark is the beginning of this one.
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CODING = re.compile(rb"coding[:=]\s*([-\w.]+)")
_COMMENT = re.compile(r"(^|\s+)#.*$")
_SENTENCES = (
    (
        r".*\.ya?ml",
        "is conda's: `conda run -n NAME python -m pip list --format=freeze > requirements.txt` writes what pip reads",
    ),
    (r"Pipfile(\.lock)?", "is pipenv's: `pipenv requirements > requirements.txt` writes what pip reads"),
    (
        r"poetry\.lock",
        "is Poetry's: `poetry export -o requirements.txt` (plug-in poetry-plugin-export) writes what pip reads",
    ),
    (r"pdm\.lock", "is PDM's: `pdm export -o requirements.txt` writes what pip reads"),
    (
        r"pixi\.(lock|toml)",
        "is Pixi's: `pixi run python -m pip list --format=freeze > requirements.txt` writes what pip reads",
    ),
    (r"setup\.(py|cfg)", "belongs to a project: name the project's folder in a requirements file, such as ./ or -e ."),
    (r".*\.whl", "is a wheel: name it in a requirements file"),
    (
        r"uv\.lock",
        "is uv's: `uv export --no-emit-project -o requirements.txt` writes what pip reads",
    ),
    (r"pyproject\.toml", "belongs to a project: name the project's folder in a requirements file, such as ./ or -e ."),
)
"""The first ones are those of the builder's ``extend/reading/others.py``."""


def installed_version(name: str) -> str:
    """Return the version that this Python has of a distribution, "" for none."""
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""


def sentence_of(name: str) -> str:
    """Return why a file of this name is not a requirements file, and what converts it; ``""`` for any other."""
    return next((sentence for pattern, sentence in _SENTENCES if re.fullmatch(pattern, name)), "")


def decode(content: bytes) -> str:
    """Return the text of a requirements file as pip reads it: by its mark, its coding line (PEP 263), or else UTF-8.

    The builder has the same rule (``extend/reading/text.py``). Raises ValueError for another encoding.
    """
    mark, encoding = next(((mark, name) for mark, name in _MARKS if content.startswith(mark)), (b"", ""))
    if not encoding:
        comments = (line for line in content.split(b"\n")[:2] if line.startswith(b"#"))
        coding = next(filter(None, map(_CODING.search, comments)), None)
        encoding = coding.group(1).decode("ascii", "replace") if coding else "utf-8"
    try:
        return content[len(mark) :].decode(encoding)
    except LookupError:
        raise ValueError(f"its coding line names {encoding}, which is not an encoding") from None
    except UnicodeError:
        raise ValueError(
            f"it is not {encoding.upper()}: save it as UTF-8, or name its encoding in the first line, such as "
            "# -*- coding: latin-1 -*-"
        ) from None


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line, without comments; a backslash joins lines."""
    parts: list[str] = []
    start = 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        comment = _COMMENT.match(raw)
        start = start if parts else number
        if raw.endswith("\\") and not comment:
            parts.append(raw.strip("\\"))
            continue
        line = _COMMENT.sub("", "".join((*parts, f" {raw}" if comment else raw))).strip()
        if line:
            yield start, line
        parts = []


def lines_of(path: Path, seen: frozenset[Path] = frozenset()) -> Iterator[tuple[str, int, str]]:
    """Yield (file as pip names it, number, text) of each line; ``-r`` is followed.

    What cannot be opened is left to pip. Raises ValueError for a file in another encoding than pip reads.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return
    try:
        text = decode(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for number, line in logical_lines(text):
        included = re.match(r"(?:-r|--requirement)[\s=]*(\S+)$", line)
        if included:
            other = path.parent / included.group(1)
            if "://" not in included.group(1) and other not in seen:
                yield from lines_of(other, seen | {other})
        else:
            yield str(path), number, line


class Contradiction(NamedTuple):
    """A line of a requirements file that pip cannot fulfil.

    Attributes:
        place: File and line.
        wanted: What the line asks for; ``""`` where it names an address.
        kept: Name and version that the image has.
    """

    place: str
    wanted: str
    kept: str


def build_of(name: str) -> str:
    """Return the version with its build that a distribution says of itself, such as ``VERSION+cu121``; or ``""``."""
    try:
        found = metadata.distribution(name)
        text = Path(str(found.locate_file(f"{name}/version.py"))).read_text(encoding="utf-8", errors="replace")
    except (metadata.PackageNotFoundError, OSError):
        return ""
    said = re.search(r"^__version__\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    build = said.group(1) if said else ""
    return build if build.startswith(f"{found.version}+") else ""


def without_builds(path: Path, builds: Mapping[str, str], directory: Path) -> Path:
    """Return a requirements file for pip in which versions with builds are without them: itself where it names none.

    Args:
        path: The file.
        builds: The builds of what is kept, by name; indexes have these versions without the build.
        directory: Where a copy is written, and copies of the files that it includes.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        return path
    changed = False
    for number, line in enumerate(lines):
        included = re.match(r"(\s*(?:-r|--requirement|-c|--constraint)[\s=]*)([^\s#]+)", line)
        if included and "://" not in included.group(2):
            there = path.parent / included.group(2)
            other = without_builds(there, builds, directory) if there != path else there
            changed = changed or other != there
            lines[number] = f"{included.group(1)}{other.absolute()}{line[included.end() :]}"
        for name, build in builds.items():
            plain = "[-_.]+".join(map(re.escape, name.split("-")))
            pattern = rf"(?i)^(\s*{plain}\s*(?:\[[^\]]*\])?\s*==\s*){re.escape(build)}(?=[\s;\\]|$)"
            text = re.sub(pattern, rf"\g<1>{build.partition('+')[0]}", lines[number])
            changed = changed or text != lines[number]
            lines[number] = text
    if not changed:
        return path
    copy = directory / f"{len(list(directory.iterdir()))}-{path.name}"
    copy.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return copy


def distributions() -> dict[str, metadata.Distribution]:
    """Return the distributions that this Python has, by name; of two of one name the first is imported."""
    found: dict[str, metadata.Distribution] = {}
    for each in metadata.distributions():
        if each.metadata["Name"]:
            found.setdefault(_normalised(each.metadata["Name"]), each)
    return found


def losing() -> dict[str, str]:
    """Return the distributions that lack what they require, in the version that they accept: name to the first one."""
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[import-not-found, unused-ignore]

    found = distributions()
    lacking: dict[str, str] = {}
    for name, each in found.items():
        for text in each.requires or ():
            try:
                wanted = Requirement(text)
                if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                    continue
                other = found.get(_normalised(wanted.name))
                fits = other is not None and wanted.specifier.contains(other.version, prereleases=True)
            except ValueError:  # pip says what is wrong with it
                continue
            if not fits:
                lacking.setdefault(name, f"{wanted.name}{wanted.specifier}")
    return lacking


def mend(pip: Sequence[str], before: Mapping[str, str], kept: Mapping[str, str], brought: Path) -> str:
    """Let pip move what lost its requirements in an installation; return why the job cannot start, ``""`` if it can.

    Args:
        pip: The command line of the installation, with its constraints.
        before: What lacked something before it.
        kept: What must not be broken.
        brought: A file of constraints with what the installation brought.
    """
    asked: list[str] = []
    given_up: list[str] = []
    while True:
        lacking = losing()
        lost = sorted(name for name in lacking if name not in before and name not in asked and name not in given_up)
        if not lost:
            return ""
        asked += lost
        if _moved(pip, asked, brought):
            continue
        for name in lost:
            asked.remove(name)
            what = f"{name} {installed_version(name)}"
            if name in kept:
                return (
                    f"the requirements take from this image's {what} what it requires ({lacking[name]}); "
                    "ask for other versions"
                )
            if _moved(pip, [name], brought):
                asked.append(name)
                continue
            given_up.append(name)
            _report(f"{what} of the image does not go with the requirements: it requires {lacking[name]}")


def _moved(pip: Sequence[str], names: Sequence[str], brought: Path) -> bool:
    """Let pip ask for distributions beside the requirements, and say whether it could: what it says else is not shown.

    Nobody asked for these: what has no wheel is not built for them. What the requirements brought stays where it can:
    pip keeps what is installed first, and would look for an old release of what was asked for.
    """
    asking = [*pip, *names, "--only-binary", ",".join(names)]
    for command in ([*asking, "--constraint", str(brought)], asking):
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0:
            sys.stdout.write(done.stdout.decode("utf-8", "replace"))
            return True
    return False


def contradictions(path: Path, kept: Mapping[str, str]) -> list[Contradiction]:
    """Return the lines of a requirements file that contradict what is kept (name -> version).

    Judged with pip's own copy of ``packaging``; where pip has none, pip judges alone.
    """
    try:
        from pip._vendor.packaging.version import Version  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return []
    found = []
    for file, number, line in lines_of(path, frozenset((path,))):
        try:
            name, wanted, version, holds = _asked_for(line)
            have = kept.get(name, "")
            if not have:
                continue
            build = build_of(name)
            fits = (
                holds(have) or bool(build and holds(build))
                if wanted
                else bool(version) and Version(version) == Version(have)
            )
        except ValueError:  # pip says what is wrong with the line
            continue
        if not fits:
            found.append(Contradiction(f"{file} line {number}", wanted, f"{name} {have}"))
    return found


def _asked_for(line: str) -> tuple[str, str, str, Callable[[str], bool]]:
    """Return (name, requirement, version, whether a version fits) of a line.

    Where it names an address, the requirement is "" and the version that of the wheel, "" for another kind of file. The
    name is "" where the line does not apply to this machine, or has none. Raises ValueError for what is not a
    requirement.
    """
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[import-not-found, unused-ignore]

    wanted = re.sub(r"\s--?[a-z].*$", "", line).strip()  # --hash and other options of a line
    address = wanted.partition(";")[0].partition("#")[0].rpartition("@")[2].strip()
    wheel = _WHEEL.fullmatch(unquote(address).rpartition("/")[2])
    try:
        requirement = Requirement(wanted)
    except ValueError:
        if wheel is None:
            raise
        return _normalised(wheel.group(1)), "", wheel.group(2), bool
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return "", "", "", bool
    name = _normalised(requirement.name)
    if requirement.url:
        return name, "", wheel.group(2) if wheel else "", bool
    specifier = requirement.specifier
    return name, f"{name}{specifier}", "", lambda version: bool(specifier.contains(version, prereleases=True))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def refusal(found: Sequence[Contradiction]) -> str:
    """One line for all contradictions. Addresses are not shown: they may have a password."""
    said = [f"{row.place}: {row.wanted or 'an address'} conflicts with this image's {row.kept}" for row in found]
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    line = "the line" if len(said) == 1 else "these lines"
    image = " and ".join(row.wanted for row in found[:_SHOWN] if row.wanted)
    return f"{'; '.join(said[:_SHOWN])}{more}; remove {line}" + (f", or choose an image with {image}" if image else "")


def import_error(name: str) -> str:
    """Import a module in a process of its own, as a script would, and return its last words; ``""`` for success."""
    words = (sys.executable, "-I", "-c", f"import {name}")
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_IMPORT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return ""
    said = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return said[-1] if said else f"import ended with status {done.returncode}"


def misfit(name: str, framework: str, index: str) -> str:
    """Return why a companion does not fit the framework of this image, in one line; "" if it does."""
    error = import_error(name.replace("-", "_"))
    if not error:
        return ""
    have = f"{framework} {installed_version(framework)}"
    fitting = f"add --extra-index-url {index} to the requirements file" if index else f"ask for a build for {have}"
    return f"{name} {installed_version(name)} does not work with this image's {have} ({error}); {fitting}, or remove it"


def _report(line: str) -> int:
    sys.stderr.write(f"trainworks: {line}\n")
    return 1


def main(arguments: Sequence[str]) -> int:
    """Run pip; its status, or 1 with one line on standard error."""
    split = list(arguments).index("--")
    pip = list(arguments[split + 1 :])
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", nargs="+", default=[])
    parser.add_argument("--companions", nargs="+", default=[])
    parser.add_argument("--compiled-by", nargs="+", default=[])
    parser.add_argument("--index", default="")
    given = parser.parse_args(arguments[:split])
    kept = {}
    for word in given.keep:
        name, _, version = word.partition("==")
        kept[name] = installed_version(name) or version
    if "-r" in pip:
        path = Path(pip[pip.index("-r") + 1])
        if sentence_of(path.name):
            return _report(f"{path} {sentence_of(path.name)}")
        try:
            found = contradictions(path, kept)
        except ValueError as error:
            return _report(str(error))
        if found:
            return _report(refusal(found))
    watched = (word.partition("=")[0] for word in (*given.companions, *given.compiled_by))
    before = {name: installed_version(name) for name in watched}
    with tempfile.TemporaryDirectory(dir=os.environ.get(_RUNTIME_DIRECTORY)) as directory:
        if "-r" in pip:
            place = pip.index("-r") + 1
            builds = {name: build for name in kept if (build := build_of(name))}
            pip[place] = str(without_builds(Path(pip[place]), builds, Path(directory)))
        constraints = Path(directory, "constraints.txt")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()), encoding="utf-8")
        pip += ["--constraint", str(constraints)]
        lacking = losing()
        there = {name: each.version for name, each in distributions().items()}
        status = subprocess.run(pip, check=False).returncode
        if status != 0:
            return status
        now = {name: each.version for name, each in distributions().items()}
        new = [f"{name}=={version}\n" for name, version in now.items() if there.get(name) != version]
        brought = Path(directory, "brought.txt")
        brought.write_text("".join(new), encoding="utf-8")
        wrong = mend(pip, lacking, kept, brought)
        if wrong:
            return _report(wrong)
    for word in given.companions:
        name, _, framework = word.partition("=")
        if installed_version(name) != before[name]:
            wrong = misfit(name, framework, given.index)
            if wrong:
                return _report(wrong)
    for word in given.compiled_by:
        name, _, component = word.partition("=")
        if installed_version(name) != before[name]:
            _report(
                f"warning: {name} may compile code for GPUs when it is first used, and this image has no"
                f" {component}: take an image that was built --with {component}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
