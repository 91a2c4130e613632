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
    add_engine,
    add_format,
)
from trainworks.errors import HostError, OutdatedError
from trainworks.terminal.output import put_result


def parser() -> Grammar:
    """Return the grammar of ``build.py outdated``."""
    grammar = Grammar(
        "outdated",
        summary="list the security updates and the newer locked versions that an image lacks",
        details="Compares the Debian or Ubuntu packages of an image with the security updates in the signed archive of "
        "its distribution, and the Python packages of a target's image with the lock. The command fails where nothing "
        "could be compared.",
        examples=(
            Example(f"outdated {CPU_TARGET}", "the image of a target", needs="an engine and a network"),
            Example("outdated my/train:2", "any image of the engine", needs="an engine and a network"),
            Example(
                "outdated proof/sbom.cdx.json --format json",
                "the packages of a bill of materials, for programs",
                needs="the file and a network",
            ),
        ),
        result="a line for each missing update: source package, packages, versions, CVEs; a line for each newer locked "
        "version; then what was compared.",
        done="no security update is missing",
        fails=(*PLANNING_ERRORS, *IMAGE_ERRORS, HostError, OutdatedError),
        reads=(FACTS, HOST_SETTINGS, APT_SETTINGS, DOCKER_HOST),
        see_also=("prove", "docs/ship.md"),
    )
    grammar.add_argument(
        "image",
        metavar="IMAGE|TARGET|FILE",
        help="check this image, target, or bill of materials (CycloneDX)",
    )
    add_engine(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Report the missing updates of an image."""
    from trainworks.facts.load import load
    from trainworks.inspect.outdated import find_outdated

    report = find_outdated(options.image, options.engine, load(root), os.environ)
    put_result(options.format, report.as_values(), report.as_text())
    if report.updates:
        raise OutdatedError(
            f"{report.name}: security updates are missing: {', '.join(each.source for each in report.updates)}",
            hint="`build.py lock --upgrade system` and a build bring them (docs/ship.md)",
            reported=True,
        )
    return 0
