"""Ranks, sizes and groups of this process, as scripts ask for them."""

from __future__ import annotations

import os

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


def pp_rank() -> int:
    """Return the partition that this process has: its rank in its pipeline."""
    return _topology().group_rank(PP_GROUP)


def pp_size() -> int:
    """Return the pipeline-parallel degree."""
    return len(_topology().members(PP_GROUP))


def tp_rank() -> int:
    """Return the rank among the processes that share split modules."""
    return _topology().group_rank(TP_GROUP)


def tp_size() -> int:
    """Return the tensor-parallel degree."""
    return len(_topology().members(TP_GROUP))


def rdp_rank() -> int:
    """Return the rank among the processes that have the same partition and the same slices."""
    return _topology().group_rank(RDP_GROUP)


def rdp_size() -> int:
    """Return the number of processes that have the same partition and the same slices."""
    return len(_topology().members(RDP_GROUP))


def mp_rank() -> int:
    """Return the rank among the processes that hold one replica of the model."""
    return _topology().group_rank(MP_GROUP)


def mp_size() -> int:
    """Return the number of processes that hold one replica of the model."""
    return len(_topology().members(MP_GROUP))


def dp_rank() -> int:
    """Return the rank among the processes that have the same partition."""
    return _topology().group_rank(DP_GROUP)


def dp_size() -> int:
    """Return the number of processes that have the same partition."""
    return len(_topology().members(DP_GROUP))


def get_pp_group() -> list[int]:
    """Return the global ranks of this process's pipeline, in their order."""
    return list(_topology().members(PP_GROUP))


def get_tp_group() -> list[int]:
    """Return the global ranks of the processes that share split modules with this one."""
    return list(_topology().members(TP_GROUP))


def get_rdp_group() -> list[int]:
    """Return the global ranks of the processes that have the same partition and the same slices."""
    return list(_topology().members(RDP_GROUP))


def get_mp_group() -> list[int]:
    """Return the global ranks of the processes that hold this replica of the model."""
    return list(_topology().members(MP_GROUP))


def get_dp_group() -> list[int]:
    """Return the global ranks of the processes that have the same partition."""
    return list(_topology().members(DP_GROUP))


def get_world_process_group() -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    return _process_group(WORLD)


def get_pp_process_group() -> dist.ProcessGroup:
    """Return the process group of ``get_pp_group()``."""
    return _process_group(PP_GROUP)


def get_tp_process_group() -> dist.ProcessGroup:
    """Return the process group of ``get_tp_group()``."""
    return _process_group(TP_GROUP)


def get_rdp_process_group() -> dist.ProcessGroup:
    """Return the process group of ``get_rdp_group()``."""
    return _process_group(RDP_GROUP)


def get_mp_process_group() -> dist.ProcessGroup:
    """Return the process group of ``get_mp_group()``."""
    return _process_group(MP_GROUP)


def get_dp_process_group() -> dist.ProcessGroup:
    """Return the process group of ``get_dp_group()``."""
    return _process_group(DP_GROUP)


def _topology() -> Topology:
    if not state.initialized:
        raise SMPRuntimeError("this process has no rank yet: call smp.init() first")
    return state.topo


def _process_group(kind: CommGroup) -> dist.ProcessGroup:
    _topology()
    return state.groups[kind]
