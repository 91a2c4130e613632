"""Find targets by name: their plans, and the tags of their images."""

from __future__ import annotations

from collections.abc import Sequence

from trainworks.facts.rows import Facts
from trainworks.inspect.listing import sorted_rows
from trainworks.plan.model import ImagePlan
from trainworks.plan.names import unknown
from trainworks.plan.resolve import plan_row


def plan_of_target(name: str, facts: Facts) -> ImagePlan | None:
    """Return the plan of a target with its default components; ``None`` if no target has this name.

    Raises:
        LockError: The target has no lock, or the lock does not fit the row.
        CompatibilityError: Its components are not compatible.
    """
    for row in sorted_rows(facts):
        if facts.name_of(row) == name:
            return plan_row(row, facts)
    return None


def plans_of_targets(names: Sequence[str], facts: Facts) -> list[ImagePlan]:
    """Return the plans of targets.

    Raises:
        UnknownNameError: No target has one of the names.
        LockError, CompatibilityError: See ``plan_of_target``.
    """
    plans = {name: plan_of_target(name, facts) for name in names}
    for name, plan in plans.items():
        if plan is None:
            raise unknown("target", name, map(facts.name_of, sorted_rows(facts)), more="`--list` shows them all")
    return [plan for plan in (plans[name] for name in names) if plan is not None]


def reference_of(name: str, facts: Facts) -> str:
    """Return the reference of an image: a target's first tag, or the name itself if no target has it."""
    plan = plan_of_target(name, facts)
    return name if plan is None else plan.tags[0]
