"""The process groups of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from smdistributed.modelparallel.torch.exceptions import SMPRuntimeError

from .topology import CommGroup, Topology

__all__ = ["Groups", "make_groups"]


class Groups(Mapping[CommGroup, dist.ProcessGroup]):
    """The process groups of this rank, by their kind.

    Attributes:
        objects: The group of all ranks for objects that one rank sends to another.
    """

    objects: dist.ProcessGroup

    def __init__(self, own: Mapping[CommGroup, dist.ProcessGroup], objects: dist.ProcessGroup) -> None:
        self._own = dict(own)
        self.objects = objects

    def __getitem__(self, kind: CommGroup) -> dist.ProcessGroup:
        """Return the group of a kind that this rank is in."""
        return self._own[kind]

    def __iter__(self) -> Any:
        """Return the kinds."""
        return iter(self._own)

    def __len__(self) -> int:
        """Return the number of kinds."""
        return len(self._own)


def make_groups(topology: Topology) -> Groups:
    """Make all process groups of a job; every rank calls this, at the same point.

    Kinds whose groups have the same members share them.
    """
    world = _default_group()
    everyone = tuple(range(topology.world))
    made: dict[tuple[int, ...], dist.ProcessGroup] = {everyone: world}
    own = {}
    for kind in CommGroup:
        for members in topology.all_groups(kind):
            if members not in made:
                # Every rank makes every group, in the same order.
                made[members] = dist.new_group(list(members))
        own[kind] = made[topology.members(kind)]
    return Groups(own, dist.new_group(list(everyone), backend="gloo"))


def _default_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise SMPRuntimeError("torch.distributed is not initialized: call smp.init() first")
    return world
