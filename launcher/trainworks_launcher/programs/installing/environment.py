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


class ThisPython:
    """The Python that is installed for: the one that runs this file.

    The builder installs for a Python that it may not run. It hands in an object of its own with
    these methods (``trainworks.extend.resolve.Session``).
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


def distributions(python: Any) -> dict[str, metadata.Distribution]:
    """Return the installed distributions by name; of two with one name the one that is imported.

    Args:
        python: The Python that is installed for: ``ThisPython``, or the builder's own.
    """
    installed: dict[str, metadata.Distribution] = {}
    for distribution in python.distributions():
        name = distribution.metadata["Name"]
        if name:
            installed.setdefault(normalised(name), distribution)
    return installed


def versions(python: Any) -> dict[str, str]:
    """Return the version of each installed distribution, by name."""
    installed = distributions(python)
    return {name: distribution.version for name, distribution in installed.items()}


def applying(python: Any, text: str) -> Any:
    """Return a requirement whose marker is true for a Python.

    None for one that is for another system, and for a text that is no requirement.
    """
    try:
        requirement = Requirement(text)
    except ValueError:
        return None
    if requirement.marker is None:
        return requirement
    applies = requirement.marker.evaluate({**python.markers(), "extra": ""})
    return requirement if applies else None


def needs_of(python: Any, distribution: metadata.Distribution) -> Iterator[Any]:
    """Yield what a distribution requires for a Python."""
    for text in distribution.requires or ():
        requirement = applying(python, text)
        if requirement is not None:
            yield requirement


def losing(python: Any) -> dict[str, Any]:
    """Return the distributions that lack a requirement, or have it in a version that they refuse.

    Returns:
        Name to the first requirement that is not met.
    """
    installed = distributions(python)
    lacking: dict[str, Any] = {}
    for name, distribution in installed.items():
        for requirement in needs_of(python, distribution):
            other = installed.get(normalised(requirement.name))
            if other is None or not requirement.specifier.contains(other.version, prereleases=True):
                lacking.setdefault(name, requirement)
    return lacking


def is_later(version: str, have: str) -> bool:
    """Whether a version is of a later release than another; its build does not count."""
    try:
        return bool(Version(version.replace(".*", "")).release > Version(have).release)
    except ValueError:
        return False


def build_of(python: Any, name: str, version: str) -> str:
    """Return the version with its build that a module says of itself, such as ``VERSION+cu121``.

    The version alone, where the module says none.
    """
    try:
        distribution = distributions(python)[name]
        path = Path(str(distribution.locate_file(f"{name}/version.py")))
        text = path.read_text(errors="replace")
    except (KeyError, OSError):
        return version
    assignment = re.search(r"(?m)^__version__\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)", text)
    if assignment is not None and assignment.group(1).startswith(f"{version}+"):
        return assignment.group(1)
    return version


def elsewhere(home: str) -> Mapping[str, str]:
    """Return an environment for imports: what packages write when they are
    first imported goes to this folder.
    """
    return {**os.environ, "HOME": home, "XDG_CACHE_HOME": home, "MPLCONFIGDIR": home}


def import_error(*modules: str) -> str:
    """Import modules in a process of their own, as a script would, and return its last words.

    ``""`` for success.
    """
    command = (sys.executable, "-I", "-B", "-c", f"import {', '.join(modules)}")
    try:
        with tempfile.TemporaryDirectory(dir=os.environ.get(RUNTIME_DIRECTORY)) as home:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_IMPORT_SECONDS,
                env=elsewhere(home),
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return ""
    words = done.stderr.decode("utf-8", "replace").strip()
    if not words:
        return f"import ended with status {done.returncode}"
    return words.splitlines()[-1].strip()
