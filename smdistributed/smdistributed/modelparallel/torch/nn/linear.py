"""Linear layers split over tensor ranks by their input channels."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .collectives import exchange, slice_last, total
from .module import Arguments, DistributedModule, same_samples, tensor_group

__all__ = ["DistributedConv1D", "DistributedLinear"]


class DistributedLinear(DistributedModule):
    """``nn.Linear`` with ``in_features / tensor_parallel_degree`` input
    channels on each tensor rank.

    Each rank has its own samples (the same ones with ``prescaled_batch``) and gets the outputs of
    its own samples; all ranks of a group must call with tensors of one shape. The bias is whole on
    every rank.

    Attributes:
        in_features: Input channels of all ranks together.
        out_features: Output channels.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        whole = nn.Linear(in_features, out_features, bias)
        self.split("weight", whole.weight, 1)
        self.register_parameter("bias", whole.bias)

    @classmethod
    def arguments(cls, module: nn.Module) -> Arguments:
        """Return the arguments that make a linear layer of the same shape."""
        return (module.in_features, module.out_features), {"bias": module.bias is not None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of this rank's samples."""
        return _multiply(x, self.weight, self.bias)


class DistributedConv1D(DistributedModule):
    """The linear layer of Hugging Face's GPT-2, ``Conv1D``, whose weight is transposed.

    See ``DistributedLinear``.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.split("weight", torch.empty(nx, nf).normal_(std=0.02), 0)
        self.bias = nn.Parameter(torch.zeros(nf))

    @classmethod
    def arguments(cls, module: nn.Module) -> Arguments:
        """Return the arguments that make a layer of the same shape."""
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        return (weight.shape[1], weight.shape[0]), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of this rank's samples."""
        return _multiply(x, self.weight.t(), self.bias)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the outputs of a linear layer for this rank's samples. Collective over tensor ranks.

    Args:
        x: This rank's samples, with all input channels.
        weight: This rank's part: (output channels, a part of the input channels).
        bias: The full bias, or None.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """
    group = tensor_group()
    if same_samples():
        y = total(functional.linear(slice_last(x, group), weight), group)
    else:
        # Every rank multiplies its channels of the whole group's samples.
        of_all = exchange(torch.stack(x.chunk(group.size(), -1)), group)
        y = exchange(functional.linear(of_all, weight), group).sum(0)
    return y if bias is None else y + bias
