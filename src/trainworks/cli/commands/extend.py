"""``build.py extend``: a base image, requirements and code become a tested image."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import (
    APT_SETTINGS,
    DOCKER_HOST,
    HOST_SETTINGS,
    Example,
    Grammar,
    add_build_options,
    add_engine,
    add_format,
    add_until,
)
from trainworks.errors import (
    BuildError,
    EngineError,
    EngineUnavailableError,
    ExtendError,
    HostError,
    ImageTestError,
    LockError,
    UnknownNameError,
)
from trainworks.terminal.output import put_result

STAGES = ("render", "build", "test")
"""How far ``--until`` goes; each includes those before it."""


def parser() -> Grammar:
    """Return the grammar of ``build.py extend``."""
    grammar = Grammar(
        "extend",
        summary="make a tested image of a base image, requirements and your code",
        details="Makes an image of a base image, requirements and code, and proves what is in it. Requirements without "
        "hashes are resolved for the base first, and the file with the hashes is kept beside yours.",
        examples=(
            Example(
                "extend --base my/pytorch:1 --tag my/train:1 --source src --entry-point train.py",
                "your code in an image of ours, or in any with a Python",
                needs="an engine",
            ),
            Example(
                "extend --base my/pytorch:1 --tag my/train:1 --requirements wanted.txt --apt libgl1",
                "more Python and Debian packages",
                needs="an engine",
            ),
        ),
        result="the new image's name, once all its tests are green; `build.py push NAME` brings it to a registry.",
        done="made, and tests green",
        fails=(
            UnknownNameError,
            EngineError,
            EngineUnavailableError,
            BuildError,
            ImageTestError,
            HostError,
            LockError,
            ExtendError,
        ),
        reads=(HOST_SETTINGS, APT_SETTINGS, DOCKER_HOST),
        see_also=("push", "prove", "report", "lint"),
    )
    grammar.add_argument("--base", required=True, metavar="IMAGE", help="an image of ours, or a registry's")
    grammar.add_argument("--tag", required=True, metavar="IMAGE", help="name of the new image, such as my/train:1")
    add_contents(grammar)
    add_until(grammar, STAGES)
    add_engine(grammar)
    add_format(grammar)
    add_build_options(grammar)
    return grammar


def add_contents(grammar: Grammar) -> None:
    """Add what goes into an extended image; ``prove`` is given the same."""
    grammar.add_argument(
        "--requirements", type=Path, metavar="FILE", help="to install (default: requirements.txt of --source)"
    )
    grammar.add_argument("--apt", action="append", default=[], metavar="PACKAGE", help="install this Debian package")
    grammar.add_argument("--source", type=Path, metavar="DIR", help="copied to /opt/ml/code; a project is installed")
    grammar.add_argument("--entry-point", metavar="FILE", help="below --source; default: the job names it")


def run(options: Namespace, root: Path) -> int:
    """Extend an image."""
    from trainworks.extend.image import extend
    from trainworks.extend.request import ExtendRequest

    request = ExtendRequest(
        base=options.base,
        tag=options.tag,
        requirements=options.requirements,
        apt=tuple(options.apt),
        source=options.source,
        entry_point=options.entry_point,
        until=options.until,
        engine=options.engine,
        output=options.output,
        junit=options.junit,
        no_cache=options.no_cache,
        verbose=options.verbose,
    )
    done = extend(request, root, os.environ)
    put_result(options, done.report, done.text)
    if done.broken is not None:
        raise done.broken
    return 0
