"""What modules split over tensor ranks exchange, with the gradients of each exchange.

All ranks of a group must call the same exchanges in the same order, with tensors of one shape. The pipeline keeps
that order; see the runtime.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["exchange", "gather_last", "gather_weight", "slice_last", "total"]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


class _SliceLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _mine(x, -1, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.cat(_all_gather(gradients[0], ctx.group), -1), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return torch.cat(_all_gather(x, group), -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _mine(gradients[0], -1, ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _GatherWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, axis: int, same_samples: bool, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.axis, ctx.same_samples, ctx.group = axis, same_samples, group
        return torch.cat(_all_gather(weight, group), axis)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.same_samples:
            mine = _mine(gradients[0], ctx.axis, ctx.group)
        else:
            mine = _all_to_all(torch.stack(gradients[0].chunk(ctx.group.size(), ctx.axis)), ctx.group).sum(0)
        return mine, None, None, None


def exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send ``x[i]`` to rank ``i`` of the group, and return what came: ``[j]`` is rank ``j``'s."""
    return _apply(_Exchange, x, group)


def slice_last(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the last axis of ``x``, which is the same on all ranks of the group."""
    return _apply(_SliceLast, x, group)


def gather_last(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all ranks, side by side on the last axis. Every rank goes on with the same result."""
    return _apply(_GatherLast, x, group)


def total(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over the group. Every rank goes on with the same result."""
    return _apply(_Total, x, group)


def gather_weight(weight: torch.Tensor, axis: int, group: dist.ProcessGroup, *, same_samples: bool) -> torch.Tensor:
    """Return a whole weight of which every rank holds a part of ``axis``.

    The gradient of this rank's part is summed over the ranks, unless all work on the ``same_samples``.
    """
    return _apply(_GatherWeight, weight, axis, same_samples, group)


def _apply(function: type[torch.autograd.Function], *arguments: object) -> torch.Tensor:
    result = function.apply(*arguments)  # type: ignore[no-untyped-call]
    assert isinstance(result, torch.Tensor)
    return result


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def _mine(x: torch.Tensor, axis: int, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(group.size(), axis)[group.rank()].contiguous()
