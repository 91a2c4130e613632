"""Split nested values into tensors and a rest that can be sent, and join them again.

A value is pickled with a number in the place of each tensor. So tensors may be in any object that
can be pickled. They arrive with their gradients, in an object of the same class. An object that is
in the value twice is one object again.
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
_CLASSES_WITHOUT_TENSORS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}
)
_PLAIN_CONTAINERS = frozenset({list, tuple, dict, set})


class Tree(NamedTuple):
    """A nested value without its tensors.

    Attributes:
        data: The pickled value; None if the value is one tensor; an error if the value cannot be
            pickled.
    """

    data: bytes | Exception | None

    def __reduce__(self) -> Any:
        """Pickle the tree when a message with it is sent.

        Raises:
            Exception: The error in ``data``.
        """
        if isinstance(self.data, Exception):
            raise self.data
        return Tree, (self.data,)


_NOTHING = "nothing"
"""Stands for an object that is left out where tensors are only collected."""

_SINGLE_TENSOR = Tree(None)
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def _class_and_attributes(tensor: torch.Tensor) -> tuple[type[torch.Tensor], dict[str, Any]] | None:
    """Return the class and the public attributes that the receiver must give to a tensor.

    A class with ``__torch_dispatch__`` is treated as a plain tensor: its inner tensors are unknown.

    Attributes with a leading underscore are not sent.

    Returns:
        (class, attributes); None for a plain tensor.
    """
    kind = type(tensor)
    if kind in _TENSORS:
        sent_kind: type[torch.Tensor] = torch.Tensor
    elif kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        sent_kind = kind
    else:
        return None
    attributes = {
        name: value for name, value in tensor.__dict__.items() if not name.startswith("_")
    }
    if sent_kind is torch.Tensor and not attributes:
        return None
    return sent_kind, attributes


class _Pickler(pickle.Pickler):
    """Pickle a value with numbers in the place of tensors, and with names for objects that the
    receiver has.

    Attributes:
        tensors: The tensors, in the order of their numbers.
        number_by_id: ``id()`` of a tensor -> its number.
        names: ``id()`` of an object that the receiver has -> its name.
        only_finds: Whether the tensors are collected, and the pickled value is not used.
    """

    def __init__(
        self, stream: io.BytesIO, names: Mapping[int, Any], *, only_finds: bool = False
    ) -> None:
        super().__init__(stream, 5, buffer_callback=(lambda _: None) if only_finds else None)
        self.tensors: list[torch.Tensor] = []
        self.number_by_id: dict[int, int] = {}
        self.names, self.only_finds = names, only_finds

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for an object in the pickled value; None: pickle takes the object.

        A tensor is added to `tensors` at its first occurrence.

        Returns:
            The name of an object that the receiver has. The number of a tensor, or (number, class,
            attributes) if it is more than a plain tensor.

        Raises:
            TypeError: The object cannot be sent; not raised where tensors are only collected.
        """
        # Hot: called for each object in the value.
        kind: Any = type(value)
        if kind in _CLASSES_WITHOUT_TENSORS:
            return None
        if self.names and id(value) in self.names:
            return self.names[id(value)]
        if kind in _PLAIN_CONTAINERS:
            return None
        if isinstance(value, torch.Tensor):
            if id(value) in self.number_by_id:
                return self.number_by_id[id(value)]
            self.number_by_id[id(value)] = place = len(self.tensors)
            self.tensors.append(value)
            mark = _class_and_attributes(value)
            if mark is None:
                return place
            return (place, *mark)
        if isinstance(value, torch.nn.Module) and [*value.parameters(), *value.buffers()]:
            return self._refuse(
                f"parameters and buffers of a module ({kind.__name__}) stay on its rank"
            )
        if hasattr(kind, "__next__"):
            return self._refuse(f"another rank cannot move an iterator on ({kind.__name__})")
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return how pickle takes an object apart, as ``object.__reduce_ex__`` does.

        NotImplemented: as pickle does by itself.

        Where tensors are only collected, an error of the object is passed over.
        """
        if not self.only_finds or value is int:
            return NotImplemented
        # To find tensors, classes and functions are skipped, and so are objects that pickle
        # refuses: 0 stands for them.
        if isinstance(value, type | types.FunctionType):
            return int, ()
        try:
            return value.__reduce_ex__(5)
        except Exception:  # noqa: BLE001  pickling an object may raise any error
            return int, ()

    def _refuse(self, reason: str) -> Any:
        """Raise an error, or leave an object out where tensors are only collected."""
        if not self.only_finds:
            raise TypeError(reason)
        return _NOTHING


class _Unpickler(pickle.Unpickler):
    """Unpickle a value, with tensors in the place of numbers, and own objects in the place of
    names.
    """

    def __init__(
        self, data: bytes, tensors: Sequence[Any], own_object: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self.tensors, self.own_object = list(tensors), own_object

    def persistent_load(self, place: Any) -> Any:
        """Return the object for what `_Pickler.persistent_id` has returned.

        A tensor that is more than a plain tensor gets its class and its attributes first.

        A tensor of a subclass takes the place of the plain one in `tensors`. Attributes are set on
        the tensor itself.

        Raises:
            Exception: An attribute cannot be set.
        """
        if isinstance(place, tuple) and isinstance(place[0], int):
            number, kind, attributes = place
            tensor = self.tensors[number]
            if kind is not torch.Tensor:
                tensor = self.tensors[number] = tensor.as_subclass(kind)
            for name, value in attributes.items():
                setattr(tensor, name, value)
            return tensor
        if isinstance(place, int):
            return self.tensors[place]
        assert self.own_object is not None
        return self.own_object(place)


def flatten(value: Any, names: Mapping[int, Any] | None = None) -> tuple[Tree, list[torch.Tensor]]:
    """Take the tensors out of a nested value.

    For example ``{"loss": tensor, "step": 3}`` gives a tree of the dictionary, and ``[tensor]``.

    Args:
        value: The value.
        names: ``id()`` of an object that the receiver has -> a name for it, which is no integer.

    Returns:
        (tree, tensors). The tensors are the same objects as in the value, each once, in the order
        of their numbers. An error of pickle is stored in the tree, and raised when the tree is sent
        or unflattened.
    """
    names = names or {}
    if (
        isinstance(value, torch.Tensor)
        and _class_and_attributes(value) is None
        and id(value) not in names
    ):
        return _SINGLE_TENSOR, [value]
    stream = io.BytesIO()
    pickler = _Pickler(stream, names)
    try:
        pickler.dump(value)
    except Exception as error:  # noqa: BLE001  it is raised when the tree is sent
        return Tree(error), pickler.tensors
    return Tree(stream.getvalue()), pickler.tensors


def unflatten(
    tree: Tree, tensors: Sequence[Any], own_object: Callable[[Any], Any] | None = None
) -> Any:
    """Put the tensors, or others in their place, back into a nested value.

    Args:
        tree: The value without tensors.
        tensors: The tensors, in the order of `flatten`.
        own_object: Returns the receiver's object for a name that `flatten` got.

    Returns:
        The value: a new object, with the given tensors in it. For a tree that is one tensor it is
        the first of the tensors.

    Raises:
        Exception: The value could not be pickled, or cannot be unpickled on this rank, for example
            because a class is missing.
    """
    if isinstance(tree.data, Exception):
        raise tree.data
    if tree.data is None:
        return tensors[0]
    return _Unpickler(tree.data, tensors, own_object).load()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, each once, without parameters and buffers of modules.

    Objects that pickle refuses are passed over.

    The value is walked as pickle does: ``__reduce_ex__`` of objects in it is called. An error ends
    the search, and what was found counts.
    """
    pickler = _Pickler(io.BytesIO(), {}, only_finds=True)
    # An error ends the search: the tensors that were found count.
    with contextlib.suppress(Exception):
        pickler.dump(value)
    return pickler.tensors


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a copy of a nested value, with the result of a function in the place of each tensor.

    Objects without tensors are not copied. Tensors in an object that is more than a container
    stay as they are.

    The value itself is not changed, unless the function changes its tensors.

    Args:
        function: Gets a tensor.
        value: The value.

    Raises:
        Exception: An error of the function, or of a deep copy.
    """

    def map_leaf(leaf: Any) -> Any:
        """Return a leaf of the tree that torch knows, with its tensors replaced."""
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if not is_only_a_container(type(leaf)):
            return leaf
        tensors = tensors_in(leaf)
        if not tensors:
            return leaf
        # A deep copy that takes the results for copies of the tensors.
        results = {id(tensor): function(tensor) for tensor in tensors}
        return copy.deepcopy(leaf, results)

    return pytree.tree_map(map_leaf, value)


def is_only_a_container(kind: Any) -> bool:
    """Return whether a class only holds its items, so that a copy can replace an object."""
    return dataclasses.is_dataclass(kind) or issubclass(kind, _CONTAINERS) or is_cache_class(kind)


@functools.lru_cache(1024)
def is_cache_class(kind: Any) -> bool:
    """Return whether a class is a cache of Hugging Face."""
    return any(base.__module__ == "transformers.cache_utils" for base in kind.__mro__)
