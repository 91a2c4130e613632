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
"""Named arguments that Hugging Face's layers get when they run again. Their own checkpointing gives
the same ones.
"""


class Recomputation(NamedTuple):
    """Options with which modules run again in the backward pass.

    Attributes:
        preserve_rng_state: Whether the second run draws the random numbers of the first one.
        offload: Whether inputs on a GPU wait in host memory for the second run.
        group: Number of neighbours of a Sequential that run again together; None: all.
    """

    preserve_rng_state: bool
    offload: bool
    group: int | None = 1

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a module, which runs again in the backward pass, and return its result."""
        return run(self, module, args, kwargs)

    def chain(self, children: Sequence[nn.Module], x: Any) -> Any:
        """Run neighbours of a Sequential in groups, and return the last result.

        Each group runs again as a whole in the backward pass.

        As `run`, with the same effects. The group size is that of `group`; None takes all
        neighbours as one group.

        Args:
            children: The modules.
            x: The argument of the first one.

        Raises:
            Exception: An error of a module.
        """
        size = self.group or len(children)
        for start in range(0, len(children), size):
            group = children[start : start + size]
            x = run(self, in_turn, (group, x), {})
        return x


def in_turn(children: Sequence[nn.Module], x: Any) -> Any:
    """Run neighbours of a Sequential one after another, and return the last result."""
    for child in children:
        x = child(x)
    return x


def run(
    recomputation: Recomputation,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function without keeping its activations, and return its result: it runs again in the
    backward pass, in the thread of that pass.

    This is torch.utils.checkpoint.checkpoint without reentrance. Named arguments for a cache of
    Hugging Face are set to False or None, if they are given and gradients are recorded. With
    ``recomputation.offload`` the kept inputs wait in pinned host memory, if one is on a GPU.

    Args:
        recomputation: The options.
        function: The function. It must not call a module of another partition.
        args: Arguments. Tensors in them, also nested ones, are kept for the second run.
        kwargs: Named arguments, treated in the same way.

    Raises:
        Exception: An error of the function; in the backward pass also torch's own, if the second
            run computes other tensors.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # Without a cache: the second run would write into it again.
    overridden = {name: value for name, value in WITHOUT_CACHE.items() if name in kwargs}
    new_kwargs = {**kwargs, **overridden}
    leaves, spec = pytree.tree_flatten((args, new_kwargs))

    def call(*values: Any) -> Any:
        """Call the function with the leaves of its arguments: torch keeps only flat arguments."""
        call_args, call_kwargs = pytree.tree_unflatten(list(values), spec)
        return function(*call_args, **call_kwargs)

    on_gpu = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)
    # The hooks move only the tensors that the checkpoint itself keeps: its inputs.
    saved: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if recomputation.offload and on_gpu:
        saved = torch.autograd.graph.save_on_cpu(pin_memory=True)
    with saved:
        return checkpoint(
            call,
            *leaves,
            use_reentrant=False,
            preserve_rng_state=recomputation.preserve_rng_state,
        )
