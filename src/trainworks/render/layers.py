"""Which wheels of a component make which layer of an image; pure.

A host downloads and unpacks an image layer by layer, several at a time: it waits for the largest one. So a component
whose wheels together are larger than the largest wheel of the image gets several layers of about the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainworks.facts.rows import LockedPackage
from trainworks.plan.model import ImagePlan, Step

SMALLEST = 100_000_000
"""Bytes of wheels that are never divided: below, one more layer costs a pull as much as it saves."""


@dataclass(frozen=True, kw_only=True)
class WheelLayer:
    """Wheels that one build stage installs, and one layer of the image holds.

    Attributes:
        stage: Name of the build stage.
        requirements: Path of its requirements in the build context.
        packages: The wheels, in the lock's order.
    """

    stage: str
    requirements: str
    packages: tuple[LockedPackage, ...]


def largest_wheel(plan: ImagePlan) -> int:
    """Return the bytes of the largest wheel that is in the image, as the lock has them; 0 where it has no size."""
    return max((package.size for step in plan.steps if step.in_image for package in step.python), default=0)


def one_layer(step: Step) -> tuple[WheelLayer, ...]:
    """Return the layer of a component that is not divided; nothing where it has no wheels."""
    return _named(step, (step.python,)) if step.python else ()


def divided(step: Step, largest: int) -> tuple[WheelLayer, ...]:
    """Return the layers of a component: as few as possible, of about the same size, none larger than ``largest``.

    What a component downloads by itself is not divided: its size may be unknown, and it needs its other wheels' stage.

    Args:
        step: The component.
        largest: Bytes of the largest wheel of the image.
    """
    limit = max(largest, SMALLEST)
    if step.artifacts or sum(package.size for package in step.python) <= limit:
        return one_layer(step)
    count = 2
    while _size(groups := _balanced(step.python, count)) > limit:
        count += 1
    return _named(step, groups)


def _balanced(packages: Sequence[LockedPackage], count: int) -> tuple[tuple[LockedPackage, ...], ...]:
    """Share packages out among groups: each, the largest first, to the group that has the least so far."""
    groups: list[list[LockedPackage]] = [[] for _ in range(count)]
    for package in sorted(packages, key=lambda each: (-each.size, each.name)):
        min(groups, key=lambda group: sum(each.size for each in group)).append(package)
    order = {package: number for number, package in enumerate(packages)}
    return tuple(tuple(sorted(group, key=order.__getitem__)) for group in groups)


def _size(groups: Sequence[Sequence[LockedPackage]]) -> int:
    return max(sum(package.size for package in group) for group in groups)


def _named(step: Step, groups: Sequence[tuple[LockedPackage, ...]]) -> tuple[WheelLayer, ...]:
    names = (step.component, *(f"{step.component}-{number}" for number in range(2, len(groups) + 1)))
    return tuple(
        WheelLayer(stage=name, requirements=f"requirements/{name}.txt", packages=group)
        for name, group in zip(names, groups, strict=True)
    )
