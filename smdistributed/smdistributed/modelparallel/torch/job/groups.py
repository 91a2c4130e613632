"""The process groups of this rank."""

from __future__ import annotations

import torch.distributed as dist

from smdistributed.modelparallel.torch.exceptions import SMPRuntimeError

from .topology import CommGroup, Topology

__all__ = ["Groups", "make_groups"]


class Groups(dict[CommGroup, dist.ProcessGroup]):
    """The process groups of this rank, by their kind.

    Attributes:
        objects: The group of all ranks for objects that one rank sends to another.
    """

    objects: dist.ProcessGroup


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
    groups = Groups(own)
    groups.objects = dist.new_group(list(everyone), backend="gloo")
    return groups


def _default_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise SMPRuntimeError("torch.distributed is not initialized: call smp.init() first")
    return world
