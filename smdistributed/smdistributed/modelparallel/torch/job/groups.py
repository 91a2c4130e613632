"""The process groups of this rank."""

from __future__ import annotations

import torch.distributed as dist

from smdistributed.modelparallel.torch.exceptions import SMPRuntimeError

from .topology import CommGroup, Topology

__all__ = ["Groups", "make_groups"]


class Groups(dict[CommGroup, dist.ProcessGroup]):
    """Kind of group -> the process group of this rank.

    Attributes:
        objects: A group of all ranks, for objects that one rank sends to another.
    """

    objects: dist.ProcessGroup


def make_groups(topology: Topology) -> Groups:
    """Create all process groups of a job, and return those of this rank. Collective.

    Groups of two kinds with the same members are one process group.

    Raises:
        SMPRuntimeError: torch.distributed is not initialized.
        RuntimeError: The backend cannot connect the ranks (torch's own error).
    """
    world = _default_group()
    all_ranks = tuple(range(topology.world))
    by_members: dict[tuple[int, ...], dist.ProcessGroup] = {all_ranks: world}
    own_groups = {}
    for kind in CommGroup:
        for members in topology.all_groups(kind):
            if members not in by_members:
                # Every rank creates every group, in the same order.
                by_members[members] = dist.new_group(list(members))
        own_groups[kind] = by_members[topology.members(kind)]
    groups = Groups(own_groups)
    groups.objects = dist.new_group(list(all_ranks), backend="gloo")
    return groups


def _default_group() -> dist.ProcessGroup:
    """Return torch's group of all ranks.

    Raises:
        SMPRuntimeError: torch.distributed is not initialized.
    """
    world = dist.group.WORLD
    if world is None:
        raise SMPRuntimeError("torch.distributed is not initialized: call smp.init() first")
    return world
