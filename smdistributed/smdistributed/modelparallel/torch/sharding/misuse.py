"""Say who used a shared parameter where it is not gathered: torch's words name neither."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.torch.exceptions import StepError

from . import mesh

__all__ = ["ShardedUseGuard", "check_unsharded"]


class ShardedUseGuard(TorchFunctionMode):
    """Refuses to compute with a shared parameter and a tensor that is not: a module in its block
    has whole parameters.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root = root

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch.

        Raises:
            StepError: It is given both kinds of tensors.
        """
        tensors = [
            each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)
        ]
        shared = [each for each in tensors if mesh.is_sharded(each)]
        if shared and any(each.dim() and not mesh.is_sharded(each) for each in tensors):
            raise StepError(self._said(shared[0]))
        return func(*args, **(kwargs or {}))

    def _said(self, shared: Any) -> str:
        places = {
            _place(p): name for name, p in self._root.named_parameters() if mesh.is_sharded(p)
        }
        modules = {
            id(module): (name or "the model", module) for name, module in self._root.named_modules()
        }
        frame: Any = sys._getframe(2)  # noqa: SLF001
        while id(frame.f_locals.get("self")) not in modules:
            frame = frame.f_back
        name, user = modules[id(frame.f_locals["self"])]
        kind = type(user).__bases__[-1] if type(user).__name__.startswith("FSDP") else type(user)
        return (
            f"{name} ({kind.__name__}) used {places.get(_place(shared), 'a parameter')} outside of"
            " its block. With sharded data parallelism a block has its parameters while its"
            " forward runs, and only then: call no other method of a block, read none of its"
            " parameters from outside, and do not call torch.autograd.grad in the forward pass"
        )


def check_unsharded(tensors: Iterable[Any]) -> None:
    """See that outputs or a loss have no shared parameter in them.

    Raises:
        StepError: They have: a sum over parameters, for example.
    """
    if any(mesh.is_sharded(tensor) for tensor in tensors):
        raise StepError(
            "the loss was computed from shared parameters: with sharded data parallelism each rank"
            " has a part of them. Let the optimizer do it (weight_decay), or compute it in the"
            " forward of the block that has the parameters"
        )


def _place(shared: Any) -> int:
    local: torch.Tensor = mesh.local(shared.detach())
    return local.untyped_storage().data_ptr()
