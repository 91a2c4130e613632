"""What a lint run is about: severities, rules, and what a rule has found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trainworks.lint.document import Document

Severity = Literal["error", "warning", "advice"]
"""``error``: broken or unsafe; ``warning``: will break or mislead; ``advice``: does not change the exit status."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "advice")


@dataclass(frozen=True)
class Hit:
    """One place where a rule is broken.

    Attributes:
        line: Line of the file, from 1.
        what: What stands there, in words.
    """

    line: int
    what: str


Check = Callable[["Document"], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """A defect class.

    Attributes:
        name: Stable, kebab-case; suppressions and reports use it.
        severity: How bad it is.
        summary: What it finds, for the reference.
        reason: Why that is a defect.
        fix: What to write instead.
        check: Yields every place in a Dockerfile where it is broken.
    """

    name: str
    severity: Severity
    summary: str
    reason: str
    fix: str
    check: Check


@dataclass(frozen=True)
class Finding:
    """A broken rule, with all that a reader needs to repair it."""

    line: int
    rule: str
    severity: Severity
    what: str
    reason: str
    fix: str
