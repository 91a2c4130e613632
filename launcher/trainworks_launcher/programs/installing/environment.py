"""The Python that gets the packages: its distributions, and queries of it.

The builder uses another object in place of ``ThisPython``.
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
"""As in contract/names.py, which a file that the user's Python runs does not import."""

_IMPORT_SECONDS = 300
"""Limit of an import: the first one of a large framework compiles its files."""


class RefusedError(Exception):
    """Nothing is installed, for a reason.

    Attributes:
        problems: The reasons for people.
        newer: Requirements that another image would fulfil: name -> specifier.
    """

    def __init__(self, *problems: str, newer: Mapping[str, str] | None = None) -> None:
        """Hold the reasons, one line each."""
        super().__init__("; ".join(problems))
        self.problems, self.newer = problems, dict(newer or {})


def normalised(name: str) -> str:
    """Return a distribution's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class ThisPython:
    """The Python that gets the packages and runs this file.

    The builder installs for a Python that it may not run, with an object of its own that has these
    methods (``trainworks.extend.resolve.Session``).
    """

    words: tuple[str, ...] = ("--python", sys.executable)
    """Options that select this Python for uv."""

    def say(self, text: str) -> None:
        """Print a line for the log."""
        sys.stderr.write(f"trainworks: {text}\n")
        sys.stderr.flush()

    def uv(self) -> str:
        """Return the path of uv, beside this Python or on PATH; ``""`` without uv."""
        places = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
        return shutil.which("uv", path=os.pathsep.join(places)) or ""

    def distributions(self) -> Iterable[metadata.Distribution]:
        """Return the installed distributions, in the order of the search path."""
        return metadata.distributions()

    def markers(self) -> dict[str, str]:
        """Return values for environment markers that differ from this process's."""
        return {}

    def tags(self) -> Iterable[Any]:
        """Return the tags of wheels for this Python."""
        return sys_tags()  # type: ignore[no-any-return, unused-ignore]

    def install(self, installation: Any, words: Sequence[str], *, quiet: bool) -> int:
        """Install with uv, and return its status."""
        return int(installation.call("pip", "install", *self.words, *words, quiet=quiet).returncode)

    def selected(self, installation: Any, words: Sequence[str]) -> dict[str, str]:
        """Return the packages that uv would install from a lock; install nothing.

        Args:
            installation: Calls of uv.
            words: ``-r``, the lock, and options.

        Returns:
            Name -> version; ``""`` for a package without one.

        Raises:
            RefusedError: uv cannot use the lock.
        """
        nothing = str(installation.folder / "nothing")
        form = ("--quiet", "--dry-run", "--output-format", "json", "--target", nothing)
        done = installation.call(
            "pip", "install", *self.words, *form, *words, quiet=True, stdout=subprocess.PIPE
        )
        if done.returncode:
            reason = done.stderr.decode("utf-8", "replace").strip()
            raise RefusedError(f"uv cannot use {words[1]}: {reason}")
        rows = json.loads(done.stdout)["changes"]
        return {row["name"]: row.get("version", "") for row in rows}

    def lacks_wheel(self, installation: Any, words: Sequence[str]) -> bool:
        """Return whether no wheel fits a requirement; False if an index does not answer.

        Args:
            installation: Calls of uv.
            words: Options of uv for a dry run, and the requirement.
        """
        done = installation.call("pip", "install", *self.words, *words, quiet=True)
        # uv has another status if it could not ask the index.
        return bool(done.returncode == 1)

    def import_error(self, modules: Sequence[str]) -> str:
        """Import modules as a script would; return the last line of the error, ``""`` for none."""
        return import_error(*modules)


def distributions(python: Any) -> dict[str, metadata.Distribution]:
    """Return the installed distributions by name; of two with one name the one that is imported.

    Args:
        python: The Python that gets the packages: ``ThisPython``, or the builder's own object.
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


def parse_applicable(python: Any, text: str) -> Any:
    """Parse a requirement, if its marker is true for a Python.

    None for a requirement of another system, and for a text that is no requirement.
    """
    try:
        requirement = Requirement(text)
    except ValueError:
        return None
    if requirement.marker is None:
        return requirement
    applies = requirement.marker.evaluate({**python.markers(), "extra": ""})
    if not applies:
        return None
    return requirement


def needs_of(python: Any, distribution: metadata.Distribution) -> Iterator[Any]:
    """Yield the requirements of a distribution that apply to a Python."""
    for text in distribution.requires or ():
        requirement = parse_applicable(python, text)
        if requirement is not None:
            yield requirement


def unmet_requirements(python: Any) -> dict[str, Any]:
    """Return the distributions with a requirement that is missing, or has a wrong version.

    Returns:
        Name -> the first such requirement.
    """
    installed = distributions(python)
    unmet: dict[str, Any] = {}
    for name, distribution in installed.items():
        for requirement in needs_of(python, distribution):
            other = installed.get(normalised(requirement.name))
            if other is None or not requirement.specifier.contains(other.version, prereleases=True):
                unmet.setdefault(name, requirement)
    return unmet


def is_later(version: str, present: str) -> bool:
    """Return whether a version is of a later release than another, without regard to builds.

    False for a text that is not a version. A star at the end does not count: ``2.*`` is ``2``.
    """
    try:
        return bool(Version(version.replace(".*", "")).release > Version(present).release)
    except ValueError:
        return False


def build_of(python: Any, name: str, version: str) -> str:
    """Return a module's own version with its build, such as ``VERSION+cu121``.

    Args:
        python: The Python that has the module.
        name: Name of the distribution and of its module.
        version: Its version by the metadata.

    Returns:
        The version in ``version.py`` of the module, if that is ``version`` with a build; else
        ``version``.
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


def variables_for_imports(home: str) -> Mapping[str, str]:
    """Return variables for imports, so that packages write their first files to ``home``."""
    return {**os.environ, "HOME": home, "XDG_CACHE_HOME": home, "MPLCONFIGDIR": home}


def import_error(*modules: str) -> str:
    """Import modules in a process of their own, as a script would.

    Returns:
        The last line of the error, or the signal that ended the import; ``""`` for success.
    """
    command = (sys.executable, "-I", "-B", "-c", f"import {', '.join(modules)}")
    try:
        with tempfile.TemporaryDirectory(dir=os.environ.get(RUNTIME_DIRECTORY)) as home:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_IMPORT_SECONDS,
                env=variables_for_imports(home),
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        # The last line may be a warning from before the signal.
        return f"import ended by signal {-done.returncode}"
    words = done.stderr.decode("utf-8", "replace").strip()
    if not words:
        return f"import ended with status {done.returncode}"
    return words.splitlines()[-1].strip()
