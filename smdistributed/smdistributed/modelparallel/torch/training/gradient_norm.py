"""The norm of all gradients of a model whose parameters are on several ranks, and clipping by it.

``torch.nn.utils.clip_grad_norm_`` sees one rank's gradients. Given parameters of several
partitions, as ``model.parameters()`` is, it must use the norm over all of them: transformers and
accelerate call it so. It is replaced when this module is imported, and so are ``get_total_norm``
and ``clip_grads_with_norm_``, where torch has them. Other calls go to torch's functions.
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

_torch_clip = nn.utils.clip_grad_norm_
_torch_norm = getattr(nn.utils, "get_total_norm", None)  # both are of PyTorch 2.6
_torch_scale = getattr(nn.utils, "clip_grads_with_norm_", None)


def total_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    group: CommGroup = CommGroup.MP_GROUP,
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks of a group.

    Every rank of the group must call it.

    Args:
        parameters: This rank's parameters. Those without a gradient count as zeros.
        norm_type: 2, another positive number, or infinity.
        group: ``MP_GROUP``: over partitions and tensor slices; ``TP_GROUP``: over tensor slices.
            Where parameters are shared, it is over those who share them.
    """
    found = [p for p in parameters if p.grad is not None]
    where = found[0].device if found else device() or torch.device("cpu")
    total = torch.zeros(1, dtype=torch.float64, device=where)
    infinite = norm_type == float("inf")
    for parameter in found:
        grad = parameter.grad
        assert grad is not None
        # Tensor ranks have equal copies of a parameter that is not split: one of them counts.
        if tp_rank() != 0 and not getattr(parameter, "_smp_distributed", False):
            continue
        if mesh.part() != 0 and not mesh.is_sharded(
            parameter
        ):  # so do the ranks that share the others
            continue
        grad = mesh.local(grad)
        if not grad.numel():  # the rows of a small parameter are all on other ranks
            continue
        grad = grad.coalesce().values() if grad.is_sparse else grad
        norm = torch.linalg.vector_norm(
            grad.detach(), norm_type, dtype=torch.promote_types(torch.float32, grad.dtype)
        )
        norm = norm.to(total.device, torch.float64)
        total = torch.maximum(total, norm) if infinite else total + norm**norm_type
    sharers = mesh.group()
    if sharers is not None or len(state.topo.members(group)) > 1:
        over = sharers or state.groups[group]
        with calls.inside(
            "the norm of the gradients", CommGroup.WORLD if sharers is not None else group
        ):
            dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=over)
    # In float64 on every rank, so that all scale by the same factor.
    return total[0] if infinite else total[0] ** (1.0 / norm_type)


@torch.no_grad()
def clip(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    group: CommGroup = CommGroup.MP_GROUP,
) -> torch.Tensor:
    """Scale the gradients so that their norm over all ranks of a group is at most ``max_norm``.

    Return the norm.
    """
    parameters = list(parameters)
    norm = _finite(
        total_norm(parameters, float(norm_type), group=group), norm_type, error_if_nonfinite
    )
    _scale(parameters, max_norm, norm)
    return norm


def _finite(norm: torch.Tensor, norm_type: float, asked: bool) -> torch.Tensor:
    if asked and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the"
            f" gradients is {norm.item()}: it is not finite"
        )
    return norm


def _scale(parameters: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
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
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    group = _group(listed)
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
    """Return the norm of gradients.

    Those of a partitioned model count on all ranks, which all must call it.

    A rank that has none of them passes an empty list.
    """
    assert _torch_norm is not None
    listed, model = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors), wrapped.model
    if model is not None and model.partitioned:
        known = {_memory(p.grad): p for p in model.local_parameters() if p.grad is not None}
        parameters: list[torch.Tensor] = [
            known[_memory(each)] for each in listed if _memory(each) in known
        ]
        group = CommGroup.MP_GROUP if pp_size() > 1 else _group(parameters)
        if group is not None and len(parameters) == len(listed):
            return _finite(
                total_norm(parameters, float(norm_type), group=group), norm_type, error_if_nonfinite
            )
    found: torch.Tensor = _torch_norm(listed, norm_type, error_if_nonfinite, foreach)
    return found


@torch.no_grad()
def _clip_grads_with_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    assert _torch_scale is not None
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(mesh.is_sharded(parameter.grad) for parameter in listed):
        _scale(listed, float(max_norm), total_norm)
    else:
        _torch_scale(listed, max_norm, total_norm, foreach)


def _memory(gradient: torch.Tensor) -> object:
    """Return what a gradient and its ``detach()`` have in common."""
    mine = mesh.local(gradient)
    return id(gradient) if mine.layout != torch.strided else (mine.data_ptr(), mine.shape)


def _group(parameters: list[torch.Tensor]) -> CommGroup | None:
    """Return over which ranks these parameters are spread.

    Every rank that has the same list gets the same answer.
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
    """Return whether all ranks of the model passed the same parameters, which are on one partition.

    Collective.

    ``clip_grad_norm_(model.encoder.parameters(), 1.0)`` is called with the same list everywhere,
    and the norm must be the owner's on every rank. ``clip_grad_norm_(model.local_parameters(),
    1.0)`` is called with another list on each, and each has its own norm. On the owner alone the
    two cannot be told apart.
    """
    positions = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    mine = [positions.get(id(parameter), -1) for parameter in parameters]
    return all(each == mine for each in allgather(mine, CommGroup.MP_GROUP))


nn.utils.clip_grad_norm_ = _clip_grad_norm
nn.utils.clip_grad.clip_grad_norm_ = _clip_grad_norm
if _torch_norm is not None and _torch_scale is not None:
    nn.utils.get_total_norm = functools.wraps(_torch_norm)(_get_total_norm)
    nn.utils.clip_grads_with_norm_ = functools.wraps(_torch_scale)(_clip_grads_with_norm)
