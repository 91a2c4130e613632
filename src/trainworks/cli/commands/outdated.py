"""``build.py outdated``: what a rebuild of an image would bring."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import (
    APT_SETTINGS,
    CPU_TARGET,
    DOCKER_HOST,
    FACTS,
    HOST_SETTINGS,
    IMAGE_ERRORS,
    PLANNING_ERRORS,
    Example,
    Grammar,
)
from trainworks.cli.options import add_engine, add_format
from trainworks.errors import BuildError, HostError, OutdatedError
from trainworks.terminal.output import put_result


def parser() -> Grammar:
    """Return the grammar of ``build.py outdated``."""
    grammar = Grammar(
        "outdated",
        summary="list the security updates and the newer locked versions that an image lacks",
        details="Reads the files of an image of Debian or Ubuntu, and asks apt, outside of the image, and the package "
        "indexes what they would install today, with the sources and proxies of this machine. No program of the image "
        "runs. Compares the image with its target's lock, too. The command fails where not everything could be "
        "compared.",
        examples=(
            Example(f"outdated {CPU_TARGET}", "the image of a target", needs="an engine and a network"),
            Example("outdated my/train:2", "any image of the engine", needs="an engine and a network"),
        ),
        result="a line for each package of which the archive, the lock or the index has another version; then what was "
        "compared.",
        done="no security update is missing",
        fails=(*PLANNING_ERRORS, *IMAGE_ERRORS, BuildError, HostError, OutdatedError),
        reads=(FACTS, HOST_SETTINGS, APT_SETTINGS, DOCKER_HOST),
        see_also=("prove", "docs/ship.md"),
    )
    grammar.add_argument(
        "image",
        metavar="IMAGE|TARGET",
        help="check this image, or that of this target",
    )
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Report the missing updates of an image."""
    from trainworks.assemble.outdated import find_outdated
    from trainworks.facts.load import load

    report = find_outdated(options.image, options.engine, load(root), os.environ)
    put_result(options.format, report.as_values(), report.as_text())
    if report.updates:
        raise OutdatedError(
            f"{report.name}: security updates are missing: {', '.join(each.name for each in report.updates)}",
            hint="`build.py lock --upgrade system` and a build bring them (docs/ship.md)",
            reported=True,
        )
    return 0
