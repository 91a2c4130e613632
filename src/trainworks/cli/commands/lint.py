"""``build.py lint``: finds defects in Dockerfiles."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import CPU_TARGET, Example, Grammar, Source, add_format
from trainworks.errors import LintError
from trainworks.terminal.output import put


def parser() -> Grammar:
    """Return the grammar of ``build.py lint``."""
    grammar = Grammar(
        "lint",
        summary="find the defects of the field in any Dockerfile",
        details="Finds defects in Dockerfiles, and shows hadolint's findings beside them. Nothing is built.",
        examples=(
            Example(f"lint tests/golden/render/{CPU_TARGET}/Dockerfile", "a Dockerfile of this checkout"),
            Example("lint Dockerfile gpu/Dockerfile --format json", "two of your own, for programs", needs="files"),
        ),
        result="one paragraph for each finding: file, line, rule, reason, fix. docs/lint.md explains each rule.",
        done="nothing but advice",
        fails=(LintError,),
        reads=(Source("PATH", "hadolint, where it is installed"),),
        see_also=("docs/lint.md",),
    )
    grammar.add_argument("files", nargs="+", type=Path, metavar="FILE", help="check this Dockerfile")
    add_format(grammar, note="write the findings in this format")
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
