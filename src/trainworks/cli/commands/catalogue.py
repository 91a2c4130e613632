"""``build.py catalogue``: the matrix as one HTML file."""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put, put_file
from trainworks.facts.load import load


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py catalogue``."""
    grammar = argparse.ArgumentParser(
        prog="build.py catalogue",
        description="Writes one HTML file with every target: search and filters, versions, sizes, checks, and how to "
        "use each. It needs no network.",
        allow_abbrev=False,
    )
    grammar.add_argument("--output", type=Path, metavar="FILE", help="default: stdout")
    grammar.add_argument("--format", choices=("html", "json"), default="html", help="json: what the page is made from")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Write the catalogue."""
    from trainworks.cli.catalogue import as_json, catalogue_of, render_catalogue

    facts = load(root)
    entries = catalogue_of(facts)
    text = as_json(entries) if options.format == "json" else render_catalogue(entries, facts.templates[TEMPLATE])
    if options.output is None:
        put(text)
    else:
        put_file(options.output, text)
    return 0


TEMPLATE = "catalogue.html.j2"
