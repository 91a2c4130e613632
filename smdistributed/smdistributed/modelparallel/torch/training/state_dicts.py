"""Gather, merge and cut the state of a model that is on several ranks."""

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


def state_of_partition(module: nn.Module, owner: Mapping[str, int], partition: int) -> StateDict:
    """Return the state of the modules on one partition, with the names of the full model.

    Args:
        module: The model.
        owner: Name of a module -> its partition.
        partition: The partition.

    Returns:
        Name -> value. Tensors share the memory of the model's, outside of the graph.
    """
    entries = module.state_dict(keep_vars=True)
    owner_by_name = _partition_by_name(module, owner)
    local_state: StateDict = {}
    for name, value in entries.items():
        if _partition_of_entry(name, owner_by_name) == partition:
            local_state[name] = _detach(value)
    return local_state


def gather_state(
    module: nn.Module, owner: Mapping[str, int], partition: int, *, to_first_only: bool, call: str
) -> StateDict:
    """Return the full state of the model, on the CPU if the model is on several ranks.

    Collective over the MP group.

    Args:
        module: The model.
        owner: Name of a module -> its partition.
        partition: This rank's partition.
        to_first_only: All ranks but the first of the group return an empty dictionary.
        call: The script's call, for errors.

    Returns:
        Name -> value. With one rank of the model the tensors share its memory.

    Raises:
        StepError: Ranks have not made the call in time.
        RuntimeError: The collective broke, because a rank is gone.
    """
    local_state = state_of_partition(module, owner, partition)
    if mp_size() == 1:
        return OrderedDict(local_state)
    meet(call)
    members, group = state.topo.members(CommGroup.MP_GROUP), state.groups[CommGroup.MP_GROUP]
    for name, value in local_state.items():
        if isinstance(value, torch.Tensor):
            local_state[name] = value.cpu()
    parts: list[Any] | None = [None] * len(members)
    if to_first_only:
        if state.topo.rank != members[0]:
            parts = None
        dist.gather_object(local_state, parts, dst=members[0], group=group)
    else:
        dist.all_gather_object(parts, local_state, group=group)
    if parts is None:
        return {}
    merged = merge(parts, split_axes(module))
    # In the order of the plain module; entries that other ranks have besides come last.
    ordered: StateDict = OrderedDict()
    for name in (*module.state_dict(keep_vars=True), *merged):
        if name in merged:
            ordered[name] = merged[name]
    return ordered


def gather_shared_state(module: nn.Module, *, to_first_only: bool, call: str) -> StateDict:
    """Return the full state of a model with shared parameters, on the CPU. Collective over the job.

    Args:
        module: The model.
        to_first_only: All ranks but the first return an empty dictionary.
        call: The script's call, for errors.

    Raises:
        StepError: Ranks have not made the call in time.
        RuntimeError: The collective broke, because a rank is gone.
    """
    meet(call, CommGroup.DP_GROUP)
    full_state: StateDict = OrderedDict()
    for name, value in module.state_dict(keep_vars=True).items():
        # Every rank takes part, also if it drops the tensor at once.
        full_value = mesh.gather(_detach(value))
        if not to_first_only or state.topo.rank == 0:
            full_state[name] = full_value
    return full_state


def shard_state(module: nn.Module, entries: Mapping[str, Any]) -> StateDict:
    """Return a full state, or this rank's part of a state, as shared tensors.

    The model is not changed; neither are the values.

    Args:
        module: The model with shared parameters.
        entries: The state. Names that the model does not have are returned unchanged.

    Raises:
        SMPRuntimeError: A value has another shape than the parameter.
    """
    own = module.state_dict(keep_vars=True)
    shared_state: StateDict = {}
    for name, value in entries.items():
        if name in (PARTIAL, mesh.PART):
            continue
        shared_state[name] = mesh.shard_like(own[name], value, name) if name in own else value
    return shared_state


def merge_partial(module: nn.Module, part: Mapping[str, Any], *, call: str) -> StateDict:
    """Return the full state from the partial states of the MP group's ranks. Collective.

    Args:
        module: The model.
        part: This rank's partial state.
        call: The script's call, for errors.

    Raises:
        StepError: Ranks have not made the call in time.
        RuntimeError: The collective broke, because a rank is gone; or slices do not fit together.
    """
    meet(call)
    parts: list[Any] = [None] * mp_size()
    dist.all_gather_object(parts, dict(part), group=state.groups[CommGroup.MP_GROUP])
    return merge(parts, split_axes(module))


def merge(parts: Iterable[Mapping[str, Any]], axes: Mapping[str, int]) -> StateDict:
    """Return the full state of partial states: slices of tensor ranks are joined.

    An entry that several parts have, and that is not split, is the first one's. The parts are not
    changed.

    Args:
        parts: The states, in the order of the ranks. Their mark is left out.
        axes: Name of a parameter -> the axis along which it is split over tensor ranks.

    Raises:
        RuntimeError: Slices of a tensor do not fit together.
    """
    values_by_name: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            if name != PARTIAL:
                values_by_name.setdefault(name, []).append(value)
    merged: StateDict = {}
    for name, values in values_by_name.items():
        merged[name] = torch.cat(values, axes[name]) if name in axes else values[0]
    return merged


def slice_state(module: nn.Module, entries: Mapping[str, Any]) -> StateDict:
    """Return a full state with this rank's slices of the split parameters.

    The slices are views of the full tensors.

    Args:
        module: The model: tells which parameters are split over tensor ranks.
        entries: The full state.
    """
    axes = split_axes(module)
    own_state: StateDict = {}
    for name, value in entries.items():
        if name == PARTIAL:
            continue
        own_state[name] = value
        if name in axes:
            own_state[name] = value.chunk(tp_size(), axes[name])[tp_rank()]
    return own_state


def complete_state(
    module: nn.Module, owner: Mapping[str, int], partition: int, local_state: Mapping[str, Any]
) -> StateDict:
    """Return a state with the entries of other partitions, so that a strict load accepts it.

    The added entries are the model's own tensors. Nothing is loaded.

    Args:
        module: The model.
        owner: Name of a module -> its partition.
        partition: The partition of the state.
        local_state: The state.
    """
    owner_by_name = _partition_by_name(module, owner)
    complete: StateDict = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if _partition_of_entry(name, owner_by_name) != partition:
            complete[name] = value
    complete.update(local_state)
    complete.pop(PARTIAL, None)
    return complete


def split_axes(module: nn.Module) -> dict[str, int]:
    """Return the names of the tensors that are split over tensor ranks, each with its axis."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    axes = {}
    for name, tensor in named:
        if getattr(tensor, "_smp_distributed", False):
            axes[name] = getattr(tensor, "_smp_axis", 1)
    return axes


def _partition_by_name(module: nn.Module, owner: Mapping[str, int]) -> dict[str, int]:
    """Return name -> partition for every name of each module; ``owner`` has only the first names.

    A module that a forward has created after the partition belongs to the module that holds it.
    """
    partitions: dict[int, int] = {}  # by id() of the module
    for name, part in module.named_modules():
        partitions[id(part)] = owner[name] if name in owner else _partition_of_entry(name, owner)
    named = module.named_modules(remove_duplicate=False)
    return {name: partitions[id(part)] for name, part in named}


def _partition_of_entry(entry: str, owner: Mapping[str, int]) -> int:
    """Return the partition of an entry of a state, by the name of the module that holds it.

    Args:
        entry: Name of the entry, such as "encoder.0.weight".
        owner: Name of a module -> its partition. The root, "", is always there.
    """
    module = entry.rpartition(".")[0]
    while module not in owner:
        module = module.rpartition(".")[0]
    return owner[module]


def _detach(value: Any) -> Any:
    """Return a tensor outside the graph, in the same memory; any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return value
