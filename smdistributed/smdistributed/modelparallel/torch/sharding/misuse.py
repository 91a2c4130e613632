"""Refuse uses of shared parameters outside of their block.

The errors name the module and the parameter; torch's own errors do not.
"""

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
    """A mode of torch that refuses to compute with a shared parameter and an unshared tensor.

    Such an operation is a mistake: while a block runs, its parameters are gathered, and not shared.

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
            StepError: The arguments have both kinds of tensors.
            Exception: An error of the function.
        """
        shared_parameter = None
        has_unshared = False
        for value in (*args, *(kwargs or {}).values()):
            if not isinstance(value, torch.Tensor):
                continue
            if not mesh.is_sharded(value):
                has_unshared |= value.dim() > 0
            elif shared_parameter is None:
                shared_parameter = value
        if shared_parameter is not None and has_unshared:
            raise StepError(self._message(shared_parameter, sys._getframe(1)))  # noqa: SLF001
        return func(*args, **(kwargs or {}))

    def _message(self, shared_parameter: Any, frame: Any) -> str:
        """Return the text of an error that names the module and the parameter.

        Args:
            shared_parameter: The parameter.
            frame: The frame that used the parameter.
        """
        parameter_names = {}
        for name, parameter in self._root.named_parameters():
            if mesh.is_sharded(parameter):
                parameter_names[_address(parameter)] = name
        parameter_name = parameter_names.get(_address(shared_parameter), "a parameter")
        modules = {
            id(module): (name or "the model", module) for name, module in self._root.named_modules()
        }
        # Up to the method of a module that used the parameter: the model itself is always there.
        while id(frame.f_locals.get("self")) not in modules:
            frame = frame.f_back
        name, user = modules[id(frame.f_locals["self"])]
        kind = type(user)
        # fully_shard puts a class in front of the module's own.
        if kind.__name__.startswith("FSDP"):
            kind = kind.__bases__[-1]
        return (
            f"{name} ({kind.__name__}) used {parameter_name} outside of"
            " its block. With sharded data parallelism a block has its parameters while its"
            " forward runs, and only then: call no other method of a block, read none of its"
            " parameters from outside, and do not call torch.autograd.grad in the forward pass"
        )


def check_unsharded(tensors: Iterable[Any]) -> None:
    """Check that outputs or a loss are not computed from shared parameters.

    Raises:
        StepError: They are. A sum over parameters is an example.
    """
    if any(mesh.is_sharded(tensor) for tensor in tensors):
        raise StepError(
            "the loss was computed from shared parameters: with sharded data parallelism each rank"
            " has a part of them. Let the optimizer do it (weight_decay), or compute it in the"
            " forward of the block that has the parameters"
        )


def _address(parameter: Any) -> int:
    """Return the address of this rank's part of a shared parameter."""
    part: torch.Tensor = mesh.local(parameter.detach())
    return part.untyped_storage().data_ptr()
