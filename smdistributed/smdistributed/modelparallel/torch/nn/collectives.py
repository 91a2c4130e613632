"""Collectives of modules that are split over tensor ranks, with their gradients.

All ranks of a group must call the same collectives in the same order, with tensors of one shape.
The pipeline keeps that order (pipeline/scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["exchange", "gather_last", "gather_weight", "slice_last", "total"]


_Way = Callable[[torch.Tensor], torch.Tensor]


class _Both(torch.autograd.Function):
    """Apply one function to the values, and another function to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: _Way, back: _Way) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send ``x[i]`` to rank ``i`` of the group. Item ``j`` of the result is from rank ``j``."""
    return _both(x, lambda t: _all_to_all(t, group), lambda t: _all_to_all(t, group))


def slice_last(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the last axis of ``x``. All ranks of the group pass the same
    ``x``.
    """
    return _both(x, lambda t: _mine(t, -1, group), lambda t: _gathered(t, -1, group))


def gather_last(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all ranks, joined along the last axis. All ranks get the same result."""
    return _both(x, lambda t: _gathered(t, -1, group), lambda t: _mine(t, -1, group))


def total(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over the group. All ranks get the same result."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    return _both(x, summed, lambda t: t)


def gather_weight(
    weight: torch.Tensor, axis: int, group: dist.ProcessGroup, *, same_samples: bool
) -> torch.Tensor:
    """Return the full weight, from the parts of all ranks along ``axis``.

    The gradient of this rank's part is summed over the ranks, unless all ranks have the
    ``same_samples``.
    """

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        return _all_to_all(torch.stack(gradient.chunk(group.size(), axis)), group).sum(0)

    back = (lambda t: _mine(t, axis, group)) if same_samples else summed
    return _both(weight, lambda t: _gathered(t, axis, group), back)


def _both(x: torch.Tensor, there: _Way, back: _Way) -> torch.Tensor:
    result: torch.Tensor = _Both.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


def _gathered(x: torch.Tensor, axis: int, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, axis)


def _mine(x: torch.Tensor, axis: int, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(group.size(), axis)[group.rank()].contiguous()
