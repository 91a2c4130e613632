"""The public functions for ranks, sizes and groups of this process."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from smdistributed.modelparallel.torch.exceptions import SMPRuntimeError
from trainworks_smdistributed.environment import ranks_of

from .state import state
from .topology import CommGroup, RankType, Topology

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CommGroup",
    "RankType",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "size",
    "tp_rank",
    "tp_size",
]

WORLD = CommGroup.WORLD
PP_GROUP, TP_GROUP, RDP_GROUP = CommGroup.PP_GROUP, CommGroup.TP_GROUP, CommGroup.RDP_GROUP
MP_GROUP, DP_GROUP = CommGroup.MP_GROUP, CommGroup.DP_GROUP


def is_initialized() -> bool:
    """Return whether ``smp.init`` has been called."""
    return state.initialized


def rank() -> int:
    """Return the rank of this process among all."""
    return _topology().rank


def size() -> int:
    """Return the number of processes."""
    return _topology().world


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return ranks_of(os.environ).local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return ranks_of(os.environ).local_size


_GroupFunctions = tuple[
    Callable[[], int], Callable[[], int], Callable[[], list[int]], Callable[[], dist.ProcessGroup]
]


def _functions_of(kind: CommGroup, members_title: str) -> _GroupFunctions:
    """Return the four public functions for a kind of group.

    They return this process's rank in the group, the size of the group, its global ranks, and the
    process group.

    Args:
        kind: The kind of the group.
        members_title: Words for the members, in the docstrings.

    Returns:
        (rank, size, members, process group). Each raises SMPRuntimeError before ``smp.init``.
    """

    def rank_in() -> int:
        return _topology().group_rank(kind)

    def size_of() -> int:
        return len(_topology().members(kind))

    def members() -> list[int]:
        return list(_topology().members(kind))

    def group() -> dist.ProcessGroup:
        return _process_group(kind)

    letters = kind.name.removesuffix("_GROUP").lower()  # "pp"
    for function, name, words in (
        (rank_in, f"{letters}_rank", "rank of this process among"),
        (size_of, f"{letters}_size", "number of"),
        (members, f"get_{letters}_group", "global ranks, in their order, of"),
        (group, f"get_{letters}_process_group", "process group of"),
    ):
        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"Return the {words} {members_title}."
    return rank_in, size_of, members, group


_PIPELINE = "the processes of one pipeline, each of which has a partition"
_SLICES = "the processes that share split modules with this one"
_EQUAL = "the processes that have the same partition and the same slices"
pp_rank, pp_size, get_pp_group, get_pp_process_group = _functions_of(PP_GROUP, _PIPELINE)
tp_rank, tp_size, get_tp_group, get_tp_process_group = _functions_of(TP_GROUP, _SLICES)
rdp_rank, rdp_size, get_rdp_group, get_rdp_process_group = _functions_of(RDP_GROUP, _EQUAL)
mp_rank, mp_size, get_mp_group, get_mp_process_group = _functions_of(
    MP_GROUP, "the processes that hold this replica"
)
dp_rank, dp_size, get_dp_group, get_dp_process_group = _functions_of(
    DP_GROUP, "the processes of the same partition"
)


def get_world_process_group() -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    return _process_group(WORLD)


def _topology() -> Topology:
    """Return the topology of the job.

    Raises:
        SMPRuntimeError: ``smp.init`` has not been called.
    """
    if not state.initialized:
        raise SMPRuntimeError("this process has no rank yet: call smp.init() first")
    return state.topo


def _process_group(kind: CommGroup) -> dist.ProcessGroup:
    """Return this rank's process group of a kind.

    Raises:
        SMPRuntimeError: ``smp.init`` has not been called.
    """
    _topology()  # raises the error
    return state.groups[kind]
