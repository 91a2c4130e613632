"""The Python that is installed for: what it has, and how it is asked.

The builder puts another one in its place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence

from trainworks_launcher.programs.installing.standards import Requirement, Version, sys_tags

RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"
MANIFEST_VARIABLE, MANIFEST = "TRAINWORKS_IMAGE_MANIFEST", "/opt/trainworks/image.json"
"""Those of contract/names.py: the user's Python runs this, and it imports nothing else of ours."""

_IMPORT_SECONDS = 300


class RefusedError(Exception):
    """Why nothing is installed, for a person.

    ``newer``: what another image would have to have, name to specifier.
    """

    def __init__(self, *problems: str, newer: Mapping[str, str] | None = None) -> None:
        """problems: a line each."""
        super().__init__("; ".join(problems))
        self.problems, self.newer = problems, dict(newer or {})


def normalised(name: str) -> str:
    """Return a distribution's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Here:
    """The Python that is installed for: the one that runs this file.

    The builder installs for a Python that it may not run, and gives another one
    of these to ``use``.
    """

    words: tuple[str, ...] = ("--python", sys.executable)
    """What names it for uv."""

    def say(self, text: str) -> None:
        """Print a line for the log."""
        sys.stderr.write(f"trainworks: {text}\n")
        sys.stderr.flush()

    def uv(self) -> str:
        """Return the path of uv: beside this Python, or on PATH; ``""`` where there is none."""
        places = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
        return shutil.which("uv", path=os.pathsep.join(places)) or ""

    def distributions(self) -> Iterable[metadata.Distribution]:
        """Return what it has, in the order of its search path."""
        return metadata.distributions()

    def markers(self) -> dict[str, str]:
        """Return what environment markers are compared with, beside what this process knows."""
        return {}

    def tags(self) -> Iterable[Any]:
        """Return the tags of wheels that fit."""
        return sys_tags()  # type: ignore[no-any-return, unused-ignore]

    def install(self, installation: Any, words: Sequence[str], *, quiet: bool) -> int:
        """Install with uv, and return its status."""
        return int(installation.call("pip", "install", *self.words, *words, quiet=quiet).returncode)

    def selected(self, installation: Any, words: Sequence[str]) -> dict[str, str]:
        """Return what uv takes of a lock: name to version, ``""`` where it says none.

        Raises RefusedError.
        """
        nothing = str(installation.folder / "nothing")
        form = ("--quiet", "--dry-run", "--output-format", "json", "--target", nothing)
        done = installation.call(
            "pip", "install", *self.words, *form, *words, quiet=True, stdout=subprocess.PIPE
        )
        if done.returncode:
            raise RefusedError(
                f"uv cannot use {words[1]}: {done.stderr.decode('utf-8', 'replace').strip()}"
            )
        return {row["name"]: row.get("version", "") for row in json.loads(done.stdout)["changes"]}

    def lacks_wheel(self, installation: Any, words: Sequence[str]) -> bool:
        """Whether no wheel fits what words ask for.

        An index that does not answer is no such answer.
        """
        return bool(
            installation.call("pip", "install", *self.words, *words, quiet=True).returncode == 1
        )

    def import_error(self, modules: Sequence[str]) -> str:
        """Import modules as a script would, and return the last words of it; ``""`` for success."""
        return import_error(*modules)


_HERE: list[Any] = [Here()]


def here() -> Any:
    """Return the Python that is installed for."""
    return _HERE[-1]


def use(place: Any) -> None:
    """Install for another Python from now on."""
    _HERE[:] = [place]


def say(text: str) -> None:
    """Tell a line."""
    here().say(text)


def distributions() -> dict[str, metadata.Distribution]:
    """Return what the Python has, by name; of two of one name the first is imported."""
    found: dict[str, metadata.Distribution] = {}
    for each in here().distributions():
        if each.metadata["Name"]:
            found.setdefault(normalised(each.metadata["Name"]), each)
    return found


def versions() -> dict[str, str]:
    """Return the versions of what the Python has."""
    return {name: each.version for name, each in distributions().items()}


def applying(text: str) -> Any:
    """Return a requirement that applies to this machine.

    None for another, and for what is not a requirement.
    """
    try:
        wanted = Requirement(text)
    except ValueError:
        return None
    return (
        wanted
        if wanted.marker is None or wanted.marker.evaluate({**here().markers(), "extra": ""})
        else None
    )


def needs_of(each: metadata.Distribution) -> Iterator[Any]:
    """Yield what a distribution requires on this machine."""
    return filter(None, map(applying, each.requires or ()))


def losing() -> dict[str, Any]:
    """Return the distributions that lack what they require, in a version that
    they accept: name to the first one.
    """
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
    """Return the version with its build that a module says of itself, such as ``VERSION+cu121``.

    Or the version.
    """
    try:
        path = Path(str(distributions()[name].locate_file(f"{name}/version.py")))
        said = re.search(
            r"(?m)^__version__\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)", path.read_text(errors="replace")
        )
    except (KeyError, OSError):
        return version
    return said.group(1) if said and said.group(1).startswith(f"{version}+") else version


def elsewhere(home: str) -> Mapping[str, str]:
    """Return an environment for imports: what packages write when they are
    first imported goes to this folder.
    """
    return {**os.environ, "HOME": home, "XDG_CACHE_HOME": home, "MPLCONFIGDIR": home}


def import_error(*modules: str) -> str:
    """Import modules in a process of their own, as a script would, and return its last words.

    ``""`` for success.
    """
    words, nothing = (
        (sys.executable, "-I", "-B", "-c", f"import {', '.join(modules)}"),
        subprocess.DEVNULL,
    )
    try:
        with tempfile.TemporaryDirectory(dir=os.environ.get(RUNTIME_DIRECTORY)) as home:
            given: Any = {"stdin": nothing, "timeout": _IMPORT_SECONDS, "env": elsewhere(home)}
            done = subprocess.run(words, capture_output=True, check=False, **given)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    said = [
        line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()
    ]
    return (
        ""
        if done.returncode == 0
        else (said or [f"import ended with status {done.returncode}"])[-1]
    )
