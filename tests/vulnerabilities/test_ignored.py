"""Findings that somebody has looked at: rows with a reason and a last day."""

from __future__ import annotations

from datetime import date

import pytest

from trainworks.errors import OutputError
from trainworks.facts.rows import Facts
from trainworks.vulnerabilities.advisory import read_advisory
from trainworks.vulnerabilities.ignore import read_rows, sort_findings
from trainworks.vulnerabilities.installed import read_purl
from trainworks.vulnerabilities.match import Finding, match
from vulnerabilities.support import PACKAGES, REAL

ROWS = """
[[ignore]]
id = "GHSA-j8r2-6x86-q33q"
package = "requests"
reason = "no proxy with a password here"
until = 2026-12-31
state = "not_affected"
justification = "requires_environment"

[[ignore]]
id = "CVE-2023-5363"
package = "libssl3"
reason = "until the base image is new"
until = 2026-11-20

[[ignore]]
id = "CVE-2023-32681"
package = "torch"
reason = "a slip of the pen"
until = 2026-12-31
"""


@pytest.fixture
def findings(facts: Facts) -> tuple[Finding, ...]:
    installed = [read_purl(purl, purl, facts.databases) for purl in PACKAGES]
    read = (read_advisory(each, "a database", {one.key for one in installed}) for each in REAL)
    return match(installed, [each for each in read if each is not None]).findings


def test_a_row_names_a_vulnerability_by_any_name_and_a_package_by_either(findings: tuple[Finding, ...]) -> None:
    found = sort_findings(findings, read_rows(ROWS, "rows.toml"), date(2026, 11, 20))
    assert [each.identifier for each in found.open] == ["CVE-2025-32434"]
    assert [(each.identifier, row.reason) for each, row in found.ignored] == [
        ("CVE-2023-32681", "no proxy with a password here"),
        ("CVE-2023-5363", "until the base image is new"),
    ]
    assert [row.package for row in found.unused] == ["torch"]
    assert found.expired == ()


def test_a_row_whose_day_is_over_ignores_nothing(findings: tuple[Finding, ...]) -> None:
    found = sort_findings(findings, read_rows(ROWS, "rows.toml"), date(2026, 11, 21))
    assert [each.identifier for each in found.open] == ["CVE-2025-32434", "CVE-2023-5363"]
    assert [row.package for row in found.expired] == ["libssl3"]


def test_every_problem_is_said_at_once() -> None:
    text = """
    other = 1
    [[ignore]]
    id = "A"
    package = "a"
    reason = ""
    until = "2026-12-31"
    [[ignore]]
    id = "A"
    pakage = "a"
    reason = "b"
    until = 2026-12-31T00:00:00
    state = "fine"
    [[ignore]]
    id = "B"
    package = "b"
    reason = "c"
    until = 2026-12-31
    [[ignore]]
    id = "B"
    package = "b"
    reason = "d"
    until = 2026-12-31
    """
    with pytest.raises(OutputError) as error:
        read_rows(text, "rows.toml")
    states = "in_triage, exploitable, not_affected, false_positive, resolved"
    day = "key 'until' must be a day, for example 2026-12-31, without quotes, got"
    assert error.value.message.split("\n  ") == [
        "8 problems with what to ignore:",
        "rows.toml: unknown key 'other'; the file has [[ignore]] rows",
        "rows.toml: ignore 1: key 'reason' must be a text, got ''",
        f"rows.toml: ignore 1: {day} '2026-12-31'",
        "rows.toml: ignore 2: unknown key 'pakage'; did you mean 'package'?",
        f"rows.toml: ignore 2: {day} datetime.datetime(2026, 12, 31, 0, 0)",
        "rows.toml: ignore 2: key 'package' is missing",
        f"rows.toml: ignore 2: key 'state': 'fine' is none of {states}",
        "rows.toml: B of b stands in two rows",
    ]


@pytest.mark.parametrize(
    ("text", "words"), [("[", "not TOML"), ("ignore = 1", r"must be written as \[\[ignore\]\] rows")]
)
def test_what_is_no_list_of_rows(text: str, words: str) -> None:
    with pytest.raises(OutputError, match=words):
        read_rows(text, "rows.toml")
