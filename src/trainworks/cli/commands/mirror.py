"""``build.py mirror``: fills a folder with everything that targets download."""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put
from trainworks.facts.load import load
from trainworks.plan.select import rows_named


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py mirror``."""
    grammar = argparse.ArgumentParser(
        prog="build.py mirror",
        description=(
            "Fills a folder with everything that targets download: the files of their components, git commits as "
            "bundles, their Python files; each verified. `--mirror DIR`, or its address, builds from it."
        ),
        allow_abbrev=False,
    )
    grammar.add_argument("folder", type=Path, metavar="DIR", help="new, or filled before: only what is missing comes")
    grammar.add_argument("--only", action="append", default=[], metavar="TARGET", help="default: every target")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Fill a mirror."""
    from trainworks.cli.build import say
    from trainworks.cli.mirror import fill_mirror
    from trainworks.host.downloads import Client
    from trainworks.host.settings import read_host_settings

    facts = load(root)
    rows = rows_named(options.only, facts)
    settings = read_host_settings(os.environ)
    with Client(settings) as client:
        fill_mirror(rows, facts, options.folder, client, settings, report=say)
    put(f"{options.folder}\n")
    return 0
