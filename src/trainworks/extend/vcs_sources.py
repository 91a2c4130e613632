"""What an extension's wheels are built from: git repositories, each at a
commit, and folders of this machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainworks.errors import ExtendError, LockError
from trainworks.extend.plan import PROJECT_SOURCE, WheelSource
from trainworks.extend.requirements import ExtensionLock, GitRequirement
from trainworks.extend.user_code import read_source
from trainworks.facts.rows import SourceFile
from trainworks.host.bootstrap import EPOCH
from trainworks.host.cache import cache_folder
from trainworks.host.git import archival_of, source_archive
from trainworks.terminal.output import say

_SAYS_REQUIREMENTS = re.compile(
    r"pyproject\.toml|setup\.(py|cfg)|requirements[^/]*|\.git_archival\.txt"
)
"""Files at the root of a project that may decide what it requires, and which version it is."""


def git_sources(
    wanted: Iterable[GitRequirement],
    known: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    resolving: bool,
) -> tuple[list[WheelSource], dict[str, str]]:
    """Return the files of git repositories and their commits, by requirement.

    Args:
        wanted: The requirements.
        known: Commits that a lock has; the others are asked for.
        environment: The process's environment, which says where caches lie.
        resolving: Whether a commit that is not known may be asked for.

    Raises:
        LockError: Git is not installed, or a repository does not answer or does not have the
            reference or commit.
    """
    sources: list[WheelSource] = []
    commits: dict[str, str] = {}
    for requirement in wanted:
        pinned = commits.get(str(requirement)) or known.get(str(requirement), "")
        if not pinned and not resolving:
            raise LockError(
                f"{requirement} has no commit in the lock",
                hint="`build.py extend` with the same choice writes it",
            )
        commit, archive = _archive(requirement, pinned, environment)
        commits[str(requirement)] = commit
        sources.append(
            WheelSource(
                archive=archive,
                origin=str(requirement),
                subdirectory=requirement.subdirectory,
                name=requirement.name,
                extras=requirement.extras,
                identity=commit,
            )
        )
    return sources, commits


def _archive(
    requirement: GitRequirement, commit: str, environment: Mapping[str, str]
) -> tuple[str, bytes]:
    """Return the commit and its files, from the cache where the commit is
    known: no network is needed then.
    """
    folder = cache_folder(environment, "git")
    stem = hashlib.sha256(requirement.url.encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        if commit:
            return commit, (folder / f"{stem}-{commit}.tar").read_bytes()
    say(f"  cloning {requirement}")
    commit, archive = source_archive(requirement.url, commit or requirement.reference)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = folder / f"{stem}-{commit}.part"
        part.write_bytes(archive)
        part.replace(folder / f"{stem}-{commit}.tar")
    return commit, archive


def repository_source(address: str, name: str, environment: Mapping[str, str]) -> WheelSource:
    """Return a git repository at a commit, as uv names it: ``git+URL@COMMIT#subdirectory=PATH``.

    Raises as above.
    """
    place, _, inner = address.removeprefix("git+").partition("#subdirectory=")
    url, _, commit = place.rpartition("@")
    requirement = GitRequirement(
        place=address, url=url, reference=commit, subdirectory=inner, name=name
    )
    (source,), _ = git_sources(
        [requirement], {str(requirement): commit}, environment, resolving=False
    )
    return source


def source_at(folder: Path, forbidden: tuple[str, ...]) -> WheelSource:
    """Return a project's folder, which another project names.

    Raises ``ExtendError`` with its problems.
    """
    tree = read_source(folder, name=str(folder), forbidden=forbidden)
    if tree.problems:
        raise ExtendError(
            list(tree.problems), hint="a .trainworksignore in that folder leaves files out"
        )
    return folder_source(tree.files, folder, origin=str(folder))


def named_sources(
    lock: ExtensionLock, beside: Path, forbidden: tuple[str, ...]
) -> tuple[list[WheelSource], bool]:
    """Return what a lock's folders and repositories are, and whether the
    folders require what they required then.

    Args:
        lock: The lock.
        beside: Where it lies.
        forbidden: Texts of this machine that must not be in an image.

    Raises:
        ExtendError: A folder cannot be taken.
        LockError: A repository does not answer, or does not have the commit any more.
    """
    found: list[WheelSource] = []
    for path, identity in lock.folders.items():
        folder = Path(os.path.normpath(beside / path))
        source = source_at(folder, forbidden) if folder.is_dir() else None
        if source is None or source.identity != identity:
            return [], False
        found.append(source)
    return [
        *found,
        *(repository_source(each, name, os.environ) for each, name in lock.repositories.items()),
    ], True


def folder_source(
    files: Iterable[SourceFile], folder: Path, *, origin: str = PROJECT_SOURCE, extras: str = ""
) -> WheelSource:
    """Return a folder's files as what a wheel is built from, with the version
    that its git repository says.
    """
    files = list(files)
    if said := archival_of(folder):
        name = ".git_archival.txt"
        files = [
            *(file for file in files if file.path != name),
            SourceFile(path=name, content=said.encode()),
        ]
    buffer = io.BytesIO()
    identity = hashlib.sha256()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in files:
            member = tarfile.TarInfo(f"source/{file.path}")
            member.size, member.mode, member.mtime = len(file.content), file.mode, EPOCH
            archive.addfile(member, io.BytesIO(file.content))
            if _SAYS_REQUIREMENTS.fullmatch(file.path):
                identity.update(file.path.encode() + file.content)
    return WheelSource(
        archive=buffer.getvalue(),
        origin=origin,
        extras=extras,
        identity=identity.hexdigest(),
        folder=str(folder.resolve()),
    )
