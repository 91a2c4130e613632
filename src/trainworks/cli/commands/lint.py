"""``build.py lint``: finds defects in Dockerfiles."""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path

from trainworks.cli.output import put


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py lint``."""
    grammar = argparse.ArgumentParser(
        prog="build.py lint",
        description="Finds defects in Dockerfiles, and shows hadolint's findings beside them; see docs/lint.md.",
        allow_abbrev=False,
    )
    grammar.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a Dockerfile, ours or any other")
    grammar.add_argument("--format", choices=("text", "json"), default="text", help="of the findings on stdout")
    grammar.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return grammar


def run(options: Namespace, _root: Path) -> int:
    """Lint files."""
    from trainworks.cli.lint import as_error, as_json, as_text, find_hadolint, lint_files

    report = lint_files(options.files, find_hadolint())
    put(as_json(report) if options.format == "json" else as_text(report))
    findings = as_error(report)
    if findings is not None:
        raise findings
    return 0
