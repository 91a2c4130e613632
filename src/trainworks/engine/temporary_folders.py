"""Private folders for the time of one build: readable by this user alone, and removed afterwards.

A process that is killed (SIGKILL, the machine's memory is full) removes nothing, and such folders
hold passwords. So each has a lock while its process lives. A process that makes a folder removes
those whose locks are free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trainworks.engine.subprocesses import uninterrupted
from trainworks.errors import OutputError

PREFIX = "trainworks-private-"

YOUNG = 60.0
"""Seconds for which a folder without a lock may belong to a process that is about to lock it."""


def large_folder() -> str:
    """Return the folder for temporary files of an image's size: TMPDIR, else
    /var/tmp, because /tmp may be in memory.
    """
    configured = os.environ.get("TMPDIR")
    if configured:
        return configured
    return "/var/tmp" if Path("/var/tmp").is_dir() else tempfile.gettempdir()  # noqa: S108 (as buildah does)


@contextlib.contextmanager
def private_folder(parent: str | None = None) -> Iterator[Path]:
    """Create a folder of mode 0700 with a random name, and remove it with its content at the end.

    Folders that killed processes of this user left behind are removed, too.

    Args:
        parent: The folder to create it in; default: that of ``tempfile``.

    Raises:
        OutputError: The folder cannot be made, filled (inside the block) or removed.
    """
    folder: tempfile.TemporaryDirectory[str] | None = None
    lock = -1
    _remove_left(Path(parent or tempfile.gettempdir()))
    try:
        with uninterrupted():
            folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
            lock = _lock(folder.name)
        yield Path(folder.name)
    except OSError as error:
        where = folder.name if folder is not None else parent or tempfile.gettempdir()
        raise OutputError(
            f"cannot write below {where} ({error.strerror or error})",
            hint="set TMPDIR to a folder with space",
        ) from error
    finally:
        if folder is not None:
            with uninterrupted():
                folder.cleanup()
                if lock >= 0:
                    os.close(lock)


def _lock(folder: str | Path) -> int:
    """Lock a folder while a file descriptor is open, and return the descriptor.

    -1 if another process has the lock, or the folder cannot be locked. Nothing is waited for.
    """
    descriptor = -1
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return -1
    return descriptor


def _remove_left(parent: Path) -> None:
    """Remove the folders of this user's processes that were killed; their locks are free."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{PREFIX}*"):
            status = path.lstat()
            # Between its creation and its lock, the folder of a living process has no lock.
            if status.st_uid != os.geteuid() or status.st_mtime > time.time() - YOUNG:
                continue
            descriptor = _lock(path)
            if descriptor >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)
