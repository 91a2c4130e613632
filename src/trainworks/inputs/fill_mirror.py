"""``build.py mirror``: fills a folder with everything that targets download, for ``--mirror``
(``inputs.mirror``).
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from trainworks.errors import LockError, OutputError
from trainworks.facts.rows import Artifact, Facts, LockedPackage, TargetRow
from trainworks.host.downloads import Client, UnreachableError, hash_file
from trainworks.host.index import find_file_addresses
from trainworks.host.pip import PipSettings, find_local_file
from trainworks.host.settings import HostSettings
from trainworks.inputs.mirror import INDEX
from trainworks.inputs.sources import Places, archives_of, fetch_source, has_locked_content
from trainworks.plan.resolve import list_downloads
from trainworks.terminal.download_progress import Fetching
from trainworks.terminal.formatting import megabytes
from trainworks.terminal.output import say
from trainworks.terminal.progress import BYTES, DISPLAY, Task

SUMS = "SHA256SUMS"
"""The list of all files with their hashes, for ``sha256sum --check``."""

PYTHON_SUFFIXES = (".whl", ".tar.gz", ".zip")


@dataclass(frozen=True, kw_only=True)
class _MirrorFile:
    """A file of the mirror.

    Attributes:
        file: The file's name.
        label: Name and version of the package or artifact, for messages.
        sha256: The file's hash; ``""`` for a bundle of git.
        size: The file's size in bytes; 0 if unknown.
        get: Downloads the file to a path.
        fits: Returns whether the file at a path is the right one.
    """

    file: str
    label: str
    sha256: str
    size: int
    get: Callable[[Path], None]
    fits: Callable[[Path], bool]


def fill_mirror(
    rows: Iterable[TargetRow], facts: Facts, folder: Path, settings: HostSettings
) -> None:
    """Download all files of targets into a folder.

    Existing files that fit stay, and interrupted downloads continue.

    Args:
        rows: The targets, with all files of their locks and components, optional ones included.
        folder: The mirror; created if missing.
        settings: This machine's settings; its pip finds Python files.

    Raises:
        LockError: Lists the files that cannot be downloaded; the others are in the folder.
        OutputError: The folder cannot be written.
    """
    fetching = Fetching()
    with Client(settings, watch=fetching) as client:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files, problems = _list_target_files(rows, facts, client, settings)
            with fetching.shown("mirroring", sum(file.size for file in files)) as task:
                problems += _download_files(files, folder, task)
            _write_listings(folder)
        except OSError as error:
            raise OutputError(
                f"{error.filename or folder} cannot be written: {error.strerror}"
            ) from error
    if problems:
        number = f"{len(problems)} files are"
        if len(problems) == 1:
            number = "1 file is"
        raise LockError(
            f"{number} not in {folder}:\n  " + "\n  ".join(problems),
            hint="the others are; the same command continues where this one ended",
        )


def _download_files(files: Sequence[_MirrorFile], folder: Path, task: Task) -> list[str]:
    """Download the files that the folder does not have; return a line for each failure."""
    problems = []
    # Files of unknown size make the total an estimate.
    task.about = not all(file.size for file in files)
    for file in files:
        path, done_before = folder / file.file, task.done
        try:
            if path.exists() and file.fits(path):
                task.skip(file.size)
                continue
            file.get(path)
            say(f"  {file.file}  {megabytes(path.stat().st_size)}")
        except LockError as error:
            problem = f"{file.label}: {error.message}"
            if error.hint:
                problem += f"; {error.hint}"
            problems.append(problem)
        task.reach(done_before + file.size)
    return problems


def _list_target_files(
    rows: Iterable[TargetRow], facts: Facts, client: Client, settings: HostSettings
) -> tuple[tuple[_MirrorFile, ...], list[str]]:
    """Return the files of targets, and the problems of files that cannot be downloaded."""
    problems: list[str] = []
    file_by_name: dict[str, _MirrorFile] = {}
    places = Places(folders=(), archives=archives_of(facts.bases, settings.apt, settings.suite))
    for row in rows:
        name = facts.name_of(row)
        files: list[_MirrorFile] = []
        for artifact in list_downloads(row, facts):
            if artifact.git or artifact.sha256:
                files.append(_describe_artifact(artifact, places, client))
            else:
                problems.append(
                    f"{artifact.name} {artifact.version}: no sha256 of {artifact.url} is recorded;"
                    " `python build.py lock` records it"
                )
        if name in facts.locks:
            packages = facts.locks[name].packages
            files += [_describe_package(package, row, client, settings.pip) for package in packages]
        else:
            problems.append(
                f"{name}: its Python files are not locked; `python build.py lock --only {name}`"
            )
        for file in files:
            # A mirror is one flat folder: two files of one name do not fit into it.
            first = file_by_name.setdefault(file.file, file)
            if first.sha256 != file.sha256:
                problems.append(
                    f"{file.label}: {file.file} is also {first.label}, another file;"
                    " use a folder for each"
                )
    # Targets share artifacts, and so have the same problems.
    return tuple(file_by_name.values()), list(dict.fromkeys(problems))


def _describe_artifact(artifact: Artifact, places: Places, client: Client) -> _MirrorFile:
    """Return the file of an artifact, with the functions that download and check it."""
    return _MirrorFile(
        file=artifact.file,
        label=f"{artifact.name} {artifact.version}",
        sha256=artifact.sha256,
        size=artifact.size,
        get=lambda path: fetch_source(artifact, path, places, client),
        fits=lambda path: has_locked_content(artifact, path),
    )


def _describe_package(
    package: LockedPackage, row: TargetRow, client: Client, settings: PipSettings
) -> _MirrorFile:
    """Return the file of a Python package, with the functions that download and check it."""

    def get(path: Path) -> None:
        local = find_local_file(package, settings)
        if local is not None:
            part = path.with_name(f"{path.name}.part")
            part.write_bytes(local.read_bytes())
            part.replace(path)
            return
        for address in find_file_addresses(package, settings, row.wheel_index, client):
            with suppress(UnreachableError):
                client.download(address, path, sha256=package.sha256)
                return
        raise UnreachableError(
            f"no index of this machine's pip has {package.file} with sha256 {package.sha256}"
        )

    return _MirrorFile(
        file=package.file,
        label=f"{package.name} {package.version}",
        sha256=package.sha256,
        size=package.size,
        get=get,
        fits=lambda path: hash_file(path).sha256 == package.sha256,
    )


def _write_listings(folder: Path) -> None:
    """Write the two listings: sums of all files, and links to the Python files."""
    names = sorted(_find_mirrored_files(folder))
    size = sum((folder / name).stat().st_size for name in names)
    sums = ""
    with DISPLAY.task("hashing", size, BYTES) as task:
        for name in names:
            content = hash_file(folder / name)
            sums += f"{content.sha256}  {name}\n"
            task.advance(content.size)
    (folder / SUMS).write_text(sums, encoding="utf-8")
    page = "<!DOCTYPE html>\n<title>packages</title>\n"
    for name in names:
        if name.endswith(PYTHON_SUFFIXES):
            page += f'<a href="{quote(name)}">{html.escape(name)}</a><br>\n'
    (folder / INDEX).write_text(page, encoding="utf-8")


def _find_mirrored_files(folder: Path) -> Iterator[str]:
    """Yield the names of complete files, without the listings."""
    for path in folder.iterdir():
        is_listing = path.name in (SUMS, INDEX)
        is_partial = path.suffix == ".part"
        if path.is_file() and not is_listing and not is_partial:
            yield path.name
