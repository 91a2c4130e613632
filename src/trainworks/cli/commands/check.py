"""``build.py check``: plans the whole matrix and says what does not go together."""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put
from trainworks.facts.load import load


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py check``."""
    grammar = argparse.ArgumentParser(
        prog="build.py check",
        description="Plans targets without building anything, and says which parts do not go together, and why; "
        "see docs/compatibility.md.",
        epilog="Exit status: 0 all fit, 3 malformed facts, 4 unknown name, 11 a lock does not fit, 13 parts do not.",
        allow_abbrev=False,
    )
    grammar.add_argument("--only", action="append", default=[], metavar="TARGET", help="default: every target")
    grammar.add_argument("--format", choices=("text", "json"), default="text", help="of the result on stdout")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Check targets."""
    from trainworks.cli.check import as_json, as_text, check, exit_status_of

    findings = check(load(root), options.only)
    put(as_json(findings) if options.format == "json" else as_text(findings))
    return exit_status_of(findings)
