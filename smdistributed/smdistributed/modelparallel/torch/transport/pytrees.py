"""Nested values taken apart: their tensors, and the rest, which can be sent and put together again.

A value is pickled with a number in the place of each tensor. So whatever pickle knows may hold
tensors. They arrive with their gradients, in an object of the same class, and what is there twice
is one object again.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import io
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

_CONTAINERS = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    collections.deque,
    collections.UserDict,
    collections.UserList,
)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_OPEN = frozenset({list, tuple, dict, set})


class Tree(NamedTuple):
    """A nested value without its tensors.

    Attributes:
        data: What pickle made of it; None if the value is one tensor. An error,
            which is raised when it is sent.
    """

    data: bytes | Exception | None

    def __reduce__(self) -> Any:
        """Pickle it, or say why that is not possible."""
        if isinstance(self.data, Exception):
            raise self.data
        return Tree, (self.data,)


_ONE = Tree(None)
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def _mark(tensor: torch.Tensor) -> tuple[type[torch.Tensor], dict[str, Any]] | None:
    """Return the class and the attributes of a tensor.

    Classes with an inside of their own are not known.
    """
    kind = type(tensor)
    own = kind not in _TENSORS and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    attributes = {} if kind not in _TENSORS and not own else tensor.__dict__
    given = {name: value for name, value in attributes.items() if not name.startswith("_")}
    return (kind if own else torch.Tensor, given) if own or given else None


class _Pickler(pickle.Pickler):
    """Puts numbers in the place of tensors, and of what the receiver has."""

    def __init__(
        self, stream: io.BytesIO, known: Mapping[int, Any], *, looks: bool = False
    ) -> None:
        super().__init__(stream, 5, buffer_callback=(lambda _: None) if looks else None)
        self.tensors: list[torch.Tensor] = []
        self.places: dict[int, int] = {}
        self.known, self.looks = known, looks

    def persistent_id(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind in _PLAIN:
            return None
        if self.known and id(value) in self.known:
            return self.known[id(value)]
        if kind in _OPEN:
            return None
        if isinstance(value, torch.Tensor):
            if id(value) in self.places:
                return self.places[id(value)]
            self.places[id(value)] = place = len(self.tensors)
            self.tensors.append(value)
            mark = _mark(value)
            return place if mark is None else (place, *mark)
        if isinstance(value, torch.nn.Module) and any(
            True for _ in (*value.parameters(), *value.buffers())
        ):
            return self._refuse(
                f"parameters and buffers of a module ({kind.__name__}) stay on its rank"
            )
        if hasattr(kind, "__next__"):
            return self._refuse(f"another rank cannot move an iterator on ({kind.__name__})")
        return None

    def reducer_override(self, value: Any) -> Any:
        if not self.looks or value is int:
            return NotImplemented
        try:  # classes and functions are of no interest
            return (
                (int, ())
                if isinstance(value, type | types.FunctionType)
                else value.__reduce_ex__(5)
            )
        except Exception:  # noqa: BLE001  pickle does not know it
            return int, ()

    def _refuse(self, what: str) -> Any:
        if not self.looks:
            raise TypeError(what)
        return "nothing"


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, tensors: Sequence[Any], known: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self.tensors, self.known = list(tensors), known

    def persistent_load(self, place: Any) -> Any:
        if isinstance(place, tuple) and isinstance(place[0], int):
            number, kind, attributes = place
            tensor = self.tensors[number]
            self.tensors[number] = tensor = (
                tensor if kind is torch.Tensor else tensor.as_subclass(kind)
            )
            for name, value in attributes.items():
                setattr(tensor, name, value)
            return tensor
        if isinstance(place, int):
            return self.tensors[place]
        assert self.known is not None
        return self.known(place)


def flatten(value: Any, known: Mapping[int, Any] | None = None) -> tuple[Tree, list[torch.Tensor]]:
    """Take the tensors out of a nested value.

    Args:
        value: The value.
        known: What stands for objects that the receiver has: by their
            identities, something that is no integer.
    """
    if isinstance(value, torch.Tensor) and _mark(value) is None and id(value) not in (known or ()):
        return _ONE, [value]
    stream = io.BytesIO()
    pickler = _Pickler(stream, known or {})
    try:
        pickler.dump(value)
    except Exception as error:  # noqa: BLE001  whoever sends it is told
        return Tree(error), pickler.tensors
    return Tree(stream.getvalue()), pickler.tensors


def unflatten(tree: Tree, tensors: Sequence[Any], known: Callable[[Any], Any] | None = None) -> Any:
    """Put the tensors, or others in their place, back into a nested value.

    Args:
        tree: The value without tensors.
        tensors: Those in it.
        known: Returns what something stands for that `flatten` got as known.
    """
    if isinstance(tree.data, Exception):
        raise tree.data
    return tensors[0] if tree.data is None else _Unpickler(tree.data, tensors, known).load()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, each once. Those of modules do not count."""
    pickler = _Pickler(io.BytesIO(), {}, looks=True)
    with contextlib.suppress(Exception):
        pickler.dump(value)
    return pickler.tensors


def mapped(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a nested value with another in the place of each tensor.

    Objects without a tensor stay what they are.
    """

    def other(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        found = tensors_in(leaf) if opens(type(leaf)) else []
        return (
            copy.deepcopy(leaf, {id(tensor): function(tensor) for tensor in found})
            if found
            else leaf
        )

    return pytree.tree_map(other, value)


def opens(kind: Any) -> bool:
    """Return whether a class only holds what is in it, so that a copy is as good as the object."""
    return dataclasses.is_dataclass(kind) or issubclass(kind, _CONTAINERS) or is_cache_class(kind)


@functools.lru_cache(1024)
def is_cache_class(kind: Any) -> bool:
    """Return whether a class is one of Hugging Face's caches."""
    return any(base.__module__ == "transformers.cache_utils" for base in kind.__mro__)
