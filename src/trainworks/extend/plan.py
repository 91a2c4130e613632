"""An extension of an image: a base image, requirements and code, and whether
these three fit each other. Pure.

The contract is that of SageMaker's own images ("Extend a Prebuilt Container" in its documentation):
code lies in ``/opt/ml/code``, which is on PATH and which ``SAGEMAKER_SUBMIT_DIRECTORY`` names; the
entry point is a path below it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
"""Where the platform and both launchers look for the user's code."""

SUBMIT_DIRECTORY = "SAGEMAKER_SUBMIT_DIRECTORY"
PROGRAM = "SAGEMAKER_PROGRAM"
BASE_DIGEST_LABEL = "org.opencontainers.image.base.digest"
APT_LABEL = "trainworks.apt"
"""Label with the Debian packages that were asked for."""

PROJECT_FILES = ("setup.py", "pyproject.toml")
"""At the root of the code these make it a project that the launcher installs
(the second one if it says how).
"""

INSTALLED_FILE = ".trainworks-installed"
"""Beside the code: tells the launcher what is installed with it
(launcher/trainworks_launcher/environment/entry_point.py).
"""

PROJECT_SOURCE = "--source"
"""The origin of the wheel that is the code itself."""

COMPONENT = "extension"
"""Whose steps and promises these are, in progress lines and results."""

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
        name: As it was named: what ``SAGEMAKER_PROGRAM`` gets.
        file: Its path below the code directory; ``""`` for a module that an
            installed distribution has.
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
    """What a wheel is built from, in the base image.

    Attributes:
        archive: A tar whose files lie below ``source``.
        origin: Where it comes from, for messages: ``git+URL@REFERENCE``, a folder, or ``--source``.
        subdirectory: Where in it the project lies; ``""`` for its root.
        name: The distribution's name, where it is known; else ``""``.
        extras: Which of its extras are wanted, such as ``[all]``; or ``""``.
        identity: What decides which requirements it has: a commit, or the files that say it.
        folder: Where it lies on this machine: uv reads what it requires there;
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
        """The hash of what it is built from."""
        return hashlib.sha256(self.archive + self.subdirectory.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ExtensionPlan:
    """An extension, complete: the same plan renders to the same bytes.

    Attributes:
        tag: The new image's name.
        base: What it is made from.
        lock: What is installed.
        sources: What wheels are built from.
        inputs: Files of this machine that are installed, such as wheels.
        apt: Debian packages.
        files: The code, at paths below the code directory.
        installed: Which of the code's own files say what is installed: its
            requirements, its project file.
        entry_point: ``None`` where the job names it.
        environment: What the image's environment gets besides PATH.
        labels: Labels of the image.
    """

    tag: str
    base: ExtendedBase
    lock: ExtensionLock
    sources: tuple[WheelSource, ...]
    inputs: tuple[SourceFile, ...]
    apt: tuple[str, ...]
    files: tuple[SourceFile, ...]
    installed: tuple[str, ...]
    entry_point: EntryPoint | None
    environment: Mapping[str, str]
    labels: Mapping[str, str]

    @property
    def moves(self) -> tuple[Move, ...]:
        """What of the base gets another version."""
        return moves_of(self.lock.locked, self.base)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Promises, tested after the build."""
        published = tuple(name for name, _ in self.lock.locked if name != self.lock.project)
        return (*_promises(self), SecretsCheck(component=COMPONENT, published=published))

    @property
    def path_has_code(self) -> bool:
        """Whether the base's PATH already has the code directory, as that of our images has.

        Asked by the template.
        """
        return CODE_FOLDER in self.base.environment.get("PATH", "").split(":")


def check_names(base: str, tag: str) -> list[str]:
    """Return what is wrong with the names of two images."""
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
    """Return what is wrong with the names of Debian packages."""
    return [
        f"--apt {name!r} is not the name of a Debian package"
        for name in packages
        if not _PACKAGE.fullmatch(name)
    ]


def find_entry_point(program: str, files: Mapping[str, bool], *, project: bool) -> EntryPoint:
    """Return the entry point as the launcher will understand it (launcher/README.md, "Code").

    Args:
        program: As the user named it.
        files: Paths below the code directory; true for those that may be executed.
        project: The code can be installed by pip.

    Raises:
        ValueError: With the reason: it leaves the code directory, does not
            exist there, or cannot be started.
    """
    if program.startswith(("-m ", "-m\t")):
        module = program[2:].strip()
        if not _MODULE.fullmatch(module):
            raise ValueError(f"{module!r} is not the name of a Python module")
        stem = module.replace(".", "/")
        file = next((name for name in (f"{stem}.py", f"{stem}/__main__.py") if name in files), "")
        top = stem.split("/", 1)[0]
        if not file and any(name == f"{top}.py" or name.startswith(f"{top}/") for name in files):
            raise ValueError(_missing(f"{stem}.py", files))
        return EntryPoint(kind="module", name=program, file=file)
    if not _PATH.fullmatch(program):
        raise ValueError(
            f"{program!r} is not a path below --source, of letters, digits and . _ + -"
        )
    kind = {"py": "script", "sh": "shell"}.get(program.rpartition(".")[2], "command")
    is_module = _MODULE.fullmatch(program.removesuffix(".py").replace("/", "."))
    if project and is_module and (kind == "script" or (kind == "command" and program not in files)):
        kind = "package"
    if program not in files and (kind != "package" or program.endswith(".py")):
        raise ValueError(_missing(program, files))
    if kind == "command" and not files[program]:
        raise ValueError(f"{program} is not executable: chmod +x it, or name it .py or .sh")
    return EntryPoint(kind=kind, name=program, file=program if program in files else "")


def _missing(program: str, files: Mapping[str, bool]) -> str:
    near = nearest(program, sorted(files))
    return f"no such file: {program}" + (f"; did you mean {near}?" if near else "")


def make_extension(
    *,
    tag: str,
    base: ExtendedBase,
    lock: ExtensionLock = NO_LOCK,
    files: Iterable[SourceFile] = (),
    entry_point: EntryPoint | None = None,
    sources: Iterable[WheelSource] = (),
    inputs: Iterable[SourceFile] = (),
    apt: Iterable[str] = (),
    installed: Iterable[str] = (),
) -> ExtensionPlan:
    """Return the plan of an extension whose parts were found to fit."""
    apt = tuple(sorted(set(apt)))
    environment = {}
    if base.environment.get(SUBMIT_DIRECTORY) != CODE_FOLDER:
        environment[SUBMIT_DIRECTORY] = CODE_FOLDER
    if entry_point is not None and base.environment.get(PROGRAM) != entry_point.name:
        environment[PROGRAM] = entry_point.name
    labels = {BASE_NAME_LABEL: base.reference}
    if apt:
        labels[APT_LABEL] = " ".join(apt)
    if base.digest or BASE_DIGEST_LABEL in base.labels:
        # The base's own label, which would be inherited, names what the base was made from.
        labels[BASE_DIGEST_LABEL] = base.digest.rpartition("@")[2]
    return ExtensionPlan(
        tag=tag,
        base=base,
        lock=lock,
        sources=tuple(sources),
        inputs=tuple(inputs),
        apt=apt,
        files=tuple(sorted(files, key=lambda file: file.path)),
        installed=tuple(installed),
        entry_point=entry_point,
        environment=environment,
        labels=labels,
    )


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
    base, locked, python = plan.base, plan.lock.locked, plan.base.python
    for package in plan.apt:
        yield DebianPackageCheck(component=COMPONENT, package=package)
    if locked:
        words = [f"{name}=={version}" for name, version in locked]
        title = (
            f"{len(words)} required"
            f" distribution{'s are' if len(words) != 1 else ' is'} installed as locked"
        )
        yield _command(
            f"{title}, and nothing is left of what was there", python, "-c", _INSTALLED, *words
        )
        gone = {move.name for move in plan.moves}
        words = [
            f"{row.name}=={row.version}"
            for row in base.distributions
            if canonicalize_name(row.name) not in gone
        ]
        title = (
            f"the base's {'other' if gone else 'own'} {len(words)} distributions are as they were"
        )
        yield _command(title, python, "-c", _INSTALLED, *words)
        # The user's own code is not imported: that may start a training.
        names = tuple(name for name, _ in locked if name != plan.lock.project)
        if names:
            yield PythonImportsCheck(component=COMPONENT, python=python, distributions=names)
        words = [canonicalize_name(name) for name, _ in locked]
        yield _command(
            "pip check finds nothing wrong with what is installed", python, "-c", _PIP_CHECK, *words
        )
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
    path = f"{CODE_FOLDER}/{entry_point.file}"
    if entry_point.file:
        yield PathCheck(
            component=COMPONENT,
            path=path,
            state="executable" if entry_point.kind == "command" else "file",
        )
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
