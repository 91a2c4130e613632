"""Options of more than one command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainworks.plan.own_artifacts import OwnArtifact

Container = argparse._ActionsContainer  # noqa: SLF001 - the only name for "a parser, or a group of its options"


def add_format(
    container: Container,
    choices: Sequence[str] = ("text", "json"),
    note: str = "write the result in this format",
) -> None:
    """Add ``--format``; the first choice is the default, and ``note`` begins the help."""
    container.add_argument(
        "--format", choices=choices, default=choices[0], help=f"{note} (default: {choices[0]})"
    )


def add_engine(container: Container) -> None:
    """Add ``--engine``, the choice of an engine."""
    container.add_argument(
        "--engine", metavar="ENGINE", help="use docker or buildah; default: the first that answers"
    )


def add_only(container: Container) -> None:
    """Add ``--only``, the choice of targets by a pattern of their names."""
    container.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="GLOB",
        help="choose targets of this name, such as 'pytorch-*'; default: all",
    )


def add_components(
    container: Container,
    chosen: str = "add an optional component",
    left: str = "leave out a component",
) -> None:
    """Add ``--with`` and ``--without``, the choice of optional components.

    Args:
        container: The parser, or a group of its options.
        chosen: The help of ``--with``.
        left: The help of ``--without``.
    """
    for option, note in (("with", chosen), ("without", left)):
        container.add_argument(
            f"--{option}",
            dest=f"{option}_components",
            action="append",
            default=[],
            metavar="COMPONENT",
            help=note,
        )


def add_artifact(container: Container, help_: str) -> None:
    """Add ``--artifact``: a wheel in the place of that of a target's row."""
    container.add_argument(
        "--artifact",
        action="append",
        default=[],
        type=_parse_artifact,
        metavar="NAME=URL#sha256=HASH",
        help=help_,
    )


def _parse_artifact(text: str) -> OwnArtifact:
    """Parse a value of ``--artifact``; raises ``ArgumentTypeError``, as argparse expects."""
    from trainworks.plan.own_artifacts import read_own_artifact

    try:
        return read_own_artifact(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_until(container: Container, stages: Sequence[str]) -> None:
    """Add ``--until``; the last stage is the default."""
    container.add_argument(
        "--until",
        choices=stages,
        default=stages[-1],
        help=f"stop after this stage (default: {stages[-1]})",
    )


def add_build_options(container: Container) -> None:
    """Add the options of every build: ``--output``, ``--junit``, ``--no-cache``, ``--verbose``."""
    container.add_argument(
        "--output", type=Path, metavar="DIR", help="write the build context to this folder"
    )
    add_junit(container)
    container.add_argument("--no-cache", action="store_true", help="build every step again")
    container.add_argument(
        "--verbose",
        action="store_true",
        help="show every line, and every step and check that passes",
    )


def add_junit(container: Container) -> None:
    """Add ``--junit``, the file for the results of image tests."""
    container.add_argument(
        "--junit",
        type=Path,
        metavar="FILE",
        help="write the results of the image tests as JUnit XML",
    )


def add_repositories(container: Container, *, required: bool = False) -> None:
    """Add ``--repository``, ``--tag`` and ``--moving-tag``."""
    container.add_argument(
        "--repository",
        action="append",
        default=[],
        required=required,
        metavar="REPOSITORY",
        help="push to HOST/NAME; may be repeated",
    )
    add_tags(container, fixed="the tag with today's date", moving="VERSION-CUDA-OS")


def add_tags(container: Container, *, fixed: str, moving: str = "none") -> None:
    """Add ``--tag`` and ``--moving-tag``.

    Args:
        container: The parser, or a group of its options.
        fixed: The default of ``--tag``.
        moving: The default of ``--moving-tag``.
    """
    container.add_argument(
        "--tag",
        action="append",
        default=[],
        dest="fixed_tags",
        metavar="TAG",
        help=f"set a tag that never moves; default: {fixed}",
    )
    container.add_argument(
        "--moving-tag",
        action="append",
        default=[],
        dest="moving_tags",
        metavar="TAG",
        help=f"set or move this tag; default: {moving}",
    )
