"""Reads the inputs of an extension on this machine: requirements, code, entry point, Debian
packages.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainworks.errors import ExtendError
from trainworks.extend.lock import locks_of
from trainworks.extend.plan import (
    CODE_FOLDER,
    PROJECT_FILES,
    EntryPoint,
    check_names,
    check_packages,
    find_entry_point,
)
from trainworks.extend.request import ExtendRequest
from trainworks.extend.requirement_inputs import (
    OF_OTHER_TOOLS,
    PROJECT,
    PYLOCK,
    UV_LOCK,
    OptionalDependencies,
    RequestedRequirements,
    is_for_uv,
    is_lock,
    read_requirements,
)
from trainworks.extend.user_code import SourceTree, read_source, some

REQUIREMENTS = "requirements.txt"
"""At the root of the code, the file that the launcher installs."""

DEFAULTS = (REQUIREMENTS, UV_LOCK, PYLOCK)
"""At the root of the code: the first that exists has the requirements, if no file is named."""


@dataclass(frozen=True, kw_only=True)
class ExtensionInputs:
    """The inputs of an extension, without problems.

    Attributes:
        requested: The requirements, apart from the project.
        file: The file that the lock lies beside: the requirements file, or else the project's;
            ``None`` for neither.
        source: The code.
        project: The project file that makes the code installable, or ``""``.
        extras: Extras of that project.
        installed: The code's own files that are installed: its requirements, its project.
        entry_point: ``None`` where the job names it.
        apt: Debian packages.
        for_python: Files of this machine that may name a Python: the requirements, the code's
            project, and the script that a job starts.
    """

    requested: RequestedRequirements
    file: Path | None
    source: SourceTree
    project: str
    extras: tuple[str, ...]
    installed: tuple[str, ...]
    entry_point: EntryPoint | None
    apt: tuple[str, ...]
    for_python: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Code:
    """The user's code, and the file of its requirements.

    Attributes:
        folder: The root of the code; ``None`` for no code.
        file: The requirements: those of the command, or a file of the code; ``None`` for none.
        source: The files of the code.
        project: The project file that makes the code installable, or ``""``.
    """

    folder: Path | None
    file: Path | None
    source: SourceTree
    project: str

    @property
    def has_own_requirements(self) -> bool:
        """Whether the requirements are the ``requirements.txt`` of the code."""
        if self.folder is None or self.file is None:
            return False
        return self.file.resolve() == (self.folder / REQUIREMENTS).resolve()

    @property
    def is_for_uv(self) -> bool:
        """Whether uv reads the requirements as a whole, with extras."""
        return self.file is not None and is_for_uv(self.file)


def read_inputs(
    request: ExtendRequest, forbidden: tuple[str, ...], environment: Mapping[str, str]
) -> ExtensionInputs:
    """Read the files of a request.

    Args:
        request: The user's choice.
        forbidden: Texts of this machine that must not be in an image, such as its proxy.
        environment: The process's environment; requirements may name its variables.

    Raises:
        ExtendError: With every problem of names, requirements, code and entry point.
    """
    problems = [*check_names(request.base, request.tag), *check_packages(request.apt)]
    folder = request.source
    file = request.requirements
    if file is None and folder is not None:
        file = _default_file(folder)
    if file is None and folder is None and not request.apt:
        problems.append("nothing to extend the base with: give --requirements, --source or --apt")

    has_pyproject = folder is not None and (folder / PROJECT).is_file()
    requested = read_requirements(
        file,
        environment,
        optional=OptionalDependencies(extras=request.extras, groups=request.groups),
        project=folder / PROJECT if folder is not None and has_pyproject else None,
        forbidden=forbidden,
    )
    problems += requested.problems
    if request.requirements is not None and not requested and not requested.problems:
        problems.append(f"--requirements {file}: nothing is asked for")
    source = SourceTree()
    if folder is not None:
        source = read_source(folder, ignored=_lock_names(folder, file), forbidden=forbidden)
        problems += source.problems
    code = _Code(folder=folder, file=file, source=source, project=_project_file(source))
    if request.extras and not code.project and not code.is_for_uv:
        problems.append(f"--extra {request.extras[0]}: there is no project that could have it")

    entry_point = None
    try:
        entry_point = _entry_point(request, code)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ExtendError(problems, hint=_hint(source))
    return _inputs(request, requested, code, entry_point)


def _default_file(folder: Path) -> Path | None:
    """Return the first of the code's default files of requirements that exists."""
    for name in DEFAULTS:
        if (folder / name).is_file():
            return folder / name
    return None


def _lock_names(folder: Path, file: Path | None) -> list[str]:
    """Return the names of the locks in the code's folder.

    They are ours: they come and go, and must not make another image each time.
    """
    locked_files = [folder / name for name in PROJECT_FILES]
    if file is not None and file.parent.resolve() == folder.resolve():
        locked_files.append(file)
    names: list[str] = []
    for locked_file in locked_files:
        names += locks_of(locked_file)
    return names


def _entry_point(request: ExtendRequest, code: _Code) -> EntryPoint | None:
    """Return the entry point of a request; raises ValueError with its problem."""
    if request.entry_point is None:
        return None
    if code.folder is None:
        raise ValueError("--entry-point is a path below --source, which is not given")
    if not code.source.files:
        return None
    executable = {file.path: file.mode == 0o755 for file in code.source.files}
    try:
        return find_entry_point(request.entry_point, executable, project=bool(code.project))
    except ValueError as error:
        raise ValueError(
            f"--entry-point: {error} (--source {code.folder}, {CODE_FOLDER} in the image)"
        ) from error


def _hint(source: SourceTree) -> str:
    """Return the hint for refused inputs."""
    has_secrets = any("secret" in problem or "key" in problem for problem in source.problems)
    if not has_secrets:
        return "nothing was started"
    return (
        "name files that must stay outside in a .trainworksignore in the root of --source; "
        "nothing was started"
    )


def _inputs(
    request: ExtendRequest,
    requested: RequestedRequirements,
    code: _Code,
    entry_point: EntryPoint | None,
) -> ExtensionInputs:
    """Return the inputs of a request without problems."""
    project, folder, file = code.project, code.folder, code.file
    if entry_point is not None and entry_point.kind not in ("module", "package"):
        # As the launcher does: a shell script may install the project in its own way.
        project = ""
    installed = []
    if code.has_own_requirements:
        installed.append(REQUIREMENTS)
    if project:
        installed.append(project)
    if file == (folder or Path()) / UV_LOCK and requested.virtual:
        # uv does not install the project either, and the launcher is told that nothing is missing.
        project = ""
    lock_beside = file
    if file is None and folder is not None and project:
        lock_beside = folder / project
    paths = {file.path for file in code.source.files}
    return ExtensionInputs(
        requested=requested,
        file=lock_beside,
        source=code.source,
        project=project,
        extras=() if code.is_for_uv else request.extras,
        installed=tuple(name for name in installed if name in paths),
        entry_point=entry_point,
        apt=tuple(sorted(set(request.apt))),
        for_python=_for_python(requested, folder, paths, entry_point),
    )


def _for_python(
    requested: RequestedRequirements,
    folder: Path | None,
    paths: Container[str],
    entry_point: EntryPoint | None,
) -> tuple[Path, ...]:
    """Return the files that may say which Python they are for.

    Args:
        requested: The requirements.
        folder: The folder of the code; ``None`` for no code.
        paths: Paths of the code that is copied.
        entry_point: The program that a job starts.
    """
    names = [PROJECT]
    if entry_point is not None and entry_point.file.endswith(".py"):
        names.append(entry_point.file)
    files = [requested.file] if requested.file is not None else []
    if folder is not None:
        files += [folder / name for name in names if name in paths]
    return tuple(dict.fromkeys(files))


def _project_file(source: SourceTree) -> str:
    """Return the file that makes the code a project for the launcher, or ``""``.

    That is setup.py, or a pyproject.toml with a section for builds.
    """
    contents = {file.path: file.content for file in source.files if file.path in PROJECT_FILES}
    setup, pyproject = PROJECT_FILES
    if setup in contents:
        return setup
    sections = rb"^\s*\[\s*(project|build-system)\s*\]"
    if re.search(sections, contents.get(pyproject, b""), re.MULTILINE):
        return pyproject
    return ""


def notes(request: ExtendRequest, inputs: ExtensionInputs) -> Iterable[str]:
    """Yield notes for the user about the requirements, and about the code that is copied."""
    for text in inputs.requested.notes:
        yield f"  {text}"
    if request.source is None:
        return
    source = inputs.source
    plural = "" if len(source.files) == 1 else "s"
    yield f"  code: {len(source.files)} file{plural}, {source.size / 1e3:,.1f} kB"
    if source.left_out:
        yield f"  left out: {some(source.left_out)}"
    for path in sorted(request.source.iterdir()):
        if path == inputs.file:
            continue
        if is_lock(path):
            yield f"  {path} is not read: --requirements {path} reads it"
        elif path.name in OF_OTHER_TOOLS:
            yield f"  {path} is not read: it is {OF_OTHER_TOOLS[path.name]} writes what pip reads"
    own_requirements = request.source / REQUIREMENTS
    if own_requirements.is_file() and REQUIREMENTS not in inputs.installed:
        yield (
            f"  {own_requirements} is installed when a job starts, on each host:"
            " --requirements names another file"
        )
    project = _project_file(source)
    if not project or inputs.project:
        return
    if project in inputs.installed:
        yield f"  {project}: the lock says that the project itself is not installed"
    else:
        yield (
            f"  {project} is not installed:"
            f" {request.entry_point} may install the project in its own way"
        )
