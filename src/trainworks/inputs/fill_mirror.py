"""``build.py mirror``: fills a folder with everything that targets download, for ``--mirror``
(``inputs.mirror``).
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from trainworks.errors import LockError, OutputError
from trainworks.facts.rows import Artifact, Facts, LockedPackage, TargetRow
from trainworks.host.downloads import Client, UnreachableError, content_of
from trainworks.host.index import file_addresses
from trainworks.host.pip import PipSettings, find_local_file
from trainworks.host.settings import HostSettings
from trainworks.inputs.lock_artifacts import Report
from trainworks.inputs.mirror import INDEX
from trainworks.inputs.sources import Places, archives_of, fetch_source, holds
from trainworks.plan.resolve import downloads_of
from trainworks.terminal.download_progress import Fetching
from trainworks.terminal.formatting import megabytes
from trainworks.terminal.progress import BYTES, DISPLAY

SUMS = "SHA256SUMS"
PYTHON_SUFFIXES = (".whl", ".tar.gz", ".zip")


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A file of the mirror: ``sha256`` is ``""`` for a bundle, ``size`` 0 if it
    is not known, ``get`` brings it.
    """

    file: str
    what: str
    sha256: str
    size: int
    get: Callable[[Path], None]
    fits: Callable[[Path], bool]


def fill_mirror(
    rows: Iterable[TargetRow],
    facts: Facts,
    folder: Path,
    client: Client,
    settings: HostSettings,
    *,
    report: Report,
    fetching: Fetching,
) -> None:
    """Bring everything that targets download into a folder.

    What is there and fits stays, what was broken off goes on.

    Args:
        rows: The targets: all that their lock and their components ask for, optional ones included.
        folder: The mirror; made where it is not there.
        settings: Where this machine's pip looks for Python files.
        report: Told what is being done.
        fetching: Shows the downloads; what watches ``client``.

    Raises:
        LockError: With everything that could not be brought; the rest is there then.
        OutputError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files, problems = _all_wanted(rows, facts, client, settings)
        with fetching.shown("mirroring", sum(wanted.size for wanted in files)) as task:
            task.about = not all(wanted.size for wanted in files)
            for wanted in files:
                path, before = folder / wanted.file, task.done
                try:
                    if path.exists() and wanted.fits(path):
                        task.skip(wanted.size)
                        continue
                    wanted.get(path)
                    report(f"  {wanted.file}  {megabytes(path.stat().st_size)}")
                except LockError as error:
                    problems.append(
                        f"{wanted.what}: {error.message}"
                        + (f"; {error.hint}" if error.hint else "")
                    )
                task.reach(before + wanted.size)
        _write_listings(folder)
    except OSError as error:
        raise OutputError(
            f"{error.filename or folder} cannot be written: {error.strerror}"
        ) from error
    if problems:
        count = f"{len(problems)} file{'s are' if len(problems) > 1 else ' is'}"
        raise LockError(
            f"{count} not in {folder}:\n  " + "\n  ".join(problems),
            hint="the others are; the same command goes on where this one ended",
        )


def _all_wanted(
    rows: Iterable[TargetRow], facts: Facts, client: Client, settings: HostSettings
) -> tuple[tuple[_Wanted, ...], list[str]]:
    """Return the files that targets need, and why some of them cannot be brought."""
    problems: list[str] = []
    found: dict[str, _Wanted] = {}
    places = Places(folders=(), archives=archives_of(facts.bases, settings.apt, settings.suite))
    for row in rows:
        name = facts.name_of(row)
        artifacts = downloads_of(row, facts)
        unrecorded = [artifact for artifact in artifacts if not (artifact.git or artifact.sha256)]
        problems += [
            f"{each.name} {each.version}: no sha256 of {each.url} is recorded; `python build.py"
            " lock` records it"
            for each in unrecorded
        ]
        wanted = [_artifact(each, places, client) for each in artifacts if each not in unrecorded]
        if name in facts.locks:
            wanted += [
                _package(package, row, client, settings.pip)
                for package in facts.locks[name].packages
            ]
        else:
            problems.append(
                f"{name}: its Python files are not locked; `python build.py lock --only {name}`"
            )
        for each in wanted:
            other = found.setdefault(each.file, each)
            if other.sha256 != each.sha256:
                problems.append(
                    f"{each.what}: {each.file} is also {other.what}, another file;"
                    " use a folder for each"
                )
    return tuple(found.values()), list(dict.fromkeys(problems))  # targets share artifacts


def _artifact(artifact: Artifact, places: Places, client: Client) -> _Wanted:
    return _Wanted(
        file=artifact.file,
        what=f"{artifact.name} {artifact.version}",
        sha256=artifact.sha256,
        size=artifact.size,
        get=lambda path: fetch_source(artifact, path, places, client),
        fits=lambda path: holds(artifact, path),
    )


def _package(
    package: LockedPackage, row: TargetRow, client: Client, settings: PipSettings
) -> _Wanted:
    def get(path: Path) -> None:
        local = find_local_file(package, settings)
        if local is not None:
            part = path.with_name(f"{path.name}.part")
            part.write_bytes(local.read_bytes())
            part.replace(path)
            return
        for address in file_addresses(package, settings, row.wheel_index, client):
            with suppress(UnreachableError):
                client.download(address, path, sha256=package.sha256)
                return
        raise UnreachableError(
            f"no index of this machine's pip has {package.file} with sha256 {package.sha256}"
        )

    return _Wanted(
        file=package.file,
        what=f"{package.name} {package.version}",
        sha256=package.sha256,
        size=package.size,
        get=get,
        fits=lambda path: content_of(path).sha256 == package.sha256,
    )


def _write_listings(folder: Path) -> None:
    files = sorted(_files(folder))
    sums = ""
    with DISPLAY.task(
        "hashing", sum((folder / name).stat().st_size for name in files), BYTES
    ) as task:
        for name in files:
            content = content_of(folder / name)
            sums += f"{content.sha256}  {name}\n"
            task.advance(content.size)
    (folder / SUMS).write_text(sums, encoding="utf-8")
    links = "".join(
        f'<a href="{quote(name)}">{html.escape(name)}</a><br>\n'
        for name in files
        if name.endswith(PYTHON_SUFFIXES)
    )
    (folder / INDEX).write_text(
        f"<!DOCTYPE html>\n<title>packages</title>\n{links}", encoding="utf-8"
    )


def _files(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_file() and path.name not in (SUMS, INDEX) and path.suffix != ".part":
            yield path.name
