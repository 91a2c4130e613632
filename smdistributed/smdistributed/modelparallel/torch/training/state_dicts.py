"""The state of a model that is on several ranks: as dictionaries of one rank,
merged, and cut again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.torch.job.meeting_points import meet
from smdistributed.modelparallel.torch.job.ranks import mp_size, tp_rank, tp_size
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.job.topology import CommGroup
from smdistributed.modelparallel.torch.sharding import mesh

PARTIAL = "_smp_is_partial"
StateDict = dict[str, Any]


def local(module: nn.Module, owner: Mapping[str, int], me: int) -> StateDict:
    """Return the entries of the modules that are on partition ``me``, as the
    module itself names them.
    """
    entries, owner = module.state_dict(keep_vars=True), _by_all_names(module, owner)
    return {name: _value(value) for name, value in entries.items() if _owner(name, owner) == me}


def gathered(
    module: nn.Module, owner: Mapping[str, int], me: int, *, to_first_only: bool, call: str
) -> StateDict:
    """Return the whole model's state, on the CPU if it is on several ranks.

    All ranks of the MP group must call it.

    Args:
        module: The model.
        owner: The partition of each module.
        me: This rank's partition.
        to_first_only: All ranks but the first of the group return an empty dictionary.
        call: What the script called, for errors.
    """
    mine = local(module, owner, me)
    if mp_size() == 1:
        return OrderedDict(mine)
    meet(call)
    members, group = state.topo.members(CommGroup.MP_GROUP), state.groups[CommGroup.MP_GROUP]
    mine = {name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in mine.items()}
    parts: list[Any] | None = [None] * len(members)
    if to_first_only:
        if state.topo.rank != members[0]:
            parts = None
        dist.gather_object(mine, parts, dst=members[0], group=group)
    else:
        dist.all_gather_object(parts, mine, group=group)
    if parts is None:
        return {}
    merged = merge(parts, split_axes(module))
    order = [name for name in module.state_dict(keep_vars=True) if name in merged]
    return OrderedDict(
        (name, merged[name]) for name in [*order, *(n for n in merged if n not in set(order))]
    )


def unshared(module: nn.Module, *, to_first_only: bool, call: str) -> StateDict:
    """Return the whole state, on the CPU, of a model whose parameters are shared.

    Every rank of the job must call it.

    Args:
        module: The model.
        to_first_only: All ranks but the first return an empty dictionary.
        call: What the script called, for errors.
    """
    meet(call, CommGroup.DP_GROUP)
    kept: StateDict = OrderedDict()
    for name, value in module.state_dict(keep_vars=True).items():
        entry = mesh.gather(
            _value(value)
        )  # also where it is dropped at once: every rank takes part
        if not to_first_only or state.topo.rank == 0:
            kept[name] = entry
    return kept


def shared(module: nn.Module, entries: Mapping[str, Any]) -> StateDict:
    """Return a state, whole or this rank's part of it, as a model takes it
    whose parameters are shared.
    """
    own = module.state_dict(keep_vars=True)
    return {
        name: mesh.shard_like(own[name], value, name) if name in own else value
        for name, value in entries.items()
        if name not in (PARTIAL, mesh.PART)
    }


def merge_partial(module: nn.Module, mine: Mapping[str, Any], *, call: str) -> StateDict:
    """Return the whole state from the partial ones that the ranks of the MP group have.

    All of them must call it.
    """
    meet(call)
    parts: list[Any] = [None] * mp_size()
    dist.all_gather_object(parts, dict(mine), group=state.groups[CommGroup.MP_GROUP])
    return merge(parts, split_axes(module))


def merge(parts: Iterable[Mapping[str, Any]], axes: Mapping[str, int]) -> StateDict:
    """Join partial dictionaries, given in the order of the ranks.

    Args:
        parts: The dictionaries. Their mark is left out.
        axes: By name, the axis along which a parameter is split over tensor ranks.
    """
    merged: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            if name != PARTIAL:
                merged.setdefault(name, []).append(value)
    return {
        name: torch.cat(values, axes[name]) if name in axes else values[0]
        for name, values in merged.items()
    }


def cut(module: nn.Module, entries: Mapping[str, Any]) -> StateDict:
    """Return a whole state with this rank's slices of the split parameters."""
    axes = split_axes(module)
    return {
        name: value.chunk(tp_size(), axes[name])[tp_rank()] if name in axes else value
        for name, value in entries.items()
        if name != PARTIAL
    }


def completed(
    module: nn.Module, owner: Mapping[str, int], me: int, mine: Mapping[str, Any]
) -> StateDict:
    """Return this partition's state with the entries of the others as they are,
    so that a strict load accepts it.
    """
    entries, owner = module.state_dict(keep_vars=True), _by_all_names(module, owner)
    others = {name: value for name, value in entries.items() if _owner(name, owner) != me}
    return {**others, **{name: value for name, value in mine.items() if name != PARTIAL}}


def split_axes(module: nn.Module) -> dict[str, int]:
    """Return the axis of each parameter that is split over tensor ranks, by name."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {
        name: getattr(t, "_smp_axis", 1)
        for name, t in named
        if getattr(t, "_smp_distributed", False)
    }


def _by_all_names(module: nn.Module, owner: Mapping[str, int]) -> dict[str, int]:
    """Return the partition for every name of a module; ``owner`` has the first one only.

    A module that a forward has made, after the model was divided, is where the
    module is that holds it.
    """
    known: dict[int, int] = {}
    for name, part in module.named_modules():
        known[id(part)] = owner[name] if name in owner else _owner(name, owner)
    return {name: known[id(part)] for name, part in module.named_modules(remove_duplicate=False)}


def _owner(entry: str, owner: Mapping[str, int]) -> int:
    module = entry.rpartition(".")[0]
    while module not in owner:
        module = module.rpartition(".")[0]
    return owner[module]


def _value(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
