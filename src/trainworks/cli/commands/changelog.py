"""``build.py changelog``: the changelog of a family of images."""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put, put_file
from trainworks.errors import OutputError
from trainworks.facts.load import load


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py changelog``."""
    grammar = argparse.ArgumentParser(
        prog="build.py changelog",
        description="Writes the changelog of a family of images as Markdown, from the differences of each to the next.",
        allow_abbrev=False,
    )
    grammar.add_argument("images", nargs="+", metavar="IMAGE|TARGET", help="the oldest first")
    grammar.add_argument("--file", type=Path, metavar="FILE", help="add what is new to this changelog; default: stdout")
    grammar.add_argument("--engine", metavar="NAME", help="docker or buildah; default: the first that answers")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Write a changelog."""
    from trainworks.cli.contents import read_contents, reference_of
    from trainworks.cli.difference import changelog
    from trainworks.engine import choose

    existing = ""
    if options.file is not None and options.file.exists():
        try:
            existing = options.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OutputError(f"{options.file} cannot be read: {error}") from error
    facts = load(root)
    engine = choose(options.engine)
    images = [read_contents(engine, reference_of(name, facts), facts, digests=True) for name in options.images]
    text = changelog(images, existing)
    if options.file is None:
        put(text)
    else:
        put_file(options.file, text)
    return 0
