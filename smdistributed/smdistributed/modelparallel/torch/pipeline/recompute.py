"""Run a function without keeping its activations: the backward pass runs it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

__all__ = ["Recomputation", "in_turn", "run"]

WITHOUT_CACHE: Mapping[str, Any] = {
    "use_cache": False,
    "past_key_values": None,
    "past_key_value": None,
    "layer_past": None,
}
"""Named arguments that Hugging Face's layers get when they run again: their own
checkpointing gives them too.
"""


class Recomputation(NamedTuple):
    """How modules run again.

    Attributes:
        preserve_rng_state: Whether the second run draws the random numbers of the first one.
        offload: Whether what is kept waits on the host, if it is on a GPU.
        group: How many neighbours of a Sequential run again together; None: as many as there are.
    """

    preserve_rng_state: bool
    offload: bool
    group: int | None = 1

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a module."""
        return run(self, module, args, kwargs)

    def chain(self, children: Sequence[nn.Module], x: Any) -> Any:
        """Run neighbours of a Sequential, in groups."""
        size = self.group or len(children)
        for start in range(0, len(children), size):
            group = children[start : start + size]
            x = run(self, in_turn, (group, x), {})
        return x


def in_turn(children: Sequence[nn.Module], x: Any) -> Any:
    """Run neighbours of a Sequential."""
    for child in children:
        x = child(x)
    return x


def run(
    again: Recomputation,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function that is run again in the backward pass, in whichever thread that runs.

    Args:
        again: How it runs again.
        function: It must not call a module of another partition.
        args: Its arguments. Tensors in them, nested ones too, are kept.
        kwargs: Its named arguments, likewise.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # The second run would write into the cache again.
    kwargs = {**kwargs, **{name: value for name, value in WITHOUT_CACHE.items() if name in kwargs}}
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def call(*values: Any) -> Any:
        again_args, again_kwargs = pytree.tree_unflatten(list(values), spec)
        return function(*again_args, **again_kwargs)

    offload = again.offload and any(isinstance(v, torch.Tensor) and v.is_cuda for v in leaves)
    # The hooks reach only what the checkpoint itself keeps: its inputs.
    with torch.autograd.graph.save_on_cpu(pin_memory=True) if offload else contextlib.nullcontext():
        return checkpoint(
            call, *leaves, use_reentrant=False, preserve_rng_state=again.preserve_rng_state
        )
