"""Severities, rules, and what a rule has found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trainworks_lint.document import Document

Severity = Literal["error", "warning", "advice"]
"""``error``: broken or unsafe. ``warning``: will break or mislead. ``advice``: does not change the exit status."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "advice")


@dataclass(frozen=True)
class Hit:
    """One place where a rule is broken.

    Attributes:
        line: Line of the file, from 1.
        what: What is wrong on that line.
        reason: Why it is a defect; empty: the rule's own reason.
        fix: What to write instead; empty: the rule's own fix.
    """

    line: int
    what: str
    reason: str = ""
    fix: str = ""


Check = Callable[["Document"], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """A defect class.

    Attributes:
        name: In kebab-case. It never changes, because comments in Dockerfiles use it.
        severity: How bad it is.
        summary: What it finds, for the README.
        reason: Why that is a defect.
        fix: What to write instead.
        check: Yields every place in a Dockerfile where the rule is broken.
    """

    name: str
    severity: Severity
    summary: str
    reason: str
    fix: str
    check: Check


@dataclass(frozen=True)
class Finding:
    """A broken rule, with everything that is needed to repair it."""

    line: int
    rule: str
    severity: Severity
    what: str
    reason: str
    fix: str


CREDENTIALS: tuple[tuple[re.Pattern[str], str], ...] = (
    # https://user:token@host, and a token alone before the @
    (re.compile(r"(?<=://)[^/\s@'\"`]+(?=@)"), "***"),
    # signed addresses and tokens among the parameters of an address
    (
        re.compile(r"(?i)(?<=[?&])([\w-]*(?:token|signature|secret|password|credential|api-?key|sig)=)[^&\s'\"`#]+"),
        r"\1***",
    ),
    # header of a download
    (re.compile(r"(?i)\b(authorization:\s*(?:bearer|basic|token)?\s*)[^\s'\"`]+"), r"\1***"),
    # tokens with the prefix of their issuer: GitHub, GitLab, Hugging Face, the package index, AWS access keys
    (re.compile(r"\b(?:gh[opsur]_|github_pat_|glpat-|hf_|pypi-|AKIA|ASIA)[A-Za-z0-9_-]{8,}"), "***"),
)
"""What a report must not show, and what stands in its place. A report ends up in logs that more people read."""


def masked(text: str) -> str:
    """Return a text without the credentials that a line of the Dockerfile holds."""
    for pattern, mask in CREDENTIALS:
        text = pattern.sub(mask, text)
    return text
