"""``build.py lint``: hands over to ``trainworks-lint``, a package of its own in ``lint/``."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import Example, Grammar, Source, add_format
from trainworks.errors import HostError, LintError


def parser() -> Grammar:
    """Return the grammar of ``build.py lint``."""
    grammar = Grammar(
        "lint",
        summary="find common mistakes in any Dockerfile (trainworks-lint)",
        details="Starts trainworks-lint, which finds the mistakes that are common in Dockerfiles of training images.",
        examples=(
            Example("lint Dockerfile", "one of your own", needs="trainworks-lint"),
            Example("lint Dockerfile gpu/Dockerfile --format json", "two, for programs", needs="trainworks-lint"),
        ),
        result="the findings; lint/README.md explains each rule.",
        done="nothing but advice",
        fails=(HostError, LintError),
        reads=(Source("PATH", "trainworks-lint: `pip install ./lint` in a checkout"),),
        see_also=("lint/README.md",),
    )
    grammar.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a Dockerfile")
    add_format(grammar, note="of the findings on stdout")
    return grammar


def run(options: Namespace, _root: Path) -> int:
    """Become ``trainworks-lint``."""
    program = shutil.which("trainworks-lint")
    if program is None:
        raise HostError("trainworks-lint is not installed", hint="`pip install ./lint` in a checkout of trainworks")
    os.execv(program, [program, "--format", options.format, "--", *map(str, options.files)])
