"""What ``build.py build`` is asked for, as values: one field for each option
that says how to build.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Stage = Literal["plan", "render", "build", "test"]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How an image is built: the options that ``build`` and ``extend`` share.

    Attributes:
        until: The last stage to do.
        engine: Name of the engine; ``None``: the first one that answers.
        output: Folder that gets the build context and keeps it; ``None``: a
            private one that is removed.
        junit: File that gets the results of the image tests as JUnit XML; ``None`` for no file.
        no_cache: Whether every step is built again.
        pull: Whether the base image is pulled or made again.
        locked: Whether another state of the package archive than the locked one is an error.
        verbose: Whether every line is shown, also of each step from the cache
            and each check that passes.
        test_again: Whether an image that has passed its checks is asked again.
    """

    until: Stage = "test"
    engine: str | None = None
    output: Path | None = None
    junit: Path | None = None
    no_cache: bool = False
    pull: bool = False
    locked: bool = False
    verbose: bool = False
    test_again: bool = False


@dataclass(frozen=True, kw_only=True)
class PushOrder:
    """Where a tested image is pushed to: ``HOST/NAME`` each, and under which
    tags instead of the default ones.
    """

    repositories: tuple[str, ...]
    fixed_tags: tuple[str, ...] = ()
    moving_tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BuildOrder(BuildOptions):
    """How targets are built.

    Attributes:
        mirror: Folder or address that downloads are taken from first; ``None`` for no mirror.
        offline: Whether the mirror is the only place that downloads are taken from.
        strict: Whether an input that is not locked, or a source that cannot be
            downloaded, is an error.
        record: Whether a build whose tests pass is written into ``images/built.toml``.
        push: Where the image is pushed to once it is tested; ``None``: nowhere.
    """

    mirror: str | None = None
    offline: bool = False
    strict: bool = False
    record: bool = False
    push: PushOrder | None = None
