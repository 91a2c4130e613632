"""Divides the wheels of a component among layers of an image; pure.

A registry and a host have a layer already where its wheels are exactly those of another image, and
neighbouring targets have many wheels in common. So a large wheel is a layer of its own, and the
small ones of a component are one layer: how a wheel is put away depends on that wheel alone, never
on what another target has beside it. It also lets a host download and unpack several layers at a
time, of which none is larger than the largest wheel.
"""

from __future__ import annotations

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


def _layer(stage: str, packages: tuple[LockedPackage, ...]) -> WheelLayer:
    requirements = f"requirements/{stage}.txt"
    return WheelLayer(stage=stage, requirements=requirements, packages=packages)


def one_layer(step: Step) -> tuple[WheelLayer, ...]:
    """Return the layer of a component that is not divided; nothing for one without wheels."""
    if not step.python:
        return ()
    return (_layer(step.component, step.python),)


def divided(step: Step) -> tuple[WheelLayer, ...]:
    """Return the layers of a component: one of its small wheels together, and
    one of each large wheel.

    A component that downloads a wheel by itself is not divided: that wheel needs the stage of the
    component's other wheels.

    Args:
        step: The component.
    """
    if step.artifacts:
        return one_layer(step)
    groups = []
    small = tuple(package for package in step.python if package.size < LARGE)
    if small:
        groups.append(small)
    groups += [(package,) for package in step.python if package.size >= LARGE]

    # The first stage has the component's name, the others that of their wheel too.
    layers: list[WheelLayer] = []
    for group in groups:
        stage = f"{step.component}-{group[0].name}" if layers else step.component
        layers.append(_layer(stage, group))
    return tuple(layers)
