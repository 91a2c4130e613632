"""What goes together: ranges of versions, and the rules that a plan is held against before anything is built.

A *subject* is what a rule speaks about, by name: a component, or ``cuda``, ``cudnn``, ``python``, ``glibc``, ``base``,
``driver``, ``sources``, a framework, and ``NAME.flags`` for the options of an artifact. A *range* says what its value
may be: ``,`` is "and", ``|`` is "or".

=====================  =============================================================================
``>=2.4,<3``           compared number by number; what a vendor adds behind the numbers counts for nothing
``11.3``               the same text, or one that continues it behind a dot
``ubuntu20.04|debian12``  one of several
``!=1.18``             anything else
``--disable-ngc``      one of several flags; ``!--disable-ngc``: not one of them
``present``            it is in the image, in whatever version
``absent``             it is not
=====================  =============================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from trainworks.facts.rows import Rule

Subjects = Mapping[str, str | frozenset[str]]
"""The values of one plan; what is not in it is absent. Flags are sets."""

PRESENT = "present"
ABSENT = "absent"

COMPARATORS: Mapping[str, Callable[[int], bool]] = {
    ">=": lambda order: order >= 0,
    "<=": lambda order: order <= 0,
    "==": lambda order: order == 0,
    "!=": lambda order: order != 0,
    ">": lambda order: order > 0,
    "<": lambda order: order < 0,
}
"""Comparators, longer ones first, and what they make of an order of two versions."""

NUMBERS = re.compile(r"\D*(\d+(?:\.\d+)*)")


def numbers(version: str) -> tuple[int, ...]:
    """Return the dotted numbers that a version begins with: ``1.22amzn4`` and ``v1.22-aws`` are (1, 22)."""
    match = NUMBERS.match(version)
    return tuple(int(number) for number in match[1].split(".")) if match else ()


def satisfies(value: str | frozenset[str] | None, allowed: str) -> bool:
    """Return whether a subject's value is in a range; ``None`` is the value of what is absent."""
    return any(
        all(_holds(value, condition.strip()) for condition in alternative.split(","))
        for alternative in allowed.split("|")
    )


def _holds(value: str | frozenset[str] | None, condition: str) -> bool:
    if condition in {PRESENT, ABSENT}:
        return (value is not None) is (condition == PRESENT)
    if isinstance(value, frozenset):
        return condition[1:] not in value if condition.startswith("!") else condition in value
    if value is None:
        return False
    for comparator, accepts in COMPARATORS.items():
        if condition.startswith(comparator):
            return accepts(_order(numbers(value), numbers(condition.removeprefix(comparator))))
    return value == condition or value.startswith(f"{condition}.")


def _order(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Compare as versions are compared: missing numbers are 0."""
    width = max(len(one), len(other))
    left, right = one + (0,) * (width - len(one)), other + (0,) * (width - len(other))
    return (left > right) - (left < right)


def all_hold(ranges: Mapping[str, str], subjects: Subjects) -> bool:
    """Return whether every subject is in its range."""
    return all(satisfies(subjects.get(name), allowed) for name, allowed in ranges.items())


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A rule that a plan breaks: what it found, why that is bad, who says so, and what to do."""

    rule: str
    found: str
    reason: str
    source: str
    instead: str

    def __str__(self) -> str:
        """Return the conflict as one paragraph."""
        instead = f"; instead: {self.instead}" if self.instead else ""
        return f"{self.rule}: {self.found}: {self.reason}{instead} (source: {self.source})"


def conflicts(rules: Iterable[Rule], subjects: Subjects) -> tuple[Conflict, ...]:
    """Return every rule that these subjects break, in the order of the rules."""
    return tuple(
        Conflict(
            rule=rule.name,
            found=describe({**rule.when, **rule.require}, subjects),
            reason=rule.reason,
            source=rule.source,
            instead=rule.instead,
        )
        for rule in rules
        if all_hold(rule.when, subjects) and not (rule.require and all_hold(rule.require, subjects))
    )


def describe(ranges: Iterable[str], subjects: Subjects) -> str:
    """Return what a plan has of these subjects, for people: ``nccl 2.18, cuda 12.1, smddp absent``."""
    words = []
    for name in ranges:
        value = subjects.get(name)
        shown = " ".join(sorted(value)) or "none" if isinstance(value, frozenset) else value
        words.append(f"{name} {shown or ABSENT}")
    return ", ".join(words)
