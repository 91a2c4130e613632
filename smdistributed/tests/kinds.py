"""Kinds of objects that hold tensors, as models pass them on: `wrap` makes one of two values,
`read` takes them out.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence


@dataclass
class Plain:
    a: Any
    b: Any
    note: str = "note"


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


@dataclass(slots=True)
class Slots:
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: Any
    b: Any


@dataclass
class NotInit:
    a: Any
    b: Any = field(init=False)
    calls: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.b = None
        self.calls += 1


@dataclass
class Child(Plain):
    inner: Any = None


class Pair(NamedTuple):
    a: Any
    b: Any


class NamedPair(Pair):
    """A class of its own, so that it is no named tuple for torch."""


class OwnList(list[Any]):
    extra: Any


class OwnTuple(tuple[Any, ...]):
    __slots__ = ()


class OwnDict(dict[str, Any]):
    pass


class OwnOrdered(collections.OrderedDict[str, Any]):
    """A mapping as transformers' ModelOutput: the items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)


class OwnUserDict(collections.UserDict[str, Any]):
    pass


class OwnDeque(collections.deque[Any]):
    pass


class Attributes:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class OnlySlots:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


def not_init(a: Any, b: Any) -> NotInit:
    value = NotInit(a)
    value.b = b
    return value


def with_attribute(a: Any, b: Any) -> OwnList:
    value = OwnList([a])
    value.extra = b
    return value


def cache(a: Any, b: Any) -> Any:
    """A cache as Hugging Face's models return it and pass it on unless `use_cache` is false."""
    from transformers import DynamicCache

    value = DynamicCache()
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        value.update(a[None, None], b[None, None], 0)
    return value


def read_cache(value: Any) -> tuple[Any, Any]:
    layer = value.layers[0]
    return layer.keys[0, 0], layer.values[0, 0]


def read_packed(value: PackedSequence) -> tuple[Any, Any]:
    return value.data, value.batch_sizes.to(value.data).expand(len(value.data), 1)


def output(a: Any, b: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(loss=a, logits=b)


Read = Callable[[Any], tuple[Any, Any]]
Kind = tuple[Callable[[Any, Any], Any], Read]


def _attributes(value: Any) -> tuple[Any, Any]:
    return value.a, value.b


def _positions(value: Any) -> tuple[Any, Any]:
    return value[0], value[1]


def _keys(value: Any) -> tuple[Any, Any]:
    return value["a"], value["b"]


ANY: dict[str, Kind] = {
    "dataclass": (Plain, _attributes),
    "frozen dataclass": (Frozen, _attributes),
    "dataclass with slots": (Slots, _attributes),
    "frozen dataclass with slots": (FrozenSlots, _attributes),
    "dataclass with a field that is no argument": (not_init, _attributes),
    "dataclass that inherits": (
        lambda a, b: Child(a, None, inner=Plain(None, b)),
        lambda v: (v.a, v.inner.b),
    ),
    "named tuple": (Pair, _attributes),
    "named tuple that inherits": (NamedPair, _attributes),
    "list": (lambda a, b: [a, b], _positions),
    "own list": (lambda a, b: OwnList([a, b]), _positions),
    "own list with an attribute": (with_attribute, lambda v: (v[0], v.extra)),
    "tuple": (lambda a, b: (a, b), _positions),
    "own tuple": (lambda a, b: OwnTuple([a, b]), _positions),
    "dict": (lambda a, b: {"a": a, "b": b}, _keys),
    "own dict": (lambda a, b: OwnDict(a=a, b=b), _keys),
    "ordered dict": (lambda a, b: collections.OrderedDict(a=a, b=b), _keys),
    "own ordered dict": (lambda a, b: OwnOrdered(a=a, b=b), _attributes),
    "user dict": (lambda a, b: collections.UserDict(a=a, b=b), _keys),
    "own user dict": (lambda a, b: OwnUserDict(a=a, b=b), _keys),
    "user list": (lambda a, b: collections.UserList([a, b]), _positions),
    "deque": (lambda a, b: collections.deque([a, b], 5), _positions),
    "own deque": (lambda a, b: OwnDeque([a, b], 5), _positions),
    "plain object": (Attributes, _attributes),
    "object with slots": (OnlySlots, _attributes),
    "namespace": (lambda a, b: types.SimpleNamespace(a=a, b=b), _attributes),
    "chain of maps": (lambda a, b: collections.ChainMap({"a": a}, {"b": b}), _keys),
    "partial": (
        lambda a, b: functools.partial(dict, a, b=b),
        lambda v: (v.args[0], v.keywords["b"]),
    ),
}
"""Kinds that may hold anything."""

TENSORS: dict[str, Kind] = {
    "set": (lambda a, b: {a, b[:, :2]}, lambda v: tuple(sorted(v, key=lambda t: -t.size(1)))),
    "packed sequence": (lambda a, b: PackedSequence(a + b, torch.tensor([len(a)])), read_packed),
    "Hugging Face's cache": (cache, read_cache),
    "Hugging Face's output": (output, lambda v: (v.loss, v.logits)),
}
"""Kinds that hold two tensors."""

REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "module": lambda _a, _b: torch.nn.Linear(2, 2),
    "module in an object": lambda a, _b: Attributes(a, [torch.nn.Linear(2, 2)]),
    "iterator": lambda a, b: iter([a, b]),
    "generator": lambda a, b: (part for part in (a, b)),
    "closure": lambda a, b: lambda: a + b,
}
"""Kinds that cannot travel."""
