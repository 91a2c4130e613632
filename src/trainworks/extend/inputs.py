"""What an extension is made of, as this machine's files say it: requirements,
code, entry point, Debian packages.
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
    Wanted,
    is_for_uv,
    is_lock,
    read_wanted,
)
from trainworks.extend.user_code import SourceTree, read_source, some

REQUIREMENTS = "requirements.txt"
"""At the root of the code, the file that the launcher installs."""

DEFAULTS = (REQUIREMENTS, UV_LOCK, PYLOCK)
"""At the root of the code: the first that is there says what is installed,
where no other file is named.
"""


@dataclass(frozen=True, kw_only=True)
class ExtensionInputs:
    """What this machine's files say, without problems.

    Attributes:
        wanted: What is installed, apart from the project.
        file: The file that the lock lies beside: the requirements file, or else the project's;
            ``None`` for neither.
        source: The code.
        project: The project file that makes the code installable, or ``""``.
        extras: Extras of that project.
        installed: The code's own files that say what is installed.
        entry_point: ``None`` where the job names it.
        apt: Debian packages.
        for_python: Files of this machine that may say which Python they are for: what is installed,
            the project that the code is, and the script that a job starts.
    """

    wanted: Wanted
    file: Path | None
    source: SourceTree
    project: str
    extras: tuple[str, ...]
    installed: tuple[str, ...]
    entry_point: EntryPoint | None
    apt: tuple[str, ...]
    for_python: tuple[Path, ...] = ()


def read_inputs(
    request: ExtendRequest, forbidden: tuple[str, ...], environment: Mapping[str, str]
) -> ExtensionInputs:
    """Read the files of a request.

    Args:
        request: What is asked for.
        forbidden: Texts of this machine that must not be in an image, such as its proxy.
        environment: The process's; requirements may name its variables.

    Raises:
        ExtendError: With every problem of names, requirements, code and entry point.
    """
    problems = [*check_names(request.base, request.tag), *check_packages(request.apt)]
    source, entry_point = SourceTree(), None
    folder, file = request.source, request.requirements
    if file is None and folder is not None:
        file = next((folder / name for name in DEFAULTS if (folder / name).is_file()), None)
    if file is None and folder is None and not request.apt:
        problems.append("nothing to extend the base with: give --requirements, --source or --apt")
    pyproject = folder / PROJECT if folder is not None and (folder / PROJECT).is_file() else None
    wanted = read_wanted(
        file,
        environment,
        extras=request.extras,
        groups=request.groups,
        project=pyproject,
        forbidden=forbidden,
    )
    problems += wanted.problems
    if request.requirements is not None and not wanted and not wanted.problems:
        problems.append(f"--requirements {file}: nothing is asked for")
    own = False
    if folder is not None:
        own = file is not None and file.resolve() == (folder / REQUIREMENTS).resolve()
        places = [file] if file is not None and file.parent.resolve() == folder.resolve() else []
        # Locks are ours: they come and go, and must not make another image each time.
        ignored = [
            lock
            for place in (*places, *(folder / name for name in PROJECT_FILES))
            for lock in locks_of(place)
        ]
        source = read_source(folder, ignored=ignored, forbidden=forbidden)
        problems += source.problems
    project = _project_file(source)
    if request.extras and not project and (file is None or not is_for_uv(file)):
        problems.append(f"--extra {request.extras[0]}: there is no project that could have it")
    if request.entry_point is not None:
        if folder is None:
            problems.append("--entry-point is a path below --source, which is not given")
        elif source.files:
            executable = {each.path: each.mode == 0o755 for each in source.files}
            try:
                entry_point = find_entry_point(
                    request.entry_point, executable, project=bool(project)
                )
            except ValueError as error:
                problems.append(
                    f"--entry-point: {error} (--source {folder}, {CODE_FOLDER} in the image)"
                )
    if problems:
        secrets = any("secret" in problem or "key" in problem for problem in source.problems)
        advice = (
            "name files that must stay outside in a .trainworksignore in the root of --source; "
            if secrets
            else ""
        )
        raise ExtendError(problems, hint=f"{advice}nothing was started")
    if entry_point is not None and entry_point.kind not in ("module", "package"):
        # As the launcher does: a shell script may install the project in its own way.
        project = ""
    extras = request.extras if file is None or not is_for_uv(file) else ()
    installed = [*([REQUIREMENTS] if own else []), *([project] if project else [])]
    if file == (folder or Path()) / UV_LOCK and wanted.virtual:
        # uv does not install it either, and the launcher is told that nothing is missing.
        project = ""
    paths = {each.path for each in source.files}
    return ExtensionInputs(
        wanted=wanted,
        file=file or (folder / project if folder is not None and project else None),
        source=source,
        project=project,
        extras=extras,
        installed=tuple(name for name in installed if name in paths),
        entry_point=entry_point,
        apt=tuple(sorted(set(request.apt))),
        for_python=_for_python(wanted, folder, paths, entry_point),
    )


def _for_python(
    wanted: Wanted, folder: Path | None, paths: Container[str], entry_point: EntryPoint | None
) -> tuple[Path, ...]:
    """Return the files that may say which Python they are for.

    Args:
        wanted: What is installed.
        folder: Where the code is; ``None`` for no code.
        paths: Of the code that is copied.
        entry_point: What a job starts.
    """
    names = [PROJECT]
    if entry_point is not None and entry_point.file.endswith(".py"):
        names.append(entry_point.file)
    found = [wanted.file] if wanted.file is not None else []
    if folder is not None:
        found += [folder / name for name in names if name in paths]
    return tuple(dict.fromkeys(found))


def _project_file(source: SourceTree) -> str:
    """Return what makes the code a project for the launcher: setup.py, or a pyproject.toml that
    says how; or ``""``.
    """
    contents = {file.path: file.content for file in source.files if file.path in PROJECT_FILES}
    if PROJECT_FILES[0] in contents:
        return PROJECT_FILES[0]
    sections = rb"^\s*\[\s*(project|build-system)\s*\]"
    found = re.search(sections, contents.get(PROJECT_FILES[1], b""), re.MULTILINE)
    return PROJECT_FILES[1] if found else ""


def notes(request: ExtendRequest, inputs: ExtensionInputs) -> Iterable[str]:
    """Yield what a person should know of the requirements, and of the code that is copied."""
    for text in inputs.wanted.notes:
        yield f"  {text}"
    if request.source is None:
        return
    source = inputs.source
    yield (
        f"  code: {len(source.files)} file{'s' if len(source.files) != 1 else ''},"
        f" {source.size / 1e3:,.1f} kB"
    )
    if source.left_out:
        yield f"  left out: {some(source.left_out)}"
    for path in sorted(request.source.iterdir()):
        if path == inputs.file:
            continue
        if is_lock(path):
            yield f"  {path} is not read: --requirements {path} reads it"
        elif path.name in OF_OTHER_TOOLS:
            yield f"  {path} is not read: it is {OF_OTHER_TOOLS[path.name]} writes what pip reads"
    own = request.source / REQUIREMENTS
    if own.is_file() and REQUIREMENTS not in inputs.installed:
        yield (
            f"  {own} is installed when a job starts, on each host:"
            " --requirements names another file"
        )
    if (project := _project_file(source)) and not inputs.project and project in inputs.installed:
        yield f"  {project}: the lock says that the project itself is not installed"
    elif project and not inputs.project:
        yield (
            f"  {project} is not installed:"
            f" {request.entry_point} may install the project in its own way"
        )
