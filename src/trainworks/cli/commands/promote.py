"""``build.py promote``: an image goes from one repository to others by its digest."""

from __future__ import annotations

import argparse
import json
import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py promote``."""
    grammar = argparse.ArgumentParser(
        prog="build.py promote",
        description="Copies an image by its digest, with what is attached to it, to other repositories: no rebuild, no "
        "engine. Within a registry no layer is sent.",
        epilog="Exit status: 0 copied, 15 a registry refuses or cannot be reached.",
        allow_abbrev=False,
    )
    grammar.add_argument("source", metavar="SOURCE", help="HOST/NAME@sha256:... or HOST/NAME:TAG")
    grammar.add_argument("targets", nargs="+", metavar="REPOSITORY", help="HOST/NAME; several for several regions")
    grammar.add_argument(
        "--tag",
        action="append",
        default=[],
        dest="fixed_tags",
        metavar="TAG",
        help="a tag that never moves; default: the source's, where it was named by tag",
    )
    grammar.add_argument(
        "--moving-tag",
        action="append",
        default=[],
        dest="moving_tags",
        metavar="TAG",
        help="a tag that points here from now on",
    )
    grammar.add_argument("--format", choices=("text", "json"), default="text", help="of the result on stdout")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(options: Namespace, root: Path) -> int:  # noqa: ARG001 - every command is called so
    """Promote an image."""
    from trainworks.cli.build import say
    from trainworks.cli.push import check_tags, promote_image, report_of, text_of
    from trainworks.host.distribution import Registries
    from trainworks.host.settings import read_host_settings

    tags = check_tags(options.fixed_tags, options.moving_tags)
    with Registries(read_host_settings(os.environ), report=say) as registries:
        done = promote_image(options.source, options.targets, tags, registries)
    report = {"source": options.source, "promoted": report_of(done)}
    put(json.dumps(report, indent=2) + "\n" if options.format == "json" else text_of(done))
    return 0
