"""Compare two plans: what an upgrade would change, without a build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainworks.plan.model import ImagePlan


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference: ``before`` is ``None`` where it is new, ``after`` where it is gone."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """All differences between two plans.

    Attributes:
        before: Name of the first target.
        after: Name of the second one.
        base: Base image, interpreter and size budget.
        components: Components, name to version.
        python: Python distributions of the locks, name to version.
        packages: Packages of the distribution that are asked for by name; what those bring along is known in an image.
        artifacts: Files and repositories that components download by themselves, name to version.
        environment: Variables.
        labels: Labels.
    """

    before: str
    after: str
    base: tuple[Change, ...]
    components: tuple[Change, ...]
    python: tuple[Change, ...]
    packages: tuple[Change, ...]
    artifacts: tuple[Change, ...]
    environment: tuple[Change, ...]
    labels: tuple[Change, ...]

    def as_values(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return asdict(self)


def plan_difference(before: ImagePlan, after: ImagePlan) -> PlanDifference:
    """Return all differences between two plans, but for what only serves the build."""
    return PlanDifference(
        before=before.target.name,
        after=after.target.name,
        base=changes(_base(before), _base(after)),
        components=changes(_components(before), _components(after)),
        python=changes(_python(before), _python(after)),
        packages=changes(_packages(before), _packages(after)),
        artifacts=changes(_artifacts(before), _artifacts(after)),
        environment=changes(before.environment, after.environment),
        labels=changes(before.labels, after.labels),
    )


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    """Return what differs between two tables, by name."""
    return tuple(
        Change(name=name, before=before.get(name), after=after.get(name))
        for name in sorted({**before, **after})
        if before.get(name) != after.get(name)
    )


def _base(plan: ImagePlan) -> dict[str, str]:
    return {
        "base image": plan.image,
        "Python": plan.target.python,
        "size budget": f"{plan.budget_megabytes} MB",
    }


def _components(plan: ImagePlan) -> dict[str, str]:
    return {step.component: step.version for step in plan.steps if step.in_image}


def _python(plan: ImagePlan) -> dict[str, str]:
    return {package.name: package.version for step in plan.steps if step.in_image for package in step.python}


def _packages(plan: ImagePlan) -> dict[str, str]:
    return {name: "" for step in plan.steps if step.in_image for name in step.debian}


def _artifacts(plan: ImagePlan) -> dict[str, str]:
    return {artifact.name: artifact.version for step in plan.steps if step.in_image for artifact in step.artifacts}
