"""Divides the wheels of a component among layers of an image; pure.

A registry and a host have a layer already where its wheels are exactly those of another image, and
neighbouring targets have many wheels in common. So a large wheel is a layer of its own, and the
small ones of a component are one layer: the layer of a large wheel depends on that wheel alone, not
on the other wheels of a target. A host can also download and unpack several layers at a time, of
which none is larger than the largest wheel.
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
        """Path of the list of source archives in the build context; ``""`` without any."""
        if not self.archive_packages:
            return ""
        return f"requirements/{self.stage}-archives.txt"

    @property
    def wheel_packages(self) -> tuple[LockedPackage, ...]:
        """The packages that are wheels."""
        return tuple(package for package in self.packages if package.file.endswith(".whl"))

    @property
    def archive_packages(self) -> tuple[LockedPackage, ...]:
        """The packages that are built in a stage of their own."""
        return tuple(package for package in self.packages if not package.file.endswith(".whl"))


def _make_layer(stage: str, packages: tuple[LockedPackage, ...]) -> WheelLayer:
    """Return a layer with the path of its list: ``requirements/STAGE.txt``."""
    requirements = f"requirements/{stage}.txt"
    return WheelLayer(stage=stage, requirements=requirements, packages=packages)


def keep_one_layer(step: Step) -> tuple[WheelLayer, ...]:
    """Return the layer of a component that is not divided; nothing for one without wheels."""
    if not step.python:
        return ()
    return (_make_layer(step.component, step.python),)


def divide_wheels(step: Step) -> tuple[WheelLayer, ...]:
    """Return the layers of a component: one for its small wheels, and one for each large wheel."""
    # A wheel that the component downloads by itself needs the stage of the other wheels.
    if step.artifacts:
        return keep_one_layer(step)
    small = [package for package in step.python if package.size < LARGE]
    large = [package for package in step.python if package.size >= LARGE]
    groups: list[tuple[LockedPackage, ...]] = []
    if small:
        groups.append(tuple(small))
    groups += [(package,) for package in large]

    # The first stage has the component's name, the others that of their wheel too.
    layers: list[WheelLayer] = []
    for group in groups:
        stage = step.component
        if layers:
            stage += f"-{group[0].name}"
        layers.append(_make_layer(stage, group))
    return tuple(layers)
