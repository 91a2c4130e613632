"""``build.py schema``: writes the JSON schemas of the files in ``images/``."""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py schema``."""
    grammar = argparse.ArgumentParser(
        prog="build.py schema",
        description="Writes the JSON schemas of the files in images/ to images/schema, from the types of the rows.",
        allow_abbrev=False,
    )
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(_options: Namespace, root: Path) -> int:
    """Write the schemas."""
    from trainworks.cli.schema import write_schemas

    for path in write_schemas(root / "images" / "schema"):
        put(f"{path}\n")
    return 0
