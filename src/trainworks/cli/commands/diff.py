"""``build.py diff``: what is another between two images."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put
from trainworks.facts.load import load


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py diff``."""
    grammar = argparse.ArgumentParser(
        prog="build.py diff",
        description="Says what is another between two images: components, Python and Debian packages, environment, "
        "labels, entry point, files and layers.",
        allow_abbrev=False,
    )
    grammar.add_argument("before", metavar="IMAGE|TARGET", help="an image of the engine's store, or a target's name")
    grammar.add_argument("after", metavar="IMAGE|TARGET", help="the other one")
    grammar.add_argument("--engine", metavar="NAME", help="docker or buildah; default: the first that answers")
    grammar.add_argument("--format", choices=("text", "json"), default="text", help="of the result on stdout")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Compare two images."""
    from trainworks.cli.contents import read_contents, reference_of
    from trainworks.cli.difference import as_text, difference
    from trainworks.engine import choose

    facts = load(root)
    engine = choose(options.engine)
    before = read_contents(engine, reference_of(options.before, facts), facts, digests=True)
    after = read_contents(engine, reference_of(options.after, facts), facts, digests=True)
    found = difference(before, after)
    put(json.dumps(found.as_values(), indent=2) + "\n" if options.format == "json" else as_text(found))
    return 0
