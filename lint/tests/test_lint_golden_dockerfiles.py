"""The rules find nothing in the Dockerfiles that the builder of this repository writes."""

from __future__ import annotations

from pathlib import Path

from trainworks_lint.command import lint_files
from trainworks_lint.report import as_text

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"


def test_the_rules_find_nothing_in_golden_dockerfiles() -> None:
    # Targets of one framework are alike: every fourth file has each kind.
    report = lint_files(sorted(GOLDEN.rglob("Dockerfile*"))[::4], program="")
    assert len(report.files) > 3
    # An image is named by its tag alone where a user of `extend` does so, or where a vendor's base is not locked yet
    # (and then no build is started).
    rules = {finding.rule for file in report.files for finding in file.findings}
    assert rules - {"image-without-digest"} == set(), as_text(report)
