"""The plan of an extension: a base image, requirements and code, and their checks. Pure.

The contract is that of SageMaker's own images ("Extend a Prebuilt Container" in its documentation):
code lies in ``/opt/ml/code``, which is on PATH and which ``SAGEMAKER_SUBMIT_DIRECTORY`` names; the
entry point is a path below it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from packaging.utils import canonicalize_name

from trainworks.extend.constraints import Move, moves_of
from trainworks.extend.requirements import NO_LOCK, ExtendedBase, ExtensionLock
from trainworks.facts.rows import SourceFile
from trainworks.plan.checks import (
    Check,
    CommandCheck,
    DebianPackageCheck,
    LabelCheck,
    PathCheck,
    PythonImportsCheck,
    SecretsCheck,
)
from trainworks.plan.variants import BASE_NAME_LABEL
from trainworks.suggestions import nearest

CODE_FOLDER = "/opt/ml/code"
"""The folder in which the platform and both launchers look for the user's code."""

SUBMIT_DIRECTORY = "SAGEMAKER_SUBMIT_DIRECTORY"
PROGRAM = "SAGEMAKER_PROGRAM"
BASE_DIGEST_LABEL = "org.opencontainers.image.base.digest"
APT_LABEL = "trainworks.apt"
"""Label with the Debian packages of the extension."""

PROJECT_FILES = ("setup.py", "pyproject.toml")
"""At the root of the code, each of these makes the code a project that the launcher installs
(the second one only with a section for builds).
"""

INSTALLED_FILE = ".trainworks-installed"
"""Beside the code: tells the launcher what is installed with it
(launcher/trainworks_launcher/environment/entry_point.py).
"""

PROJECT_SOURCE = "--source"
"""The origin of the wheel that is the code itself."""

COMPONENT = "extension"
"""The component of an extension's steps and checks, in progress lines and results."""

_NAME = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REPOSITORY = rf"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?/)?{_NAME}(?:/{_NAME})*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_TAGGED = re.compile(rf"{_REPOSITORY}:{_TAG}")
_REFERENCE = re.compile(rf"{_REPOSITORY}(?::{_TAG})?(?:@sha256:[0-9a-f]{{64}})?")

_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_SEGMENT = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._+-]+"
_PATH = re.compile(rf"(?!-){_SEGMENT}(?:/{_SEGMENT})*")


@dataclass(frozen=True, kw_only=True)
class EntryPoint:
    """The user's program.

    Attributes:
        kind: ``script``, ``shell``, ``module``, ``package`` (a module of a
            project), or ``command``.
        name: The user's name for it, and the value of ``SAGEMAKER_PROGRAM``.
        file: Its path below the code directory; ``""`` for a module of an installed distribution.
    """

    kind: str
    name: str
    file: str

    @property
    def program(self) -> str:
        """The name without ``-m``."""
        return self.name.removeprefix("-m").strip() if self.kind == "module" else self.name


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """The source of a wheel that is built in the base image.

    Attributes:
        archive: A tar with all files below ``source``.
        origin: Its place, for messages: ``git+URL@REFERENCE``, a folder, or ``--source``.
        subdirectory: The project's folder in the archive; ``""`` for its root.
        name: The distribution's name; ``""`` if it is not known yet.
        extras: Extras that are installed, such as ``[all]``; or ``""``.
        identity: A commit, or a hash of the files that decide the requirements.
        folder: Its folder on this machine, where uv reads its requirements;
            ``""`` for a repository.
    """

    archive: bytes = field(repr=False)
    origin: str
    subdirectory: str = ""
    name: str = ""
    extras: str = ""
    identity: str = ""
    folder: str = ""

    @property
    def digest(self) -> str:
        """The hash of the source."""
        return hashlib.sha256(self.archive + self.subdirectory.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ExtensionPlan:
    """An extension, complete: the same plan renders to the same bytes.

    Attributes:
        tag: The new image's name.
        base: What it is made from.
        lock: The distributions that are installed.
        sources: Sources of wheels.
        inputs: Files of this machine that are installed, such as wheels.
        apt: Debian packages; sorted, each once.
        files: The code, at paths below the code directory; sorted by them.
        installed: The code's own files that are installed: its requirements, its project file.
        entry_point: ``None`` where the job names it.
    """

    tag: str
    base: ExtendedBase
    lock: ExtensionLock = NO_LOCK
    sources: tuple[WheelSource, ...] = ()
    inputs: tuple[SourceFile, ...] = ()
    apt: tuple[str, ...] = ()
    files: tuple[SourceFile, ...] = ()
    installed: tuple[str, ...] = ()
    entry_point: EntryPoint | None = None

    def __post_init__(self) -> None:
        """Sort the packages and the files: their order decides nothing."""
        object.__setattr__(self, "apt", tuple(sorted(set(self.apt))))
        files = sorted(self.files, key=lambda file: file.path)
        object.__setattr__(self, "files", tuple(files))

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the image's environment, besides PATH, that the base does not have."""
        variables = {}
        if self.base.environment.get(SUBMIT_DIRECTORY) != CODE_FOLDER:
            variables[SUBMIT_DIRECTORY] = CODE_FOLDER
        program = self.entry_point.name if self.entry_point is not None else None
        if program is not None and self.base.environment.get(PROGRAM) != program:
            variables[PROGRAM] = program
        return variables

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of the image."""
        base = self.base
        labels = {BASE_NAME_LABEL: base.reference}
        if self.apt:
            labels[APT_LABEL] = " ".join(self.apt)
        if base.digest or BASE_DIGEST_LABEL in base.labels:
            # The base's own label, which would be inherited, names what the base was made from.
            labels[BASE_DIGEST_LABEL] = base.digest.rpartition("@")[2]
        return labels

    @property
    def moves(self) -> tuple[Move, ...]:
        """The distributions of the base that get another version."""
        return moves_of(self.lock.locked, self.base)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Promises, tested after the build."""
        published = tuple(name for name, _ in self.lock.locked if name != self.lock.project)
        return (*_promises(self), SecretsCheck(component=COMPONENT, published=published))

    @property
    def path_has_code(self) -> bool:
        """Whether the base's PATH already has the code directory, as in our images.

        Read by the template.
        """
        return CODE_FOLDER in self.base.environment.get("PATH", "").split(":")


def check_names(base: str, tag: str) -> list[str]:
    """Return the problems of the names of two images."""
    problems = []
    if not _REFERENCE.fullmatch(base):
        problems.append(
            f"--base {base!r} is not the name of an image, such as my/image:1 or"
            " my/image@sha256:..."
        )
    if not _TAGGED.fullmatch(tag):
        problems.append(
            f"--tag {tag!r} is not the name of an image with its tag,"
            " in lower case, such as my/image:1"
        )
    if base == tag:
        problems.append(
            f"--tag {tag} is the base image's own name:"
            " it would be extended again by the next build"
        )
    return problems


def check_packages(packages: Iterable[str]) -> list[str]:
    """Return a problem for each invalid name of a Debian package."""
    invalid = [name for name in packages if not _PACKAGE.fullmatch(name)]
    return [f"--apt {name!r} is not the name of a Debian package" for name in invalid]


def find_entry_point(program: str, files: Mapping[str, bool], *, project: bool) -> EntryPoint:
    """Return the entry point as the launcher will understand it (launcher/README.md, "Code").

    Args:
        program: The program as the user named it, such as ``train.py`` or ``-m pkg.train``.
        files: Paths below the code directory; true for executable files.
        project: Whether pip can install the code.

    Raises:
        ValueError: With the reason: it leaves the code directory, does not
            exist there, or cannot be started.
    """
    if program.startswith(("-m ", "-m\t")):
        return _module_entry_point(program, files)
    if not _PATH.fullmatch(program):
        raise ValueError(
            f"{program!r} is not a path below --source, of letters, digits and . _ + -"
        )
    exists = program in files
    kind = {"py": "script", "sh": "shell"}.get(program.rpartition(".")[2], "command")
    is_module = _MODULE.fullmatch(program.removesuffix(".py").replace("/", ".")) is not None
    # A script of a project is a module of its package, and so is a name that is not a file.
    can_be_package = kind == "script" or (kind == "command" and not exists)
    if project and is_module and can_be_package:
        kind = "package"
    if not exists and (kind != "package" or program.endswith(".py")):
        raise ValueError(_missing(program, files))
    if kind == "command" and not files[program]:
        raise ValueError(f"{program} is not executable: chmod +x it, or name it .py or .sh")
    return EntryPoint(kind=kind, name=program, file=program if exists else "")


def _module_entry_point(program: str, files: Mapping[str, bool]) -> EntryPoint:
    """Return the entry point ``-m MODULE``: of the code, or of an installed distribution."""
    module = program[2:].strip()
    if not _MODULE.fullmatch(module):
        raise ValueError(f"{module!r} is not the name of a Python module")
    stem = module.replace(".", "/")
    for file in (f"{stem}.py", f"{stem}/__main__.py"):
        if file in files:
            return EntryPoint(kind="module", name=program, file=file)
    top = stem.split("/", 1)[0]
    is_of_code = any(name == f"{top}.py" or name.startswith(f"{top}/") for name in files)
    if is_of_code:
        raise ValueError(_missing(f"{stem}.py", files))
    return EntryPoint(kind="module", name=program, file="")


def _missing(program: str, files: Mapping[str, bool]) -> str:
    near = nearest(program, sorted(files))
    if near:
        return f"no such file: {program}; did you mean {near}?"
    return f"no such file: {program}"


_INSTALLED = """\
import sys
from importlib import metadata
from pip._vendor.packaging.version import Version
wrong = []
def same(installed, locked):
    return installed == locked or Version(installed) == Version(locked)
for name, _, locked in (word.partition("==") for word in sys.argv[1:]):
    distributions = list(metadata.distributions(name=name))
    # Only the first folder of the path counts, but a second version in that folder does, too.
    first = distributions[0].locate_file("") if distributions else None
    versions = [each.version for each in distributions if each.locate_file("") == first]
    if len(versions) != 1 or not same(versions[0], locked):
        wrong.append(f"{name} is {', '.join(versions)}, not {locked}")
sys.exit(", ".join(wrong) or None)
"""
_PIP_CHECK = """\
import subprocess
import sys
from pip._vendor.packaging.utils import canonicalize_name
asked = (sys.executable, "-m", "pip", "check", "--disable-pip-version-check")
done = subprocess.run(asked, stdout=subprocess.PIPE, universal_newlines=True)
lines = done.stdout.splitlines() if done.returncode else []
names = sys.argv[1:]
problems = [line for line in lines if canonicalize_name(line.split(" ")[0]) in names]
sys.exit(", ".join(problems) or None)
"""
_COMPILES = "import sys; path = sys.argv[1]; compile(open(path, 'rb').read(), path, 'exec')"
_FOUND = (
    f"import sys, importlib.util; sys.path.insert(0, {CODE_FOLDER!r}); "
    "sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
)


def _command(why: str, *words: str, expect: str = "") -> CommandCheck:
    return CommandCheck(component=COMPONENT, command=words, expect=expect, why=why)


def _promises(plan: ExtensionPlan) -> Iterable[Check]:
    """Yield the checks of an extended image: packages, code, entry point and labels."""
    base, locked, python = plan.base, plan.lock.locked, plan.base.python
    for package in plan.apt:
        yield DebianPackageCheck(component=COMPONENT, package=package)
    if locked:
        words = [f"{name}=={version}" for name, version in locked]
        subject = "distribution is" if len(words) == 1 else "distributions are"
        title = (
            f"{len(words)} required {subject} installed as locked,"
            " and nothing is left of what was there"
        )
        yield _command(title, python, "-c", _INSTALLED, *words)
        gone = {move.name for move in plan.moves}
        words = [
            f"{row.name}=={row.version}"
            for row in base.distributions
            if canonicalize_name(row.name) not in gone
        ]
        kind = "other" if gone else "own"
        title = f"the base's {kind} {len(words)} distributions are as they were"
        yield _command(title, python, "-c", _INSTALLED, *words)
        # The user's own code is not imported: that may start a training.
        names = tuple(name for name, _ in locked if name != plan.lock.project)
        if names:
            yield PythonImportsCheck(component=COMPONENT, python=python, distributions=names)
        words = [canonicalize_name(name) for name, _ in locked]
        title = "pip check finds nothing wrong with what is installed"
        yield _command(title, python, "-c", _PIP_CHECK, *words)
    yield _command(
        f"{SUBMIT_DIRECTORY} is {CODE_FOLDER}",
        *("/bin/sh", "-c", f'echo "directory=${SUBMIT_DIRECTORY}."'),
        expect=f"directory={CODE_FOLDER}.",
    )
    yield _command(
        f"{CODE_FOLDER} is on PATH, once",
        *(
            "/bin/sh",
            "-c",
            f'echo "$PATH" | tr : "\\n" | grep -c -x {CODE_FOLDER} | sed "s/.*/times=&./"',
        ),
        expect="times=1.",
    )
    if plan.files:
        yield PathCheck(component=COMPONENT, path=CODE_FOLDER, state="directory")
    if plan.entry_point is not None:
        yield from _entry_point_promises(plan.entry_point, base)
        if plan.installed and base.launcher:
            title = "`train --plan` would install nothing at the start"
            yield _command(title, "train", "--plan", expect='"requirements": [],')
    for label, value in plan.labels.items():
        yield LabelCheck(component=COMPONENT, label=label, value=value)


def _entry_point_promises(entry_point: EntryPoint, base: ExtendedBase) -> Iterable[Check]:
    """Yield the checks that a job can start the entry point; none of them starts it."""
    path = f"{CODE_FOLDER}/{entry_point.file}"
    if entry_point.file:
        state: Literal["executable", "file"] = "file"
        if entry_point.kind == "command":
            state = "executable"
        yield PathCheck(component=COMPONENT, path=path, state=state)
    if path.endswith(".py"):
        yield _command(
            f"{entry_point.file} compiles with the image's Python",
            base.python,
            "-c",
            _COMPILES,
            path,
        )
    elif entry_point.kind == "shell":
        yield _command(f"{entry_point.file} is read by the image's bash", "bash", "-n", path)
    if entry_point.kind == "module":
        title = f"the image's Python finds the module {entry_point.program}"
        yield _command(title, base.python, "-c", _FOUND, entry_point.program)
    if base.launcher:
        yield _command(
            f"`train --plan` would start {entry_point.name}",
            *("train", "--plan"),
            expect=f'"SM_USER_ENTRY_POINT": "{entry_point.program}"',
        )
