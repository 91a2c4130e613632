"""Runs the table of rules over one Dockerfile and applies the suppressions in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from trainworks_lint.document import Document, SyntaxProblem, parse
from trainworks_lint.findings import Finding, Hit, Rule, masked
from trainworks_lint.rules import RULES

SUPPRESSION = re.compile(r"^\s*#\s*trainworks:\s*ignore\s*=\s*(?P<rules>\S*)(?P<reason>.*)$", re.IGNORECASE)

SUPPRESSION_RULE = "suppression"
"""The rule of findings about suppressions. It cannot be suppressed itself."""


@dataclass
class Suppression:
    """One `# trainworks: ignore=RULE reason`.

    Attributes:
        line: Of the comment.
        rules: The names of the rules that it suppresses.
        reason: Why; a suppression without a reason does not hold.
        covers: First and last line that it holds for.
        used: The rules of which it has suppressed a finding.
    """

    line: int
    rules: tuple[str, ...]
    reason: str
    covers: tuple[int, int]
    used: set[str]


def lint(text: str) -> tuple[Finding, ...]:
    """Return the findings in a Dockerfile, by line.

    Args:
        text: The whole file.

    Returns:
        The findings that are not suppressed, and those about suppressions themselves. A text that is not a Dockerfile
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
    return Finding(hit.line, rule.name, rule.severity, masked(hit.what), hit.reason or rule.reason, hit.fix or rule.fix)


def _suppressions(document: Document) -> Iterator[Suppression]:
    """Yield the suppressions. Each holds for the next line, or for the whole instruction that begins on it."""
    ends = {instruction.line: instruction.end_line for instruction in document.instructions}
    for number, line in enumerate(document.lines, start=1):
        match = SUPPRESSION.match(line)
        if match is None:
            continue
        # Other comments and suppressions may follow.
        target = number + 1
        while target <= len(document.lines) and document.lines[target - 1].lstrip().startswith("#"):
            target += 1
        names = tuple(name for name in match["rules"].split(",") if name)
        covers = (target, ends.get(target, target))
        yield Suppression(number, names, match["reason"].strip(" \t:-"), covers, set())


def _wrong_suppressions(suppressions: list[Suppression], rules: dict[str, Rule]) -> Iterator[Finding]:
    for suppression in suppressions:
        if not suppression.reason:
            yield _about(suppression, "the suppression has no reason, so it does not hold")
        for name in suppression.rules or ("",):
            if name not in rules:
                yield _about(suppression, f"unknown rule {name}{_nearest(name, rules)}" if name else "no rule is named")
            elif name not in suppression.used:
                yield _about(
                    suppression, f"{name} finds nothing in the next instruction: the suppression is not needed"
                )


def _about(suppression: Suppression, what: str) -> Finding:
    return Finding(
        suppression.line,
        SUPPRESSION_RULE,
        "warning",
        what,
        "a reader has to know what is ignored, and why",
        "write `# trainworks: ignore=RULE reason` on the line before, or remove the comment if it is not needed",
    )


def _nearest(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""
