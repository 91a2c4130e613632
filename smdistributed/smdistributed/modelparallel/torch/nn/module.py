"""The base of modules with parameters that are split over tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.torch.job.config import SMPConfigError
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.job.topology import CommGroup

from .delayed import put_slice

__all__ = ["DistributedModule", "mark"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class NotSplitError(SMPConfigError):
    """A module cannot be split over tensor ranks, and is not replaced."""


class DistributedModule(nn.Module):
    """A module that works with the other ranks of its tensor-parallel group.

    A subclass that replaces the modules of another class takes the arguments of that class, or the
    result of an ``init_hook``. Its parameters have the same names, because their values are copied
    by name. It calls ``mark`` for each parameter that it splits.
    """

    @classmethod
    def arguments(cls, _module: nn.Module) -> Arguments | None:
        """Return the arguments for a replacement of a module, from the module's attributes.

        None if the attributes do not have them.

        Raises:
            NotSplitError: Such a module is not split.
        """
        return None

    def split(self, name: str, full: torch.Tensor, axis: int) -> None:
        """Register this rank's part of a full parameter, and mark the part.

        A delayed full parameter stays delayed: its part gets values when it is materialized.

        Args:
            name: Name of the parameter.
            full: The full parameter.
            axis: The axis along which it is split.

        Raises:
            NotSplitError: The tensor-parallel degree does not divide the axis.
            SMPConfigError: ``smp.init`` was not called.
        """
        degree, index = tensor_group().size(), tensor_group().rank()
        if full.shape[axis] % degree:
            raise NotSplitError(
                f"smp.nn.{type(self).__name__}: {name} has {full.shape[axis]} channels, which"
                f" tensor_parallel_degree ({degree}) does not divide"
            )
        size = list(full.shape)
        size[axis] //= degree
        part = nn.Parameter(torch.empty(size, dtype=dtype_of_parameters(full), device=full.device))
        put_slice(part, full, axis, degree, index)
        mark(part, axis)
        self.register_parameter(name, part)


def mark(tensor: torch.Tensor, axis: int) -> None:
    """Mark a parameter or buffer as split over the tensor ranks on this axis."""
    vars(tensor).update(_smp_distributed=True, _smp_axis=axis)


def tensor_group() -> dist.ProcessGroup:
    """Return this rank's tensor-parallel group.

    Raises:
        SMPConfigError: ``smp.init`` was not called.
    """
    if not state.initialized:
        raise SMPConfigError("call smp.init() before a module of smp.nn is made")
    return state.groups[CommGroup.TP_GROUP]


def same_samples() -> bool:
    """Return whether all tensor ranks work on the same samples (``prescaled_batch``)."""
    return state.cfg.prescaled_batch


def dtype_of_parameters(full: torch.Tensor) -> torch.dtype:
    """Return the type of a distributed module's parameter, for a full one."""
    if state.cfg.fp16_params and full.is_floating_point():
        return torch.float16
    return full.dtype
