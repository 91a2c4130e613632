"""The user's cache folder: what can be deleted at any time, and is made or downloaded again."""

from __future__ import annotations

import os
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
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache").joinpath(
        "trainworks", *names
    )


def write_cached(path: Path, content: bytes) -> None:
    """Write a file of the cache, complete or not at all; raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)
