"""What the script has wrapped: one model, and its optimizers.

A step function, an optimizer and torch's `clip_grad_norm_` are not told which model they are for, and there is one in a
process. It is known here as what it can do: none of those who ask import its class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["Model", "Scaler", "wrapped"]


class Removable(Protocol):
    """What is got for a hook."""

    def remove(self) -> None:
        """Call the hook no more."""


class Scaler(Protocol):
    """What has a factor of the loss, which changes from step to step."""

    loss_scale: float


class Model(Protocol):
    """A `smp.DistributedModel`, whose methods say what they do."""

    module: nn.Module
    partitioned: bool
    loss_scaler: Scaler

    @property
    def owner(self) -> Mapping[str, int]: ...  # noqa: D102

    @property
    def pass_no(self) -> int: ...  # noqa: D102

    def begin_step(self, first: Callable[[], Any]) -> None: ...  # noqa: D102

    def begin_microbatch(self, *, last: bool) -> None: ...  # noqa: D102

    def backward(self, tensors: torch.Tensor) -> None: ...  # noqa: D102

    def end_step(self) -> None: ...  # noqa: D102

    def local_parameters(self) -> Iterator[nn.Parameter]: ...  # noqa: D102

    def partition_of(self, parameter: torch.Tensor) -> int | None: ...  # noqa: D102

    def partition_of_module(self, module: nn.Module) -> int | None: ...  # noqa: D102

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> Removable: ...  # noqa: D102


class Wrapped:
    """What is wrapped.

    Attributes:
        model: The only model; None before `smp.DistributedModel`.
        optimizers: In the order of their making.
    """

    def __init__(self) -> None:
        self.model: Model | None = None
        self.optimizers: list[Any] = []


wrapped = Wrapped()
