"""Layer normalization: by the name that apex's kernel has in smp, and split over tensor ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from smdistributed.modelparallel.torch.job.state import state

from .collectives import gather_weight
from .module import Arguments, DistributedModule, NotSplitError, same_samples, tensor_group

__all__ = ["DistributedLayerNorm", "FusedLayerNorm"]


class FusedLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm``: torch's own kernel is fused."""


class DistributedLayerNorm(DistributedModule, FusedLayerNorm):
    """``nn.LayerNorm`` whose weight and bias are split over tensor ranks, and
    gathered for each use.

    Parameters, gradients and optimizer states are split. Every rank normalizes its own samples: the
    statistics need no exchange. With ``optimize: speed`` a LayerNorm is left whole.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
    ) -> None:
        FusedLayerNorm.__init__(self, normalized_shape, eps, elementwise_affine)
        if elementwise_affine:
            for name in ("weight", "bias"):
                whole = getattr(self, name)
                delattr(self, name)
                self.split(name, whole, 0)

    @classmethod
    def arguments(cls, module: nn.Module) -> Arguments:
        """Return the arguments that make a layer of the same shape.

        The module is not changed.

        Raises:
            NotSplitError: ``optimize`` is ``speed``, or there is nothing to split.
        """
        if state.cfg.optimize == "speed":
            raise NotSplitError("optimize is 'speed'")
        if module.bias is None:
            raise NotSplitError("it has no weight and bias to split")
        return (module.normalized_shape, module.eps), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized samples.

        Weight and bias are gathered: the call is collective over tensor ranks.

        Raises:
            RuntimeError: The collective broke, because a rank is gone.
        """
        if not self.elementwise_affine:
            return super().forward(x)
        both = gather_weight(
            torch.stack([self.weight, self.bias]), 1, tensor_group(), same_samples=same_samples()
        )
        return functional.layer_norm(x, self.normalized_shape, both[0], both[1], self.eps)
