"""Runs the table of rules over one Dockerfile and applies the suppressions that stand in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainworks.lint.document import Document, SyntaxProblem, parse
from trainworks.lint.findings import Finding, Hit, Rule
from trainworks.lint.rules import RULES

SUPPRESSION = re.compile(r"^\s*#\s*trainworks:\s*ignore\s*=\s*(?P<rules>\S*)(?P<reason>.*)$", re.IGNORECASE)

SUPPRESSION_RULE = "suppression"
"""The name under which a wrong suppression is reported; it cannot itself be suppressed."""


@dataclass
class Suppression:
    """One `# trainworks: ignore=RULE reason`.

    Attributes:
        line: Where it stands.
        rules: The names that it gives.
        reason: Why; must not be empty.
        covers: First and last line that it holds for.
        used: The rules that it kept silent.
    """

    line: int
    rules: tuple[str, ...]
    reason: str
    covers: tuple[int, int]
    used: set[str]


def lint(text: str) -> tuple[Finding, ...]:
    """Return what is wrong with a Dockerfile, by line.

    Args:
        text: The whole file.

    Returns:
        The findings that no suppression covers, and those about suppressions themselves. A text that is no Dockerfile
        gives one finding of the rule ``syntax``.
    """
    by_name = {rule.name: rule for rule in RULES}
    try:
        document = parse(text)
    except SyntaxProblem as problem:
        return (_finding(by_name["syntax"], Hit(problem.line, str(problem))),)
    suppressions = list(_suppressions(document))
    findings = []
    for rule in RULES:
        for hit in dict.fromkeys(rule.check(document)):
            holding = [
                suppression
                for suppression in suppressions
                if rule.name in suppression.rules and suppression.covers[0] <= hit.line <= suppression.covers[1]
            ]
            for suppression in holding:
                suppression.used.add(rule.name)
            if not any(suppression.reason for suppression in holding):
                findings.append(_finding(rule, hit))
    findings += _wrong_suppressions(suppressions, by_name)
    order = {rule.name: number for number, rule in enumerate(RULES)}
    return tuple(sorted(findings, key=lambda finding: (finding.line, order.get(finding.rule, -1), finding.what)))


def _finding(rule: Rule, hit: Hit) -> Finding:
    return Finding(hit.line, rule.name, rule.severity, hit.what, rule.reason, rule.fix)


def _suppressions(document: Document) -> Iterator[Suppression]:
    """Yield the suppressions: each holds for the next line, or for the whole instruction that begins there."""
    ends = {instruction.line: instruction.end_line for instruction in document.instructions}
    for number, line in enumerate(document.lines, start=1):
        match = SUPPRESSION.match(line)
        if match is None:
            continue
        # Other comments, and further suppressions, may stand between.
        target = number + 1
        while target <= len(document.lines) and document.lines[target - 1].lstrip().startswith("#"):
            target += 1
        names = tuple(name for name in match["rules"].split(",") if name)
        covers = (target, ends.get(target, target))
        yield Suppression(number, names, match["reason"].strip(" \t:-"), covers, set())


def _wrong_suppressions(suppressions: list[Suppression], rules: dict[str, Rule]) -> Iterator[Finding]:
    for suppression in suppressions:
        if not suppression.reason:
            yield _about(suppression, "it gives no reason, and does not hold")
        for name in suppression.rules or ("",):
            if name not in rules:
                yield _about(suppression, f"there is no rule {name}" if name else "it names no rule")
            elif name not in suppression.used:
                yield _about(suppression, f"{name} finds nothing here: it is not needed any more")


def _about(suppression: Suppression, what: str) -> Finding:
    return Finding(
        suppression.line,
        SUPPRESSION_RULE,
        "warning",
        what,
        "whoever reads it has to know what is ignored, and why",
        "# trainworks: ignore=RULE reason, on the line before; remove it where nothing is left to ignore",
    )
