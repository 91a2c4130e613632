"""The base image of a plan, if that image has its name from this project."""

from __future__ import annotations

from dataclasses import dataclass

from trainworks.facts.rows import Base, LockedArchive
from trainworks.plan.model import ImagePlan, Origin

INCLUDED_PACKAGES = ("usr-is-merged",)
"""Packages that a base made from the archive has besides the minimal ones.

Debian 12 has this one in place of the conversion package and its Perl; Debian 13 needs neither.
"""


@dataclass(frozen=True, kw_only=True)
class OwnBase:
    """A base image that has its name from this project.

    Attributes:
        row: Its row, with the digest of a pulled base.
        name: Its name in the engine.
        origin: ``pulled`` or ``bootstrapped``.
        states: The locked states of the package archive, for the base and for installations on it.
    """

    row: Base
    name: str
    origin: Origin
    states: tuple[LockedArchive, ...] = ()


def own_base(plan: ImagePlan) -> OwnBase | None:
    """Return the base of a plan, ``None`` for one that the engine itself pulls
    by the digest in its FROM.
    """
    if not plan.origin:
        return None
    return OwnBase(row=plan.base, name=plan.image, origin=plan.origin, states=plan.archives)
