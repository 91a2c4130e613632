"""Reduce Hugging Face caches that go to other ranks in training, to the entries of the called
layers.

Causal language models train with a cache by default. Each layer adds its entry, so all entries of
earlier layers would travel to each layer. But a layer reads only its own entry. So for the other
entries it gets tensors on the meta device, which have a shape and no values. The step functions of
other ranks get the same in the model's outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport.pytrees import is_cache_class

_WRITTEN_ELSEWHERE = "_smp_away"
"""Attribute of a layer's entry, set when another rank has written the entry."""

__all__ = ["is_cache", "trim_caches", "without_values"]


def trim_caches(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a remote call, with copies of caches that have only the values which
    the module reads.

    A cache is the keys and values that Hugging Face's attention keeps of earlier tokens. Each entry
    that a layer of the module will write is marked, so that a later call with it is refused.
    Without gradients, as in generation, nothing is trimmed, because later calls read the cache
    again.

    Args:
        module: The remote module.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The new arguments; the same ones outside of training, and for a module without layers.

    Raises:
        StepError: An earlier call of a remote layer has marked this cache: the values that this
            call would read stayed on the layer's rank.
    """
    if not torch.is_grad_enabled() or not any(map(is_cache, (*args, *kwargs.values()))):
        return args, kwargs
    layers = _numbers_of_layers(module)
    if not layers:
        return args, kwargs
    new_args = tuple(_trim_cache(value, layers) for value in args)
    new_kwargs = {name: _trim_cache(value, layers) for name, value in kwargs.items()}
    return new_args, new_kwargs


def without_values(outputs: Any) -> Any:
    """Return the outputs of the model, as other ranks get them: with copies of caches that have no
    values.

    In training the caches of keys and values are not read after the model has returned, so they are
    not worth the transfer. Training is when gradients are recorded: generation runs without, and
    reads its caches again. Then the outputs are returned themselves, and so are outputs without a
    cache.

    In the copies each tensor of two or more dimensions is replaced by a `_ShapeOnly`. That is no
    tensor and good only for sending: pickling turns it into a tensor on the meta device, which has
    a shape and no values. Tensors of no or one dimension, such as a length, keep their values. The
    outputs themselves are not changed.

    Args:
        outputs: What the model returned. Caches are found only as values of a dictionary, such as
            the ``ModelOutput`` of Hugging Face.
    """
    if not torch.is_grad_enabled() or not isinstance(outputs, dict):
        return outputs
    if not any(map(is_cache, outputs.values())):
        return outputs
    result = copy.copy(outputs)
    for name, value in outputs.items():
        result[name] = _trim_cache(value, frozenset())
    return result


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of Hugging Face."""
    kind: Any = type(value)
    return is_cache_class(kind)


def _numbers_of_layers(module: nn.Module) -> frozenset[int]:
    """Return the numbers of the layers in a module.

    An empty set if a layer reads the entries of other layers, too.

    The number is Hugging Face's ``layer_idx``: the position of the layer's entry in a cache.
    """
    numbers = set()
    for submodule in module.modules():
        own = vars(submodule)
        if own.get("kv_shared_layer_index") is not None or own.get("is_kv_shared_layer"):
            return frozenset()
        number = own.get("layer_idx")
        if isinstance(number, int):
            numbers.add(number)
    return frozenset(numbers)


def _trim_cache(value: Any, used_layers: AbstractSet[int]) -> Any:
    """Return a copy of a cache with the values of some layers; any other value unchanged.

    The entries of these layers in the cache itself are marked as written on another rank.

    Args:
        value: The value.
        used_layers: Numbers of the layers, from 0. Their entries are copied with their tensors; all
            other tensors are replaced as in `without_values`.

    Raises:
        StepError: An entry was marked by an earlier call.
    """
    if not is_cache(value):
        return value
    result = copy.copy(value)
    layers = getattr(value, "layers", None)
    if not isinstance(layers, list):
        # The cache of an encoder and a decoder has two caches as attributes.
        for name, attribute in vars(value).items():
            vars(result)[name] = _trim_cache(attribute, used_layers)
        return result
    result.layers = []
    for number, layer in enumerate(layers):
        is_used = number in used_layers
        result.layers.append(copy.copy(layer) if is_used else _without_tensors(layer))
    for number in used_layers:
        if number >= len(layers):
            continue
        if _WRITTEN_ELSEWHERE in vars(layers[number]):
            raise StepError(
                "the model was called again with the cache of a call before, in training:"
                " the entries of remote layers stayed on their ranks\n"
                "Call it once with the whole sequence,"
                " or place the layers on one partition with smp.set_partition."
            )
        setattr(layers[number], _WRITTEN_ELSEWHERE, True)
    return result


def _without_tensors(layer: Any) -> Any:
    """Return a copy of a layer's entry with stand-ins (`_ShapeOnly`) for its large tensors.

    The entry itself is not changed.
    """
    result = copy.copy(layer)
    for name, value in vars(layer).items():
        vars(result)[name] = _without_large_tensors(value)
    return result


def _without_large_tensors(value: Any) -> Any:
    """Return a value of a layer's entry with stand-ins (`_ShapeOnly`) for its large tensors.

    Dictionaries and lists are copied with what is in them. Any other value is returned itself.
    """
    # Attention keeps its keys and values as attributes, linear attention its states in
    # dictionaries.
    if type(value) is dict:
        return {key: _without_large_tensors(item) for key, item in value.items()}
    if type(value) is list:
        return [_without_large_tensors(item) for item in value]
    # Small tensors, such as a length, are read by all layers.
    if isinstance(value, torch.Tensor) and value.dim() > 1:
        return _ShapeOnly(value)
    return value


class _ShapeOnly:
    """Stands for a tensor that stays on its rank. It arrives as a tensor on the meta device."""

    __slots__ = ("_dtype", "_shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype = tensor.shape, tensor.dtype

    def __reduce__(self) -> Any:
        """Return the function that unpickling calls, and its arguments: the receiver gets a tensor
        on the meta device.
        """
        return _make_meta_tensor, (self._shape, self._dtype)


def _make_meta_tensor(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")
