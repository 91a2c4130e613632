"""What ``build.py extend`` is asked for: one field for each of its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ExtendRequest:
    """An extension of an image, as it was asked for.

    Attributes:
        base: Name of the image to extend.
        tag: Name of the new image.
        requirements: File with the Python packages to install; ``None``: ``requirements.txt`` of ``source``, if any.
        apt: Debian packages to install.
        source: Folder with the code; ``None`` for no code.
        entry_point: The program below ``source`` that a job starts; ``None``: the job names it.
        until: The last stage to do.
        engine: Name of the engine; ``None``: the first one that answers.
        output: Folder that gets the build context and keeps it; ``None``: a private one that is removed.
        junit: File that gets the results of the image tests; ``None`` for no file.
        no_cache: Whether every step is built again.
        verbose: Whether every line of the build is shown.
    """

    base: str
    tag: str
    requirements: Path | None = None
    apt: tuple[str, ...] = ()
    source: Path | None = None
    entry_point: str | None = None
    until: Literal["render", "build", "test"] = "test"
    engine: str | None = None
    output: Path | None = None
    junit: Path | None = None
    no_cache: bool = False
    verbose: bool = False
