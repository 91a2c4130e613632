"""Which wheels of a component make which layer of an image; pure.

A registry and a host have a layer already where its wheels are exactly those of another image, and
neighbouring targets have many wheels in common. So a large wheel is a layer of its own, and the
small ones of a component are one layer: how a wheel is put away depends on that wheel alone, never
on what another target has beside it. It also lets a host download and unpack several layers at a
time, of which none is larger than the largest wheel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainworks.facts.rows import LockedPackage
from trainworks.plan.model import Step

LARGE = 10_000_000
"""Bytes of a wheel from which it is a layer of its own.

After another CUDA target with the same Python, a target sends at most 1.4 % beside the wheels that
the other one lacks (2.6 % with 25 MB here, 5.3 % with 100 MB), and has at most 30 layers of wheels.
"""


@dataclass(frozen=True, kw_only=True)
class WheelLayer:
    """Wheels that one build stage installs, and one layer of the image holds.

    Attributes:
        stage: Name of the build stage.
        requirements: Path of the list of its wheels in the build context.
        packages: The wheels and source archives, in the lock's order.
    """

    stage: str
    requirements: str
    packages: tuple[LockedPackage, ...]

    @property
    def archives(self) -> str:
        """Path of the list of its source archives; ``""`` without one."""
        return f"requirements/{self.stage}-archives.txt" if self.archive_packages else ""

    @property
    def wheel_packages(self) -> tuple[LockedPackage, ...]:
        """The packages that are wheels."""
        return tuple(package for package in self.packages if package.file.endswith(".whl"))

    @property
    def archive_packages(self) -> tuple[LockedPackage, ...]:
        """The packages that are built in a stage of their own."""
        return tuple(package for package in self.packages if not package.file.endswith(".whl"))


def one_layer(step: Step) -> tuple[WheelLayer, ...]:
    """Return the layer of a component that is not divided; nothing where it has no wheels."""
    return _named(step, (step.python,)) if step.python else ()


def divided(step: Step) -> tuple[WheelLayer, ...]:
    """Return the layers of a component: one of its small wheels together, and
    one of each large wheel.

    What a component downloads by itself is not divided: it needs the stage of
    the component's other wheels.

    Args:
        step: The component.
    """
    if step.artifacts:
        return one_layer(step)
    small = tuple(package for package in step.python if package.size < LARGE)
    large = tuple((package,) for package in step.python if package.size >= LARGE)
    return _named(step, (small, *large) if small else large)


def _named(step: Step, groups: Sequence[tuple[LockedPackage, ...]]) -> tuple[WheelLayer, ...]:
    """Name the stages: the first by the component, the others by their wheel too."""
    names = (step.component, *(f"{step.component}-{group[0].name}" for group in groups[1:]))
    return tuple(
        WheelLayer(stage=name, requirements=f"requirements/{name}.txt", packages=group)
        for name, group in zip(names, groups, strict=False)
    )
