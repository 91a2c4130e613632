"""The table of docs/security.md: each step names the tests that try it with
hostile code, and they exist.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = []
    for line in lines[2:]:
        cells = line.strip("|").split("|")
        rows.append([cell.strip() for cell in cells])
    return rows


def test_each_step_has_a_test_that_tries_it() -> None:
    assert len(rows()) > 10
    for row in rows():
        files = re.findall(r"`(tests/[\w/.]+)`", row[-1])
        assert files, row[0]
        for file in files:
            assert "\ndef test_" in (ROOT / file).read_text(encoding="utf-8"), file


def test_a_step_with_secrets_runs_no_other_code() -> None:
    """The rule of the page, in its own table."""
    ours = ("uv", "curl", "git", "apt", "ours")
    for step, code, secrets, *_ in rows():
        if secrets not in ("none", "-"):
            words = re.split(r"[,;] ", code)
            assert all(
                word.startswith((*ours, "Debian's signed", "in a base of ours")) for word in words
            ), step
