"""What ``build.py extend`` is asked for: one field for each of its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainworks.build.order import BuildOptions


@dataclass(frozen=True, kw_only=True)
class ExtendRequest(BuildOptions):
    """An extension of an image, as it was asked for.

    Attributes:
        base: Name of the image to extend.
        tag: Name of the new image.
        requirements: File with the Python packages to install; ``None``: ``requirements.txt`` of ``source``, if any.
        only_binary: Names of which no source archive is built; ``:all:`` for all.
        apt: Debian packages to install.
        source: Folder with the code; ``None`` for no code.
        extras: Extras of the project, or of the lock, to install.
        groups: Dependency groups of the project, or of the lock, to install.
        entry_point: The program below ``source`` that a job starts; ``None``: the job names it.
    """

    base: str
    tag: str
    requirements: Path | None = None
    only_binary: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()
    source: Path | None = None
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    entry_point: str | None = None
