"""The base of modules whose parameters are split over tensor ranks."""

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
    """A module cannot be split over tensor ranks, and stays whole where it was to be replaced."""


class DistributedModule(nn.Module):
    """A module that works with the other ranks of its tensor-parallel group.

    A subclass that replaces another class's modules takes the arguments of that class (or what an
    ``init_hook`` makes of them), names its parameters alike, and calls ``mark`` on those that it
    splits: replacing copies the values.
    """

    @classmethod
    def arguments(cls, _module: nn.Module) -> Arguments | None:
        """Return the arguments that the module was made with, as far as its attributes tell.

        None if they do not.

        Raises:
            NotSplitError: Such a module is not split.
        """
        return None

    def split(self, name: str, whole: torch.Tensor, axis: int) -> None:
        """Register this rank's part of a whole parameter, and mark it.

        Raises:
            NotSplitError: The tensor-parallel degree does not divide the axis.
        """
        degree, index = tensor_group().size(), tensor_group().rank()
        if whole.shape[axis] % degree:
            raise NotSplitError(
                f"smp.nn.{type(self).__name__}: {name} has {whole.shape[axis]} channels, which"
                f" tensor_parallel_degree ({degree}) does not divide"
            )
        size = list(whole.shape)
        size[axis] //= degree
        part = nn.Parameter(
            torch.empty(size, dtype=dtype_of_parameters(whole), device=whole.device)
        )
        put_slice(part, whole, axis, degree, index)
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


def dtype_of_parameters(whole: torch.Tensor) -> torch.dtype:
    """Return the type of a distributed module's parameter that is made of a whole one."""
    return torch.float16 if state.cfg.fp16_params and whole.is_floating_point() else whole.dtype
