"""Looks at the user's code: a directory, an archive, or the address of one.

Reads; changes nothing.
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

_ENTRIES_LIMIT = 20_000  # a data set beside the code must not make the start slow
_PROJECT_FILE_LIMIT = 1 << 20  # bytes of a pyproject.toml that are read
_PROJECT = rb"^\s*\[\s*(project|build-system)\s*\]"
_OBJECT = r"s3://[^/\s]+/.*[^/]"
_SHOWN = 5


def inspect_program(
    directory: str, words: Sequence[str], path: str
) -> tuple[tuple[str, ...], Code]:
    """Look at a program of the command line.

    Its code is where the user is. Nothing is installed: a ``requirements.txt`` there may be for
    another environment. A note says so.

    Args:
        directory: The working directory.
        words: The program and its arguments: a file, the name of a program on
            PATH, or ``-m`` and a module.
        path: Directories of programs, as PATH has them.

    Returns:
        The words, a program on PATH by its absolute path; and the code, whose entries are the
        program, or if it is not found the names of the files that are there.
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


_ENTRY_LIMIT = 1 << 26  # bytes of an entry point that are read
_MPI = rb"^\s*(?:from|import)\s+mpi4py\b"


def entry_files(code: Code, words: Sequence[str]) -> tuple[Path, ...]:
    """Return the files that a program begins with and that exist here.

    Args:
        code: The user's code.
        words: The program and its arguments; a script behind an interpreter
            (``bash run.sh``) is one of the files.
    """
    if code.archive:
        archive = Path(code.archive)
        return (archive,) if archive.is_file() else ()
    name = words[0] if words else ""
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
    """Return a digest of the bytes of ``entry_files``, ``""`` if there are none.

    Of a very large file, of its size.
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
    """Return whether a script of the program imports mpi4py by its own words."""
    for path in entry_files(code, words):
        if path.suffix == ".py" and re.search(_MPI, _beginning(path), re.MULTILINE):
            return True
    return False


def inspect_code(base: str, location: str, program: str) -> tuple[Code, list[Problem]]:
    """Look at the code at a location: a path, ``file://``, or an address at
    REMOTE, which is not fetched.

    Args:
        base: The base directory; an archive is unpacked into its code directory.
        location: Where the code is.
        program: The entry point asked for; it is looked up even if the code has very many files.

    Returns:
        The code, and why it cannot be used.
    """
    directory = f"{base}/{names.CODE_DIRECTORY}"
    scheme, separator, rest = location.partition("://")
    if separator and scheme == "file":
        location = _path_of(rest)
    elif location.startswith(REMOTE):
        return _inspect_address(location, directory, program)
    elif separator:
        advice = f"use {REMOTE}, file://, or mount the code at {directory}"
        return Code(directory=directory), [
            Problem(f"code cannot be fetched from {scheme}://", location, advice)
        ]
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
    """Return what is known of code that is not fetched yet."""
    baked = _inspect_directory(directory, program).entries
    notes = []
    if baked:
        notes.append(
            f"the code of {address} is laid over {len(baked)} file(s)"
            f" that are in {directory} already, and wins"
        )
    code = Code(directory, archive=address, notes=tuple(notes))
    if re.fullmatch(_OBJECT, address):
        return code, []
    advice = "give the address of a tar.gz: s3://BUCKET/KEY"
    return code, [Problem(f"{address!r} is not the address of an archive", "code", advice)]


def _path_of(rest: str) -> str:
    """Return the path of a ``file://`` address."""
    from urllib.parse import unquote

    if rest.startswith("localhost/"):
        rest = rest[len("localhost") :]
    return unquote(rest)


def _unused(location: str, directory: str) -> tuple[str, ...]:
    """Return a note, if the code comes from elsewhere and the image has some at the usual place."""
    if not Path(directory).is_dir() or Path(location).samefile(directory):
        return ()
    count = len(_inspect_directory(directory, "").entries)
    if not count:
        return ()
    note = f"the code is taken from {location}; the {count} file(s) in {directory} are not used"
    return (note,)


def _inspect_directory(location: str, program: str) -> Code:
    """Return the files of a directory, unsorted: at most a bounded number of
    them, and those that matter.
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
        text = _beginning(Path(location, pyproject))
        if re.search(_PROJECT, text, re.MULTILINE):
            project = pyproject
    return Code(
        directory=location, entries=tuple(entries), executable=tuple(executable), project=project
    )


def _has_code(directory: str) -> bool:
    """Return whether a directory of this name may have code that is a user's own."""
    return not directory.startswith(".") and directory != "__pycache__"


def _installed(location: str) -> tuple[str, ...]:
    """Return what INSTALLED names, if every file of the code is as it was when the image was built.

    Else ().
    """
    marker = Path(location, INSTALLED)
    if not marker.is_file():
        return ()
    import hashlib
    import json

    try:
        read = json.loads(marker.read_bytes())
        for name, expected in read["files"].items():
            path = Path(location, name)
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != expected:
                return ()
        return tuple(str(name) for name in read["installed"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def _beginning(path: Path) -> bytes:
    """Return the first bytes of a file; b"" if it cannot be read."""
    try:
        with path.open("rb") as opened:
            return opened.read(_PROJECT_FILE_LIMIT)
    except OSError:
        return b""


def _inspect_archive(archive: str, directory: str, program: str) -> tuple[Code, list[Problem]]:
    """Return what will be in the directory when a local archive has been unpacked over it.

    Judged as unpack.py will.
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
                project_file = stream.read(_PROJECT_FILE_LIMIT)
    except Exception as error:  # noqa: BLE001  (a hostile archive makes tarfile raise nearly anything)
        problem = f"the code archive cannot be used: {str(error) or type(error).__name__}"
        advice = "pack a directory of plain files with: tar -czf"
        return Code(directory), [Problem(problem, archive, advice)]
    baked = _inspect_directory(directory, program)
    entries = {"/".join(path) for path in (*contents.files, *contents.links, *contents.hard_links)}
    modes = {path: member.mode for path, member in contents.files.items()}
    modes.update({path: modes[source] for path, source in contents.hard_links.items()})
    executable = {"/".join(path) for path, mode in modes.items() if mode & 0o100}
    executable |= {name for name in baked.executable if name not in entries}
    project = baked.project if baked.project not in entries else ""
    if re.search(_PROJECT, project_file, re.MULTILINE) and not project:
        project = PROJECT_FILES[1]
    if PROJECT_FILES[0] in entries:
        project = PROJECT_FILES[0]
    code = Code(
        directory=directory,
        archive=archive,
        entries=tuple(sorted(entries | set(baked.entries))),
        executable=tuple(sorted(executable)),
        project=project,
        notes=_laid_over(archive, directory, baked.entries, entries),
    )
    return code, []


def _laid_over(
    archive: str, directory: str, baked: tuple[str, ...], entries: set[str]
) -> tuple[str, ...]:
    """Return a note, if an archive meets files that are there already."""
    if not baked:
        return ()
    note = (
        f"the code of {archive} is laid over {len(baked)} file(s) that are in {directory} already"
    )
    replaced = sorted(entries.intersection(baked))
    if replaced:
        note += f", and replaces {', '.join(replaced[:_SHOWN])}"
    if len(replaced) > _SHOWN:
        note += f" and {len(replaced) - _SHOWN} more"
    return (note,)
