"""Find targets by name: their plans, and the tags of their images."""

from __future__ import annotations

from trainworks.facts.rows import Facts
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import plan_row


def plan_of_target(name: str, facts: Facts) -> ImagePlan | None:
    """Return the plan of a target with its default components; ``None`` if no target has this name.

    Raises:
        LockError: The target has no lock, or the lock does not fit the row.
        CompatibilityError: Its components are not compatible.
    """
    for row in facts.targets:
        if facts.name_of(row) == name:
            return plan_row(row, facts)
    return None


def reference_of(name: str, facts: Facts) -> str:
    """Return the reference of an image: a target's first tag, or the name itself if no target has it."""
    plan = plan_of_target(name, facts)
    return name if plan is None else plan.tags[0]
