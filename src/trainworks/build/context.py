"""Writes a rendering to a folder: the build context, which is also what ``--output`` shows."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import OutputError
from trainworks.facts.rows import SourceFile
from trainworks.host.bootstrap import EPOCH
from trainworks.host.cache import cache_folder
from trainworks.host.pip import PipSettings, find_local_file
from trainworks.plan.model import ImagePlan
from trainworks.render.dockerfile import Rendering

CONTEXT_FOLDERS = frozenset(
    {
        "artifacts",
        "code",
        "files",
        "launcher",
        "requirements",
        "shells",
        "smdistributed",
        "sources",
        "wheels",
    }
)
"""Every folder that a context of ours may have at its top."""

MARK = "# Written by trainworks"
"""Stands in every Dockerfile of ours: a folder that has one may be replaced."""


def write_context(rendering: Rendering, folder: Path) -> None:
    """Write the Dockerfile and all files into an empty or new folder.

    The same rendering gives the same folder.

    Raises:
        OutputError: Something cannot be written; nothing of it is left then.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        dockerfile = SourceFile(path="Dockerfile", content=rendering.dockerfile.encode())
        for file in (dockerfile, *rendering.files):
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.content)
            target.chmod(file.mode)
            # The times of the last access and the last change.
            file_time = content_time(file.content)
            os.utime(target, ns=(file_time, file_time))
        for path in (*folder.rglob("*"), folder):
            if path.is_dir():
                # Folders are copied into the image as they are: this machine's umask must not
                # decide who may read them.
                path.chmod(0o755)
                os.utime(path, (EPOCH, EPOCH))
    except OSError as error:
        # Remove all written files: half a context looks like a whole one.
        written = [folder]
        if not is_new:
            # The folder itself was there before.
            written = [folder / name for name in _top_names(rendering)]
        for path in written:
            with contextlib.suppress(OSError):
                _remove(path)
        raise OutputError(
            f"{error.filename or folder}: {error.strerror or error}", hint="choose another --output"
        ) from error


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with everything in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _top_names(rendering: Rendering) -> set[str]:
    """Return the names of a context's files and folders at its top."""
    return {"Dockerfile", *(file.path.split("/", 1)[0] for file in rendering.files)}


def content_time(content: bytes) -> int:
    """Return the time of a context's file in nanoseconds since 1970: one second
    for all, a fraction by its content.

    Docker compares a context with the last one from the same place by sizes and times alone. With
    one fixed time a file that changed and kept its size would be taken for the old one; with the
    clock's, no two contexts would be the same.
    """
    fraction = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % 1_000_000_000
    return EPOCH * 1_000_000_000 + fraction


def replace_output(rendering: Rendering, folder: Path) -> None:
    """Clear ``--output`` for a new context: it may be new, empty, or an earlier context of ours.

    Raises:
        OutputError: The folder has anything else in it, or cannot be changed;
            nothing was removed then.
    """
    hint = "name a new or an empty folder with --output"
    try:
        if not folder.exists():
            return
        if not folder.is_dir():
            raise OutputError(f"{folder} is not a folder", hint=hint)
        names = {path.name for path in folder.iterdir()}
        own_names: set[str] = set()
        if _has_own_dockerfile(folder):
            # The earlier context may be another target's, which has more.
            own_names = _top_names(rendering) | CONTEXT_FOLDERS
        others = sorted(names - own_names)
        if others:
            shown = ", ".join(others[:3])
            raise OutputError(
                f"{folder} has files that trainworks did not write: {shown}", hint=hint
            )
        for name in names:
            # The folder itself stays: it may be a link, or a mount.
            _remove(folder / name)
    except OSError as error:
        raise OutputError(f"{folder}: {error.strerror or error}") from error


def _has_own_dockerfile(folder: Path) -> bool:
    """Return whether a folder has a Dockerfile that trainworks wrote."""
    dockerfile = folder / "Dockerfile"
    if not dockerfile.is_file():
        return False
    return MARK in dockerfile.read_text(encoding="utf-8", errors="replace")


def write_output(rendering: Rendering, folder: Path | None) -> tuple[str, dict[str, object]]:
    """Write a rendering to ``--output``, if there is one.

    Args:
        rendering: The Dockerfile and its files.
        folder: The folder, whose earlier context is replaced; ``None``: nothing is written.

    Returns:
        The result for people, the folder or else the Dockerfile; and the result for programs.

    Raises:
        OutputError: The folder has files that are not ours, or cannot be written.
    """
    text = rendering.dockerfile
    if folder is not None:
        replace_output(rendering, folder)
        write_context(rendering, folder)
        text = f"{folder}\n"
    paths = [file.path for file in rendering.files]
    return text, {"dockerfile": rendering.dockerfile, "files": paths}


@contextlib.contextmanager
def context_folder(name: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Give an empty folder for a build context, the same one for each build of
    an image, and remove it afterwards.

    Docker knows a context by its path: from a new path it sends and keeps every byte once more. Of
    two builds of one image at the same time, the second one gets a private folder.

    Args:
        name: The target's, or the image's.
        environment: The process's environment, which says where caches lie.
    """
    name = re.sub(r"[^a-z0-9.-]+", "-", name.lower())
    with contextlib.ExitStack() as stack:
        folder: Path | None = None
        try:
            cache = cache_folder(environment, "context")
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = stack.enter_context((cache / f"{name}.lock").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = cache / name
            # A build that was killed left its context behind.
            if folder.exists():
                shutil.rmtree(folder)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        except (OSError, RuntimeError):
            # Another build has it, it cannot be written, or there is no home
            # folder: only speed is lost.
            folder = None
        if folder is None:
            folder = stack.enter_context(private_folder())
        yield folder


@contextlib.contextmanager
def one_at_a_time(name: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Wait until no other thread or process is in the ``with`` block of the same name.

    A file in the user's cache folder is locked. Without such a file nothing waits.

    Args:
        name: A name for the shared object, such as a path; any text.
        environment: The process's environment, which says where caches lie.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):
            cache = cache_folder(environment)
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = cache / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
            fcntl.flock(stack.enter_context(file.open("wb")), fcntl.LOCK_EX)
        yield


def add_local_wheels(plan: ImagePlan, settings: PipSettings, folder: Path) -> tuple[str, ...]:
    """Put this machine's own copies of locked files into the context, each
    where its step mounts it.

    Args:
        plan: The plan of the image.
        settings: pip's settings, whose local folders and indexes are searched.
        folder: The context.

    Returns:
        The names of the files, in the order of the plan.

    Raises:
        OutputError: A file cannot be copied.
    """
    names = []
    for step in plan.steps:
        for package in step.python:
            source = find_local_file(package, settings)
            if source is not None:
                link_or_copy(source, folder / "wheels" / step.component / package.file)
                names.append(package.file)
    return tuple(dict.fromkeys(names))


def add_local_artifacts(plan: ImagePlan, sources: Sequence[Path], folder: Path) -> tuple[str, ...]:
    """Put this machine's copies of the components' downloads into the context.

    The build verifies them.

    Args:
        plan: The plan of the image.
        sources: Folders that may have them; the first one that has a file wins.
        folder: The context.

    Returns:
        The names of the files, in the order of the plan.

    Raises:
        OutputError: A file cannot be copied.
    """
    names = []
    for step in plan.steps:
        for artifact in step.artifacts:
            candidates = [source / artifact.file for source in sources]
            file = next((path for path in candidates if path.is_file()), None)
            if file is not None:
                link_or_copy(file, folder / "artifacts" / step.component / artifact.file)
                names.append(artifact.file)
    return tuple(names)


def link_or_copy(source: Path, target: Path) -> None:
    """Put a file into the context: a hard link costs nothing.

    Across file systems only a copy is possible. A file that is there stays.

    Args:
        source: The file, or a link to it.
        target: The file to make, in a folder that exists.

    Raises:
        OutputError: The file can neither be linked nor copied.
    """
    try:
        try:
            os.link(source.resolve(), target)  # a folder may have links
        except FileExistsError:
            return
        except OSError:
            shutil.copy2(source, target)
        # Newer versions of buildah have the times of what a step mounts in their cache's keys.
        os.utime(target.parent, (EPOCH, EPOCH))
    except OSError as error:
        raise OutputError(f"{target}: {error.strerror or error}") from error
