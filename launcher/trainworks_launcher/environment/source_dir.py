"""Inspects the user's code: a directory, an archive, or the address of an archive.

Reads files, and changes nothing. ``Code`` in ``entry_point.py`` holds the result.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.environment.entry_point import (
    INSTALLED,
    PROJECT_FILES,
    REMOTE,
    REQUIREMENTS,
    Code,
)

_ENTRIES_LIMIT = 20_000
"""Number of files that are listed: a data set beside the code must not make the start slow."""

_READ_LIMIT = 1 << 20
"""Bytes of a pyproject.toml or of a script that are searched."""

_PROJECT_TABLE = rb"^\s*\[\s*(project|build-system)\s*\]"
_OBJECT_ADDRESS = r"s3://[^/\s]+/.*[^/]"
_MAX_SHOWN_FILES = 5
"""Files that a note names."""


def inspect_program(
    directory: str, words: Sequence[str], path: str
) -> tuple[tuple[str, ...], Code]:
    """Inspect a program of the command line, with its code in the working directory.

    A requirements.txt of that directory is not installed, because it may be for another
    environment. A note says so.

    Args:
        directory: The working directory.
        words: The program and its arguments: a file, the name of a program on
            PATH, or ``-m`` and a module.
        path: Directories of programs, in the form of PATH.

    Returns:
        The words, with a program on PATH as an absolute path; and the code. The entries of the
        code are the program; if the program does not exist, the names in the working directory.
    """
    program = words[0]
    if program != "-m" and not Path(directory, program).is_file():
        program = shutil.which(program, path=path) or ""
    if not program:
        entries = sorted(entry.name for entry in Path(directory).iterdir())
        return tuple(words), Code(directory, entries=tuple(entries))

    executable = (program,) if os.access(Path(directory, program), os.X_OK) else ()
    folders = [Path(directory)]
    if not program.startswith("/"):
        folders.append(Path(directory, program).parent)
    notes: tuple[str, ...] = ()
    for folder in folders:
        file = folder / REQUIREMENTS
        if file.is_file() and REQUIREMENTS not in _installed(str(folder)):
            notes = (f"{file} is not installed: build.py extend puts its packages into an image",)
            break
    code = Code(directory, entries=(program,), executable=executable, notes=notes)
    return (program, *words[1:]), code


_ENTRY_LIMIT = 1 << 26
"""Size in bytes up to which an entry point is read for its digest."""

_IMPORT_OF_MPI = rb"^\s*(?:from|import)\s+mpi4py\b"


def entry_files(code: Code, words: Sequence[str]) -> tuple[Path, ...]:
    """Return the files that a program begins with and that exist on this host.

    For example ``/bin/bash`` and ``run.sh`` for the words ``/bin/bash run.sh``.

    Args:
        code: The user's code.
        words: The program and its arguments.
    """
    if code.archive:
        archive = Path(code.archive)
        return (archive,) if archive.is_file() else ()
    name = words[0] if words else ""
    # A module is two words on a command line, and one text in a hyperparameter ("-m package").
    if name == "-m" and len(words) > 1:
        name = words[1]
    elif name == "-m" or name.startswith(("-m ", "-m\t")):
        name = name[2:].strip()
    if Path(code.directory, name).is_file():
        candidates = [name]
        scripts = [word for word in words[1:] if word.endswith((".py", ".sh"))]
        candidates += scripts[:1]
    else:
        module = name.replace(".", "/")
        candidates = [f"{module}.py", f"{module}/__main__.py"]
    paths = [Path(code.directory, candidate) for candidate in candidates]
    return tuple(path for path in paths if path.is_file())


def digest_of_entry(code: Code, words: Sequence[str]) -> str:
    """Return the SHA-256 of the sizes and bytes of ``entry_files``; "" if there are none.

    Only the size of a file above _ENTRY_LIMIT counts. Raises OSError for a file that cannot be
    read.
    """
    import hashlib

    files = entry_files(code, words)
    if not files:
        return ""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(str(size).encode())
        if size <= _ENTRY_LIMIT:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def imports_mpi(code: Code, words: Sequence[str]) -> bool:
    """Return whether a script of the program has a line that imports mpi4py."""
    for path in entry_files(code, words):
        if path.suffix == ".py" and re.search(_IMPORT_OF_MPI, _read_beginning(path), re.MULTILINE):
            return True
    return False


def inspect_code(base: str, location: str, program: str) -> tuple[Code, list[Problem]]:
    """Inspect the code at a location. Nothing is fetched, unpacked or changed.

    A path that does not exist is no problem here: the code has no entries.

    Args:
        base: The base directory; an archive is unpacked into BASE/code.
        location: A path, ``file:///path``, or ``s3://BUCKET/KEY``.
        program: The requested entry point; it is listed even if the code has very many files.

    Returns:
        The code, and its problems.
    """
    directory = f"{base}/{names.CODE_DIRECTORY}"
    scheme, separator, rest = location.partition("://")
    if separator and scheme == "file":
        location = _path_of(rest)
    elif location.startswith(REMOTE):
        return _inspect_address(location, directory, program)
    elif separator:
        advice = f"use {REMOTE}, file://, or mount the code at {directory}"
        problem = Problem(f"code cannot be fetched from {scheme}://", location, advice)
        return Code(directory=directory), [problem]
    if Path(location).is_dir():
        code = _inspect_directory(location, program)
        code = code._replace(
            entries=tuple(sorted(code.entries)),
            executable=tuple(sorted(code.executable)),
            notes=_unused(location, directory),
            installed=_installed(location),
        )
        return code, []
    if not Path(location).exists():
        return Code(directory=location), []
    return _inspect_archive(location, directory, program)


def _inspect_address(address: str, directory: str, program: str) -> tuple[Code, list[Problem]]:
    """Return the code of an archive that is not fetched yet, and the problems of its address."""
    existing = _inspect_directory(directory, program).entries
    notes = []
    if existing:
        notes.append(
            f"the code of {address} is laid over {len(existing)} file(s)"
            f" that are in {directory} already, and wins"
        )
    code = Code(directory, archive=address, notes=tuple(notes))
    if re.fullmatch(_OBJECT_ADDRESS, address):
        return code, []
    advice = "give the address of a tar.gz: s3://BUCKET/KEY"
    return code, [Problem(f"{address!r} is not the address of an archive", "code", advice)]


def _path_of(rest: str) -> str:
    """Return the path of a ``file://`` address.

    Args:
        rest: The address after ``file://``, for example ``/my%20code`` or ``localhost/code``.
    """
    from urllib.parse import unquote

    if rest.startswith("localhost/"):
        rest = rest[len("localhost") :]
    return unquote(rest)


def _unused(location: str, directory: str) -> tuple[str, ...]:
    """Return a note if the image has code in BASE/code that is not used.

    Args:
        location: Directory of the job's code.
        directory: The directory BASE/code.
    """
    if not Path(directory).is_dir() or Path(location).samefile(directory):
        return ()
    count = len(_inspect_directory(directory, "").entries)
    if not count:
        return ()
    note = f"the code is taken from {location}; the {count} file(s) in {directory} are not used"
    return (note,)


def _inspect_directory(location: str, program: str) -> Code:
    """Return the code in a directory, with unsorted entries.

    Of a very large directory a bounded number of files is listed, and in any case the program,
    requirements.txt and the project's files.
    """
    entries: list[str] = []
    executable: list[str] = []
    for parent, directories, files in os.walk(location):
        directories.sort()
        directories[:] = [name for name in directories if _has_code(name)]
        for name in files:
            path = os.path.join(parent, name)  # noqa: PTH118  (Path is ten times slower over 20,000 names)
            relative = os.path.relpath(path, location)
            entries.append(relative)
            if os.access(path, os.X_OK):
                executable.append(relative)
        if len(entries) > _ENTRIES_LIMIT:
            break
    for name in (program, REQUIREMENTS, *PROJECT_FILES):
        path = os.path.join(location, name)  # noqa: PTH118
        if name and name not in entries and os.path.isfile(path):  # noqa: PTH113
            entries.append(name)
            if os.access(path, os.X_OK):
                executable.append(name)
    project = ""
    setup, pyproject = PROJECT_FILES
    if setup in entries:
        project = setup
    elif pyproject in entries:
        beginning = _read_beginning(Path(location, pyproject))
        if re.search(_PROJECT_TABLE, beginning, re.MULTILINE):
            project = pyproject
    return Code(
        directory=location, entries=tuple(entries), executable=tuple(executable), project=project
    )


def _has_code(directory: str) -> bool:
    """Return whether a directory may have the user's code: not ``.git`` or ``__pycache__``."""
    return not directory.startswith(".") and directory != "__pycache__"


def _installed(location: str) -> tuple[str, ...]:
    """Return the names in INSTALLED (``entry_point.py``): files that ``build.py extend`` installed.

    () if there is no such file, if it cannot be parsed, or if a file of the code has changed since
    the image was built. Reads every file that it lists.
    """
    marker = Path(location, INSTALLED)
    if not marker.is_file():
        return ()
    import hashlib
    import json

    try:
        record = json.loads(marker.read_bytes())
        for name, expected in record["files"].items():
            path = Path(location, name)
            if not path.is_file():
                return ()
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if digest != expected:
                return ()
        return tuple(str(name) for name in record["installed"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def _read_beginning(path: Path) -> bytes:
    """Return the first bytes of a file; b"" if it cannot be read."""
    try:
        with path.open("rb") as opened:
            return opened.read(_READ_LIMIT)
    except OSError:
        return b""


def _inspect_archive(archive: str, directory: str, program: str) -> tuple[Code, list[Problem]]:
    """Return the code that a directory will have once a local archive is unpacked there.

    ``judge`` refuses the same archives as ``programs/unpack.py``.

    Args:
        archive: Path of the archive.
        directory: The directory; its files stay if the archive does not replace them.
        program: The requested entry point.

    Returns:
        The code, and the archive's problems.
    """
    import tarfile

    from trainworks_launcher.environment.source_archive import (  # only an archive needs it
        judge,
        members_of,
    )

    project_file = b""
    try:
        with tarfile.open(archive, "r:*") as opened:
            contents = judge(members_of(opened), directory)
            member = contents.files.get((PROJECT_FILES[1],))
            stream = opened.extractfile(member) if member else None
            if stream is not None:
                project_file = stream.read(_READ_LIMIT)
    except Exception as error:  # noqa: BLE001  (a hostile archive makes tarfile raise nearly anything)
        problem = f"the code archive cannot be used: {str(error) or type(error).__name__}"
        advice = "pack a directory of plain files with: tar -czf"
        return Code(directory), [Problem(problem, archive, advice)]
    existing = _inspect_directory(directory, program)
    paths = (*contents.files, *contents.links, *contents.hard_links)
    entries = {"/".join(path) for path in paths}
    modes = {path: member.mode for path, member in contents.files.items()}
    for path, source in contents.hard_links.items():
        modes[path] = modes[source]
    executable = {"/".join(path) for path, mode in modes.items() if mode & 0o100}
    executable |= {name for name in existing.executable if name not in entries}

    # A project file of the archive replaces the directory's; setup.py counts before pyproject.toml.
    setup, pyproject = PROJECT_FILES
    project = "" if existing.project in entries else existing.project
    is_project = re.search(_PROJECT_TABLE, project_file, re.MULTILINE) is not None
    if is_project and not project:
        project = pyproject
    if setup in entries:
        project = setup
    code = Code(
        directory=directory,
        archive=archive,
        entries=tuple(sorted(entries | set(existing.entries))),
        executable=tuple(sorted(executable)),
        project=project,
        notes=_note_replaced_files(archive, directory, existing.entries, entries),
    )
    return code, []


def _note_replaced_files(
    archive: str, directory: str, existing: tuple[str, ...], entries: set[str]
) -> tuple[str, ...]:
    """Return one note if an archive is unpacked over existing files; else ()."""
    if not existing:
        return ()
    note = (
        f"the code of {archive} is laid over {len(existing)} file(s)"
        f" that are in {directory} already"
    )
    replaced = sorted(entries.intersection(existing))
    if replaced:
        note += f", and replaces {', '.join(replaced[:_MAX_SHOWN_FILES])}"
    if len(replaced) > _MAX_SHOWN_FILES:
        note += f" and {len(replaced) - _MAX_SHOWN_FILES} more"
    return (note,)
