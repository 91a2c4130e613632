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


_TensorFunction = Callable[[torch.Tensor], torch.Tensor]


class _TwoWayFunction(torch.autograd.Function):
    """Apply one function to the values, and another function to the gradient.

    Both may be collective.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        forward_function: _TensorFunction,
        backward_function: _TensorFunction,
    ) -> torch.Tensor:
        ctx.backward_function = backward_function
        return forward_function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.backward_function(gradients[0]), None, None


def exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send ``x[i]`` to rank ``i`` of the group, and return what the ranks sent. Collective.

    Item ``j`` of the result is from rank ``j``.
    """
    return _apply_two_way(x, lambda t: _all_to_all(t, group), lambda t: _all_to_all(t, group))


def slice_last(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the last axis of ``x``. All ranks of the group pass the same
    ``x``. Its gradient is gathered, so the backward is collective.
    """
    return _apply_two_way(
        x, lambda t: _own_part(t, -1, group), lambda t: _gather_parts(t, -1, group)
    )


def gather_last(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all ranks, joined along the last axis. Collective.

    All ranks get the same result.
    """
    return _apply_two_way(
        x, lambda t: _gather_parts(t, -1, group), lambda t: _own_part(t, -1, group)
    )


def total(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over the group. Collective; all ranks get the same result.

    The gradient of the sum is the gradient of each summand.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """

    def summed(x: torch.Tensor) -> torch.Tensor:
        """Return the sum in new memory: the all-reduce writes in place."""
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    return _apply_two_way(x, summed, lambda t: t)


def gather_weight(
    weight: torch.Tensor, axis: int, group: dist.ProcessGroup, *, same_samples: bool
) -> torch.Tensor:
    """Return the full weight, from the parts of all ranks along ``axis``.

    The gradient of this rank's part is summed over the ranks, unless all ranks have the
    ``same_samples``. Collective in both directions.

    Args:
        weight: This rank's part.
        axis: The axis along which the weight is split.
        group: The tensor-parallel group.
        same_samples: Whether all ranks work on the same samples.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum of all ranks' gradients."""
        return _all_to_all(torch.stack(gradient.chunk(group.size(), axis)), group).sum(0)

    backward_function = (lambda t: _own_part(t, axis, group)) if same_samples else summed
    return _apply_two_way(weight, lambda t: _gather_parts(t, axis, group), backward_function)


def _apply_two_way(
    x: torch.Tensor, forward_function: _TensorFunction, backward_function: _TensorFunction
) -> torch.Tensor:
    """Return the result of one function, with another function for its gradient."""
    result: torch.Tensor = _TwoWayFunction.apply(x, forward_function, backward_function)  # type: ignore[no-untyped-call]
    return result


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send item ``i`` to rank ``i``, and return the items that came, by rank. Collective."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


def _gather_parts(x: torch.Tensor, axis: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks, joined along an axis. Collective.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, axis)


def _own_part(x: torch.Tensor, axis: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of a tensor along an axis, in new memory if need be."""
    return x.chunk(group.size(), axis)[group.rank()].contiguous()
