"""Findings that somebody has looked at: a TOML file of rows, each with its reason and the day until which it holds.

The words for a finding's state are those of CycloneDX's VEX.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from typing import Any

from trainworks.errors import OutputError
from trainworks.vulnerabilities.match import Finding

STATES = ("in_triage", "exploitable", "not_affected", "false_positive", "resolved")
"""What a row may say of a finding; ``in_triage`` where it says nothing."""

JUSTIFICATIONS = (
    "code_not_present",
    "code_not_reachable",
    "requires_configuration",
    "requires_dependency",
    "requires_environment",
    "protected_by_compiler",
    "protected_at_runtime",
    "protected_at_perimeter",
    "protected_by_mitigating_control",
)
"""Why something is ``not_affected``."""

KEYS = {"id": str, "package": str, "reason": str, "until": date, "state": str, "justification": str}
REQUIRED = ("id", "package", "reason", "until")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A finding that is not to be reported as open.

    Attributes:
        identifier: Any of its names.
        package: The package, by the name that the report has, or that of what is installed of it.
        reason: Why, for people.
        until: The last day on which the row holds.
        state: One of ``STATES``.
        justification: One of ``JUSTIFICATIONS``, or ``""``.
    """

    identifier: str
    package: str
    reason: str
    until: date
    state: str = "in_triage"
    justification: str = ""

    def covers(self, finding: Finding) -> bool:
        """Whether a finding is the one that the row is about."""
        names = {finding.name, *(each.name for each in finding.packages)}
        return self.identifier in finding.identifiers and self.package in names


@dataclass(frozen=True, kw_only=True)
class Sorted:
    """Findings, open ones and ignored ones with their rows; rows whose day is over, and rows of no finding."""

    open: tuple[Finding, ...]
    ignored: tuple[tuple[Finding, Row], ...]
    expired: tuple[Row, ...]
    unused: tuple[Row, ...]


def sort_findings(findings: Sequence[Finding], rows: Sequence[Row], today: date) -> Sorted:
    """Return findings as the rows sort them; a row whose day is over ignores nothing any more."""
    ignored = []
    remaining = []
    used: set[Row] = set()
    for finding in findings:
        covering = [row for row in rows if row.covers(finding)]
        used.update(covering)
        valid = next((row for row in covering if row.until >= today), None)
        if valid is None:
            remaining.append(finding)
        else:
            ignored.append((finding, valid))
    return Sorted(
        open=tuple(remaining),
        ignored=tuple(ignored),
        expired=tuple(row for row in rows if row in used and row.until < today),
        unused=tuple(row for row in rows if row not in used),
    )


def read_rows(text: str, where: str) -> tuple[Row, ...]:
    """Return the rows of a file.

    Args:
        text: Its content.
        where: Its name, for messages.

    Raises:
        OutputError: With every problem of every row.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OutputError(f"{where}: not TOML: {error}") from None
    raw = content.get("ignore", [])
    problems = [f"{where}: unknown key {key!r}; the file has [[ignore]] rows" for key in content if key != "ignore"]
    if not isinstance(raw, list):
        problems.append(f"{where}: `ignore` must be written as [[ignore]] rows")
        raw = []
    rows = []
    for number, values in enumerate(raw, start=1):
        found = list(_problems(values))
        problems += [f"{where}: ignore {number}: {problem}" for problem in found]
        if not found:
            rows.append(Row(identifier=values["id"], **{key: values[key] for key in values if key != "id"}))
    names = [(row.identifier, row.package) for row in rows]
    problems += [f"{where}: {one} of {package} stands in two rows" for one, package in _repeated(names)]
    if problems:
        raise OutputError(
            "\n  ".join(
                [f"{len(problems)} problem{'s' if len(problems) != 1 else ''} with what to ignore:", *problems]
            ),
            hint='a row is: [[ignore]], id = "CVE-...", package = "NAME", reason = "...", until = YEAR-MONTH-DAY',
        )
    return tuple(rows)


def _problems(values: Any) -> Iterable[str]:
    if not isinstance(values, dict):
        yield f"must be a table of keys, got {values!r}"
        return
    for key, value in values.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            yield f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        elif type(value) is not KEYS[key] or not value:
            # The very type: TOML's days with a time are Python's days too.
            kind = "a day, for example 2026-12-31, without quotes" if key == "until" else "a text"
            yield f"key {key!r} must be {kind}, got {value!r}"
    yield from (f"key {key!r} is missing" for key in REQUIRED if key not in values)
    for key, allowed in (("state", STATES), ("justification", JUSTIFICATIONS)):
        value = values.get(key)
        if isinstance(value, str) and value and value not in allowed:
            yield f"key {key!r}: {value!r} is none of {', '.join(allowed)}"


def _repeated(names: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted({name for name in names if names.count(name) > 1})
