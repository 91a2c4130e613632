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
    OSV_SERVICE,
    PLANNING_ERRORS,
    Example,
    Grammar,
    Manual,
)
from trainworks.cli.options import add_engine, add_format
from trainworks.errors import BuildError, HostError, NotComparedError, OutdatedError
from trainworks.terminal.output import put_result


def parser() -> Grammar:
    """Return the grammar of ``build.py outdated``."""
    manual = Manual(
        command="outdated",
        summary="list what an image lacks: security updates, patches, newer versions",
        details=(
            "Reads the files of an image of Debian or Ubuntu, and asks apt, outside of the image,"
            " and the package indexes what they would install today, with the sources and proxies"
            " of this machine. No program of the image runs. Compares the image with its target's"
            " lock and rows, asks a service with OSV's interface for advisories about its Python"
            " packages, and says whether its framework gets patches. The command fails where not"
            " everything could be compared. With TRAINWORKS_OSV set to the empty text no service is"
            " asked."
        ),
        examples=(
            Example(
                f"outdated {CPU_TARGET}", "the image of a target", needs="an engine and a network"
            ),
            Example(
                "outdated my/train:2", "any image of the engine", needs="an engine and a network"
            ),
        ),
        result=(
            "a line for each package of which the archive, the lock or the index has another"
            " version; then what was compared."
        ),
        done=(
            "no security update is missing, no advisory is published,"
            " and the framework gets patches"
        ),
        fails=(
            *PLANNING_ERRORS,
            *IMAGE_ERRORS,
            BuildError,
            HostError,
            OutdatedError,
            NotComparedError,
        ),
        reads=(FACTS, HOST_SETTINGS, APT_SETTINGS, DOCKER_HOST, OSV_SERVICE),
        see_also=("prove", "docs/ship.md"),
    )
    grammar = Grammar(manual)
    grammar.add_argument(
        "image",
        metavar="IMAGE|TARGET",
        help="check this image, or that of this target",
    )
    grammar.add_argument(
        "--allow-ended", action="store_true", help="accept a framework that gets no more patches"
    )
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Print the missing updates of an image, and its advisories; return 0 without any.

    Raises:
        OutdatedError: Something is missing.
        NotComparedError: Nothing is missing, but not everything could be compared.
    """
    from trainworks.build.outdated import check_report, find_outdated
    from trainworks.facts.load import load

    report = find_outdated(options.image, options.engine, load(root), os.environ)
    put_result(options.format, report.as_values(), report.as_text())
    check_report(report, allow_ended=options.allow_ended)
    return 0
