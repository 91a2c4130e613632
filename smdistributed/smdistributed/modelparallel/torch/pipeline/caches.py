"""What of a Hugging Face cache goes to other ranks in training: the entries of
the layers that are called.

Causal language models train with a cache unless they are told not to. Each layer adds its entry, so
all that came before would travel to each layer. A layer reads its own: of the others it gets
tensors on the meta device, which have a shape and no values. So do the other ranks' step functions
with the model's outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport.pytrees import is_cache_class

_AWAY = "_smp_away"
"""The attribute of a layer's entry that another rank has written."""

__all__ = ["is_cache", "trim_caches", "without_values"]


def trim_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a remote call, with copies of caches that have
    only what the module reads.

    Raises:
        StepError: That was written by an earlier call, and stayed on the module's rank.
    """
    if not torch.is_grad_enabled() or not any(map(is_cache, (*args, *kwargs.values()))):
        return args, kwargs
    used = _layers(module)
    if not used:
        return args, kwargs
    return tuple(_trimmed(value, used) for value in args), {
        name: _trimmed(v, used) for name, v in kwargs.items()
    }


def without_values(outputs: Any) -> Any:
    """Return what the model returned, with copies of caches that have no values."""
    if (
        not torch.is_grad_enabled()
        or not isinstance(outputs, dict)
        or not any(map(is_cache, outputs.values()))
    ):
        return outputs
    result = copy.copy(outputs)
    for name, value in outputs.items():
        result[name] = _trimmed(value, frozenset())
    return result


def is_cache(value: Any) -> bool:
    """Return whether a value is one of Hugging Face's caches."""
    kind: Any = type(value)
    return is_cache_class(kind)


def _layers(module: nn.Module) -> frozenset[int]:
    """Return the numbers of the layers in a module; none if it is not known what it reads."""
    found = set()
    for each in module.modules():
        own = vars(each)
        if own.get("kv_shared_layer_index") is not None or own.get("is_kv_shared_layer"):
            return frozenset()
        found.add(own.get("layer_idx"))
    return frozenset(number for number in found if isinstance(number, int))


def _trimmed(value: Any, used: AbstractSet[int]) -> Any:
    if not is_cache(value):
        return value
    layers = getattr(value, "layers", None)
    result = copy.copy(value)
    if isinstance(layers, list):
        result.layers = [
            copy.copy(each) if number in used else _hollow(each)
            for number, each in enumerate(layers)
        ]
        for each in (layers[number] for number in used if number < len(layers)):
            if _AWAY in vars(each):
                raise StepError(
                    "the model was called again with the cache of a call before, in training:"
                    " the entries of remote layers stayed on their ranks\n"
                    "Call it once with the whole sequence,"
                    " or place the layers on one partition with smp.set_partition."
                )
            setattr(each, _AWAY, True)
    else:  # one of an encoder and a decoder has two
        vars(result).update({name: _trimmed(each, used) for name, each in vars(value).items()})
    return result


def _hollow(layer: Any) -> Any:
    result = copy.copy(layer)
    for name, each in vars(layer).items():
        if isinstance(each, torch.Tensor) and each.dim() > 1:
            setattr(result, name, _Shape(each))
    return result


class _Shape:
    """What travels of a tensor that stays. It arrives as a tensor on the meta device."""

    __slots__ = ("_of",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._of = tensor.shape, tensor.dtype

    def __reduce__(self) -> Any:
        return _on_meta, self._of


def _on_meta(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
