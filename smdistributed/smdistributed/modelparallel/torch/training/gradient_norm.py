"""Clip gradients by the norm over all ranks that have parameters of the model.

``torch.nn.utils.clip_grad_norm_`` sees the gradients of one rank. transformers and accelerate call
it with ``model.parameters()``, which are on several partitions, and the norm must be over all of
them. So the function is replaced when this module is imported, and so are ``get_total_norm`` and
``clip_grads_with_norm_``, where torch has them. Calls with other tensors go to torch's functions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.torch.job.collective_calls import calls
from smdistributed.modelparallel.torch.job.communication import allgather
from smdistributed.modelparallel.torch.job.ranks import pp_size, tp_rank, tp_size
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.job.topology import CommGroup
from smdistributed.modelparallel.torch.job.wrapped import wrapped
from smdistributed.modelparallel.torch.partitioning.placement import device
from smdistributed.modelparallel.torch.sharding import mesh

_NORM_OFFSET = 1e-6
"""Is added to a norm that divides, as torch does it: a norm may be 0."""

_torch_clip = nn.utils.clip_grad_norm_
_torch_norm = getattr(nn.utils, "get_total_norm", None)  # both are of PyTorch 2.6
_torch_scale = getattr(nn.utils, "clip_grads_with_norm_", None)


def total_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    group: CommGroup = CommGroup.MP_GROUP,
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks of a group. Collective over the group.

    No gradient is changed.

    Args:
        parameters: This rank's parameters. A missing gradient counts as zeros.
        norm_type: 2, another positive number, or infinity.
        group: ``MP_GROUP``: over partitions and tensor slices; ``TP_GROUP``: over tensor slices.
            With shared parameters the norm is over the shard group.

    Returns:
        A float64 tensor without dimensions. All ranks get the same number, and so scale by the same
        factor.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    total_device = device() or torch.device("cpu")
    if with_gradient:
        total_device = with_gradient[0].device
    total = torch.zeros(1, dtype=torch.float64, device=total_device)
    is_infinite = norm_type == float("inf")
    for parameter in with_gradient:
        if not _is_counted_here(parameter):
            continue
        grad = mesh.local(parameter.grad)
        if not grad.numel():  # the rows of a small parameter are all on other ranks
            continue
        if grad.is_sparse:
            grad = grad.coalesce().values()
        dtype = torch.promote_types(torch.float32, grad.dtype)
        norm = torch.linalg.vector_norm(grad.detach(), norm_type, dtype=dtype)
        norm = norm.to(total.device, torch.float64)
        if is_infinite:
            total = torch.maximum(total, norm)
        else:
            total = total + norm**norm_type

    operation = dist.ReduceOp.MAX if is_infinite else dist.ReduceOp.SUM
    shard_group = mesh.group()
    if shard_group is not None:
        with calls.inside("the norm of the gradients", CommGroup.WORLD):
            dist.all_reduce(total, operation, group=shard_group)
    elif len(state.topo.members(group)) > 1:
        with calls.inside("the norm of the gradients", group):
            dist.all_reduce(total, operation, group=state.groups[group])
    if is_infinite:
        return total[0]
    return total[0] ** (1.0 / norm_type)


def _is_counted_here(parameter: torch.Tensor) -> bool:
    """Return whether this rank's gradient of a parameter counts in a norm.

    Of the ranks with equal copies of a gradient only the first one counts.
    """
    # Tensor ranks have equal copies of a parameter that is not split.
    if tp_rank() != 0 and not getattr(parameter, "_smp_distributed", False):
        return False
    # The ranks of a shard group have equal copies of a parameter that is not shared.
    return mesh.part() == 0 or mesh.is_sharded(parameter)


@torch.no_grad()
def clip(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    group: CommGroup = CommGroup.MP_GROUP,
) -> torch.Tensor:
    """Scale the gradients down to a norm of at most ``max_norm``, in place. Collective over the
    group.

    Args:
        parameters: This rank's parameters.
        max_norm: Largest norm.
        norm_type: 2, another positive number, or infinity.
        error_if_nonfinite: Raise an error for a norm that is infinite or not a number.
        group: The group over which the norm is taken, see ``total_norm``.

    Returns:
        The norm before the scaling.

    Raises:
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set; then no gradient is
            changed. Or the collective broke.
    """
    parameters = list(parameters)
    norm = total_norm(parameters, float(norm_type), group=group)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    _scale_gradients(parameters, max_norm, norm)
    return norm


def _check_finite(norm: torch.Tensor, norm_type: float) -> None:
    """Refuse a norm that is infinite or not a number.

    The CPU waits for the norm.

    Args:
        norm: The norm.
        norm_type: Its order, for the error.

    Raises:
        RuntimeError: The norm is not finite.
    """
    if not bool(norm.isfinite()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the"
            f" gradients is {norm.item()}: it is not finite"
        )


def _scale_gradients(
    parameters: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor
) -> None:
    """Multiply the gradients by a factor, in place, if the norm is larger than ``max_norm``.

    The CPU does not wait for the norm.

    Args:
        parameters: This rank's parameters.
        max_norm: Largest norm after the call.
        norm: The norm before.
    """
    factor = (max_norm / (norm + _NORM_OFFSET)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = mesh.local(parameter.grad)
            grad.mul_(factor.to(grad.device, grad.dtype))


@functools.wraps(_torch_clip)
def _clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients as ``torch.nn.utils.clip_grad_norm_``, which this function replaces.

    The norm is over all ranks that have parameters of the model. Then the call is collective.

    Returns:
        The norm before the scaling. The gradients are scaled in place.

    Raises:
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set; or the collective
            broke.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    group = _group_of_parameters(listed)
    if group is None:
        return _torch_clip(listed, max_norm, norm_type, error_if_nonfinite, foreach)
    return clip(listed, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, group=group)


@torch.no_grad()
def _get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the norm of gradients, over all ranks for gradients of a partitioned model.

    Then the call is collective, and a rank without gradients passes an empty list.

    It replaces ``torch.nn.utils.get_total_norm``. A gradient is known by its memory. If one is of
    no parameter of the model, the norm is that of torch, over this rank alone. Nothing is changed.

    Raises:
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set; or the collective
            broke.
    """
    assert _torch_norm is not None
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    model = wrapped.model
    if model is not None and model.partitioned:
        by_memory: dict[object, torch.Tensor] = {}
        for parameter in model.local_parameters():
            if parameter.grad is not None:
                by_memory[_memory_key(parameter.grad)] = parameter
        parameters: list[torch.Tensor] = []
        for gradient in gradients:
            if _memory_key(gradient) in by_memory:
                parameters.append(by_memory[_memory_key(gradient)])
        group = CommGroup.MP_GROUP if pp_size() > 1 else _group_of_parameters(parameters)
        if group is not None and len(parameters) == len(gradients):
            norm = total_norm(parameters, float(norm_type), group=group)
            if error_if_nonfinite:
                _check_finite(norm, norm_type)
            return norm
    local_norm: torch.Tensor = _torch_norm(gradients, norm_type, error_if_nonfinite, foreach)
    return local_norm


@torch.no_grad()
def _clip_grads_with_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale gradients as ``torch.nn.utils.clip_grads_with_norm_``, which this function replaces.

    torch's own function does not take gradients of shared parameters with such a norm.

    The gradients are scaled in place, by at most 1. No collective is run.

    Args:
        parameters: The parameters with the gradients.
        max_norm: Largest norm.
        total_norm: The norm before, of all ranks.
        foreach: Passed to torch's function.
    """
    assert _torch_scale is not None
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(mesh.is_sharded(parameter.grad) for parameter in listed):
        _scale_gradients(listed, float(max_norm), total_norm)
    else:
        _torch_scale(listed, max_norm, total_norm, foreach)


def _memory_key(gradient: torch.Tensor) -> object:
    """Return a key that is equal for a gradient and its ``detach()``."""
    part = mesh.local(gradient)
    if part.layout != torch.strided:
        return id(gradient)
    return part.data_ptr(), part.shape


def _group_of_parameters(parameters: list[torch.Tensor]) -> CommGroup | None:
    """Return the group over which parameters are spread; None for parameters of this rank alone.

    Ranks with the same list get the same group. Collective, if the parameters are of one of several
    partitions.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """
    model = wrapped.model
    if model is None or not model.partitioned:
        return None
    owners = {model.partition_of(p) for p in parameters} - {None}
    if len(owners) > 1:
        return CommGroup.MP_GROUP
    if owners and pp_size() > 1 and _is_same_list(model, parameters):
        return CommGroup.MP_GROUP
    if any(mesh.is_sharded(p) for p in parameters):
        return CommGroup.MP_GROUP
    if tp_size() > 1 and any(getattr(p, "_smp_distributed", False) for p in parameters):
        return CommGroup.TP_GROUP
    return None


def _is_same_list(model: Any, parameters: list[torch.Tensor]) -> bool:
    """Return whether all ranks of the model pass the same parameters of one partition. Collective.

    ``clip_grad_norm_(model.encoder.parameters(), 1.0)`` gets the same list on every rank, and must
    return the norm of the owner on all ranks. ``clip_grad_norm_(model.local_parameters(), 1.0)``
    gets another list on each rank, and each rank has its own norm. The owner of the encoder alone
    cannot distinguish the two.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """
    positions = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    own_list = [positions.get(id(parameter), -1) for parameter in parameters]
    lists = allgather(own_list, CommGroup.MP_GROUP)
    return all(other_list == own_list for other_list in lists)


nn.utils.clip_grad_norm_ = _clip_grad_norm
nn.utils.clip_grad.clip_grad_norm_ = _clip_grad_norm
if _torch_norm is not None and _torch_scale is not None:
    nn.utils.get_total_norm = functools.wraps(_torch_norm)(_get_total_norm)
    nn.utils.clip_grads_with_norm_ = functools.wraps(_torch_scale)(_clip_grads_with_norm)
