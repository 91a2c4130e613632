"""The sources of an extension's wheels: git repositories, each at a commit, and folders."""

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
from trainworks.host.cache import cache_folder, write_cached
from trainworks.host.git import make_git_archival, make_source_archive
from trainworks.terminal.output import say

_SAYS_REQUIREMENTS = re.compile(
    r"pyproject\.toml|setup\.(py|cfg)|requirements[^/]*|\.git_archival\.txt"
)
"""Files at the root of a project that may decide its requirements and its version."""


def git_sources(
    requested: Iterable[GitRequirement],
    known: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    resolving: bool,
) -> tuple[list[WheelSource], dict[str, str]]:
    """Return the files of git repositories and their commits, by requirement.

    Args:
        requested: The requirements.
        known: Commits in a lock, by requirement.
        environment: The process's environment, which names the folder of caches.
        resolving: Whether the repository is asked for a commit that no lock has.

    Raises:
        LockError: Git is not installed, or a repository does not answer or does not have the
            reference or commit.
    """
    sources: list[WheelSource] = []
    commits: dict[str, str] = {}
    for requirement in requested:
        key = str(requirement)
        pinned = commits.get(key) or known.get(key, "")
        if not pinned and not resolving:
            raise LockError(
                f"{requirement} has no commit in the lock",
                hint="`build.py extend` with the same choice writes it",
            )
        commit, archive = _archive(requirement, pinned, environment)
        commits[key] = commit
        sources.append(
            WheelSource(
                archive=archive,
                origin=key,
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
    """Return the commit, and a tar of its files: from the cache, or else from the repository.

    A clone is announced on standard error and kept in the cache, under the hash of the URL.

    Args:
        requirement: The line of the requirements.
        commit: The commit, if a lock names it; ``""``: the requirement's reference is cloned.
        environment: The process's environment; ``XDG_CACHE_HOME`` moves the cache.
    """
    folder = cache_folder(environment, "git")
    stem = hashlib.sha256(requirement.url.encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        if commit:
            return commit, (folder / f"{stem}-{commit}.tar").read_bytes()
    say(f"  cloning {requirement}")
    commit, archive = make_source_archive(requirement.url, commit or requirement.reference)
    with contextlib.suppress(OSError):
        write_cached(folder / f"{stem}-{commit}.tar", archive)
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
    """Return the source of a folder that another project names.

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
    """Return the sources of a lock's folders and repositories.

    Args:
        lock: The lock.
        beside: The lock's folder.
        forbidden: Texts of this machine that must not be in an image.

    Returns:
        The sources, and whether the folders still require the same as when they were locked.
        If not, there are no sources.

    Raises:
        ExtendError: A folder cannot be taken.
        LockError: A repository does not answer, or no longer has the commit.
    """
    sources: list[WheelSource] = []
    for path, identity in lock.folders.items():
        folder = Path(os.path.normpath(beside / path))
        if not folder.is_dir():
            return [], False
        source = source_at(folder, forbidden)
        if source.identity != identity:
            return [], False
        sources.append(source)
    for address, name in lock.repositories.items():
        sources.append(repository_source(address, name, os.environ))
    return sources, True


def folder_source(
    files: Iterable[SourceFile], folder: Path, *, origin: str = PROJECT_SOURCE, extras: str = ""
) -> WheelSource:
    """Return a folder's files as the source of a wheel, with the version of its git repository."""
    all_files = list(files)
    git_version = make_git_archival(folder)
    if git_version:
        name = ".git_archival.txt"
        all_files = [file for file in all_files if file.path != name]
        all_files.append(SourceFile(path=name, content=git_version.encode()))
    buffer = io.BytesIO()
    identity = hashlib.sha256()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in all_files:
            member = tarfile.TarInfo(f"source/{file.path}")
            member.size = len(file.content)
            member.mode = file.mode
            member.mtime = EPOCH
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
