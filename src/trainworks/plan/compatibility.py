"""Check the rules of ``images/compatibility.toml`` against a plan, before the build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainworks.facts.ranges import ABSENT, Properties, satisfies
from trainworks.facts.rows import Rule


def all_hold(ranges: Mapping[str, str], properties: Properties) -> bool:
    """Return whether every property is in its range, such as ``{"nccl": ">=2.18"}``."""
    for name, allowed in ranges.items():
        if not satisfies(properties.get(name), allowed, properties):
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A rule that does not hold for a plan.

    Attributes:
        rule: The rule's name.
        found: The plan's values of the rule's properties: ``nccl 2.18, smddp absent``.
        wanted: The required ranges: ``nccl >=2.20``; ``""`` if the rule refuses the combination
            itself.
        reason: The reason of the rule.
        source: The document that the rule comes from.
        instead: The advice to the user.
    """

    rule: str
    found: str
    wanted: str
    reason: str
    source: str
    instead: str

    def __str__(self) -> str:
        """Return the conflict as one paragraph."""
        text = f"{self.rule}: {self.found}"
        if self.wanted:
            text += f" (required: {self.wanted})"
        return f"{text}: {self.reason}; instead: {self.instead} (source: {self.source})"


def find_conflicts(rules: Iterable[Rule], properties: Properties) -> tuple[Conflict, ...]:
    """Return a conflict for every rule that does not hold for these properties, in their order."""
    conflicts = []
    for rule in rules:
        if not all_hold(rule.when, properties):
            continue
        # A rule that requires nothing refuses the combination in ``when``.
        if rule.require and all_hold(rule.require, properties):
            continue
        required = [f"{name} {allowed}" for name, allowed in rule.require.items()]
        conflict = Conflict(
            rule=rule.name,
            found=describe_properties({**rule.when, **rule.require}, properties),
            wanted=", ".join(required),
            reason=rule.reason,
            source=rule.source,
            instead=rule.instead,
        )
        conflicts.append(conflict)
    return tuple(conflicts)


def describe_properties(names: Iterable[str], properties: Properties) -> str:
    """Return a plan's values of these properties, for people: ``nccl 2.18, smddp absent``."""
    words = []
    for name in names:
        value = properties.get(name)
        if isinstance(value, frozenset):
            # A part may have flags, and this one has none.
            text = " ".join(sorted(value)) or "empty"
        else:
            text = value or ABSENT
        words.append(f"{name} {text}")
    return ", ".join(words)
