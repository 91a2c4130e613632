"""Check the rules of ``images/compatibility.toml`` against a plan, before the build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainworks.facts.ranges import ABSENT, Properties, satisfies
from trainworks.facts.rows import Rule


def all_hold(ranges: Mapping[str, str], properties: Properties) -> bool:
    """Return whether every property is in its range."""
    return all(
        satisfies(properties.get(name), allowed, properties) for name, allowed in ranges.items()
    )


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A rule that does not hold for a plan.

    Attributes:
        rule: The rule's name.
        found: What the plan has of the properties that the rule speaks about.
        wanted: What the rule requires; ``""`` where it refuses the combination itself.
        reason: Why.
        source: Where the rule comes from.
        instead: What to do.
    """

    rule: str
    found: str
    wanted: str
    reason: str
    source: str
    instead: str

    def __str__(self) -> str:
        """Return the conflict as one paragraph."""
        wanted = f" (required: {self.wanted})" if self.wanted else ""
        return (
            f"{self.rule}: {self.found}{wanted}: {self.reason}; instead: {self.instead} (source:"
            f" {self.source})"
        )


def conflicts(rules: Iterable[Rule], properties: Properties) -> tuple[Conflict, ...]:
    """Return a conflict for every rule that does not hold for these properties,
    in the order of the rules.
    """
    return tuple(
        Conflict(
            rule=rule.name,
            found=describe({**rule.when, **rule.require}, properties),
            wanted=", ".join(f"{name} {allowed}" for name, allowed in rule.require.items()),
            reason=rule.reason,
            source=rule.source,
            instead=rule.instead,
        )
        for rule in rules
        if all_hold(rule.when, properties)
        and not (rule.require and all_hold(rule.require, properties))
    )


def describe(names: Iterable[str], properties: Properties) -> str:
    """Return what a plan has of these properties, for people: ``nccl 2.18, smddp absent``."""
    words = []
    for name in names:
        value = properties.get(name)
        shown = " ".join(sorted(value)) or "empty" if isinstance(value, frozenset) else value
        words.append(f"{name} {shown or ABSENT}")
    return ", ".join(words)
