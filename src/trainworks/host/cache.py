"""The user's cache folder: what can be deleted at any time, and is made or downloaded again."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str], *names: str) -> Path:
    """Return the builder's folder in the user's cache, or one below it; it may not exist yet.

    Args:
        environment: The process's environment: ``XDG_CACHE_HOME``, default ``~/.cache``.
        names: Folders and a file below ``trainworks``, such as ``builds``.

    Raises:
        RuntimeError: The user has no home folder and ``XDG_CACHE_HOME`` is not set.
    """
    caches = environment.get("XDG_CACHE_HOME")
    folder = Path(caches) if caches else Path.home() / ".cache"
    return folder.joinpath("trainworks", *names)


def write_cached(path: Path, content: bytes) -> None:
    """Write a file of the cache, complete or not at all; its folder is created.

    Raises:
        OSError: The file cannot be written; no part of it is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A name of its own for each call: targets of one process are built in threads.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        draft = Path(file.name)
        try:
            file.write(content)
            file.close()
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
