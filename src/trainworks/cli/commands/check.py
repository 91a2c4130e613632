"""``build.py check``: plan the whole matrix and show what is incompatible."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trainworks.cli.grammar import FACTS, PLANNING_ERRORS, TARGET, Example, Grammar, add_format, add_only
from trainworks.terminal.output import put


def parser() -> Grammar:
    """Return the grammar of ``build.py check``."""
    grammar = Grammar(
        "check",
        summary="check targets against the compatibility rules and their locks",
        details="Plans targets without building anything, and shows which parts are incompatible, and why.",
        examples=(
            Example("check", "the whole matrix"),
            Example(f"check --only {TARGET} --format json", "one target, for programs"),
        ),
        result="each target that does not fit with rule, reason, remedy and source; then advice; the last line counts.",
        done="all fit",
        fails=PLANNING_ERRORS,
        reads=(FACTS,),
        see_also=("lock --check", "docs/compatibility.md"),
    )
    add_only(grammar)
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Check targets."""
    from trainworks.facts.load import load
    from trainworks.inspect.matrix_check import as_json, as_text, check_targets, exit_status_of

    findings = check_targets(load(root), options.only)
    put(as_json(findings) if options.format == "json" else as_text(findings))
    return exit_status_of(findings)
