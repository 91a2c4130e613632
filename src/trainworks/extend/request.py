"""What ``build.py extend`` is asked for: one field for each of its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainworks.build.options import BuildOptions


@dataclass(frozen=True, kw_only=True)
class ExtendRequest(BuildOptions):
    """An extension of an image, as it was asked for.

    Attributes:
        base: Name of the image to extend.
        tag: Name of the new image.
        requirements: File with the Python packages to install; ``None``:
            ``requirements.txt`` of ``source``, if any.
        only_binary: Names of which no source archive is built; ``:all:`` for all.
        apt: Debian packages to install.
        with_components: Components that wheels are built with, and that are not
            in the image: ``nvcc``.
        build_environment: Variables of these builds.
        build_network: Whether these builds have a network.
        built_whole: Distributions whose builds see the packages of the base, such as torch.
        source: Folder with the code; ``None`` for no code.
        extras: Extras of the project, or of the lock, to install.
        groups: Dependency groups of the project, or of the lock, to install.
        strict: Lines of another build of the base's framework are refused, not
            answered with what the base has.
        entry_point: The program below ``source`` that a job starts; ``None``: the job names it.
    """

    base: str
    tag: str
    requirements: Path | None = None
    only_binary: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()
    with_components: tuple[str, ...] = ()
    build_environment: Mapping[str, str] = field(default_factory=dict)
    build_network: bool = False
    built_whole: tuple[str, ...] = ()
    source: Path | None = None
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    entry_point: str | None = None
    strict: bool = False
