"""Containers that a module may write to: what is in them, whether that changed, and how the change goes to a copy."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import operator
import random
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import torch

_SEQUENCES = (list, collections.deque)
WHOLE = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    torch.Tensor,
    torch.nn.Module,
    torch.dtype,
    torch.device,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    torch.Generator,
)
_BUILTIN = {
    list,
    dict,
    set,
    tuple,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
    types.SimpleNamespace,
}
_LEAVES = (torch.Tensor, torch.Generator, types.FunctionType, random.Random, itertools.count, bytearray)
_SUMMED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}
_SMALL = 1 << 16
_STDLIB = sysconfig.get_path("stdlib")
_VALUES = (bool, int, float, complex, str, bytes, type(None), list, dict, set, tuple)
_DEPTH, _MOST = 6, 4096
"""How deep containers are followed, and above how many items or containers no more are."""


class StandIn:
    """Is in a class for an attribute whose objects are looked at.

    Attributes:
        default: What the class has.
    """

    default: Any


class Names:
    """Variables of a Python module, or attributes of a class, as a container."""

    def __init__(self, holder: Any, names: frozenset[str]) -> None:
        self.holder, self.names = holder, names

    def get(self) -> dict[str, Any]:
        """Return the values that are of a kind that can go to another rank. Others are code, and stay."""
        space = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        found = {name: space.get(name, self) for name in self.names}
        found = {name: value.default if isinstance(value, StandIn) else value for name, value in found.items()}
        return {name: value for name, value in found.items() if isinstance(value, (*_VALUES, torch.Tensor))}

    def put(self, value: dict[str, Any]) -> None:
        """Set the values, and delete the names that have none."""
        for name in [name for name in self.get() if name not in value]:
            self.holder.pop(name) if isinstance(self.holder, dict) else delattr(self.holder, name)
        for name, each in value.items():
            if isinstance(self.holder, dict):
                self.holder[name] = each
            elif isinstance(there := vars(self.holder).get(name), StandIn):
                there.default = each
            else:
                setattr(self.holder, name, each)


def content(cell: Any) -> Any:
    """Return what is in a container now: a list or a dictionary."""
    if isinstance(cell, Names):
        return cell.get()
    if isinstance(cell, _SEQUENCES):
        return list(cell)
    if isinstance(cell, set):
        return dict.fromkeys(cell)
    # A subclass may make what is asked of it.
    return dict(dict.items(cell)) if isinstance(cell, dict) else _state(cell)


def same(one: Any, other: Any) -> bool:
    """Return whether two contents have the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, list):
        return all(a is b for a, b in zip(one, other, strict=True))
    return all(a is b for a, b in zip(one.values(), other.values(), strict=True)) and list(one) == list(other)


def before(each: Any) -> Any:
    """Return what is in a tensor or a container now, so that ``changed`` can tell whether that was written."""
    return each._version if isinstance(each, torch.Tensor) else content(each)  # noqa: SLF001


def changed(each: Any, then: Any) -> bool:
    """Return whether a tensor or a container was written since ``before`` returned this."""
    now = before(each)
    return bool(now != then) if isinstance(each, torch.Tensor) else not same(now, then)


def writable(leaf: Any) -> bool:
    """Return whether ``assign`` can put the ``value`` of one leaf into another: arrays, and generators of numbers."""
    kinds = (torch.Generator, random.Random, bytearray)
    return isinstance(leaf, kinds) or hasattr(leaf, "bit_generator") or type(leaf).__name__ == "ndarray"


def value(leaf: Any) -> Any:
    """Return what a writable leaf has in it."""
    if isinstance(leaf, torch.Generator):
        return leaf.get_state()
    if isinstance(leaf, random.Random):
        return leaf.getstate()
    return leaf.bit_generator.state if hasattr(leaf, "bit_generator") else copy.copy(leaf)


def assign(cell: Any, value: Any) -> None:
    """Put another content into a container, or into a leaf that is writable."""
    if isinstance(cell, Names):
        cell.put(value)
    elif isinstance(cell, torch.Generator):
        cell.set_state(value)
    elif isinstance(cell, random.Random):
        cell.setstate(value)
    elif hasattr(cell, "bit_generator"):
        cell.bit_generator.state = value
    elif isinstance(cell, bytearray):
        cell[:] = value
    elif type(cell).__name__ == "ndarray":
        cell[...] = value
    elif isinstance(cell, list):
        cell[:] = value
    elif isinstance(cell, collections.deque):
        cell.clear()
        cell.extend(value)
    else:
        kind: Any = type(cell)
        slots = () if isinstance(cell, dict | set) else _slots(kind)
        for name in slots:
            if name in value:
                object.__setattr__(cell, name, value[name])
            elif hasattr(cell, name):
                object.__delattr__(cell, name)
        target = cell if isinstance(cell, dict | set) else getattr(cell, "__dict__", {})
        target.clear()
        target.update({name: value[name] for name in value if name not in slots} if slots else value)


def cells(value: Any, package: str = "", depth: int = 0) -> Iterator[Any]:
    """Yield the containers in a value. A copy of the value yields its own in the same order.

    Args:
        value: The value.
        package: Objects of other installed packages, such as a log or a writer, are left alone; empty: of none.
        depth: How deep in a value this is.
    """
    if depth > _DEPTH or isinstance(value, WHOLE):
        return
    kind: Any = type(value)
    if kind is Names:
        yield value
        return
    if package and kind not in _BUILTIN and foreign(kind, package):
        return
    if isinstance(value, tuple):
        items: Any = value
    elif isinstance(value, (*_SEQUENCES, dict)):
        if len(value) > _MOST:
            return
        yield value
        items = dict.values(value) if isinstance(value, dict) else value
    elif isinstance(value, set):
        yield value
        return
    elif isinstance(getattr(value, "__dict__", None), dict) or _slots(kind):
        yield value
        items = _state(value).values()
    else:
        return
    for item in list(items):
        yield from cells(item, package, depth + 1)


def leaves(value: Any, package: str) -> Iterator[Any]:
    """Yield what is in a value that is no container, and can be written in place."""
    for item in (value, *(each for cell in cells(value, package) for each in items(content(cell)))):
        kind: Any = type(item)
        iterates = hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
        if iterates or isinstance(item, _LEAVES) or kind.__module__.partition(".")[0] == "numpy":
            yield item


def state(leaf: Any) -> Any:
    """Return what changes when a leaf is written, as far as that can be seen without much work."""
    if isinstance(leaf, torch.Tensor):
        # torch does not count what is written to a tensor's `data`.
        small = not leaf.requires_grad and leaf.layout is torch.strided and 0 < leaf.numel() <= _SMALL
        total = leaf.detach().sum(dtype=torch.float64).item() if small and leaf.dtype in _SUMMED else 0
        return None if leaf.is_inference() else leaf._version, total  # noqa: SLF001
    if isinstance(leaf, types.FunctionType):
        return [*map(_mark, (*vars(leaf).values(), *enclosed(leaf)))]
    if isinstance(leaf, torch.Generator):
        return leaf.get_state().tolist()
    if isinstance(leaf, random.Random):
        return leaf.getstate()
    if isinstance(leaf, itertools.count):
        return repr(leaf)
    if isinstance(leaf, types.GeneratorType):
        frame = leaf.gi_frame
        return None if frame is None else (frame.f_lasti, [*map(_mark, frame.f_locals.values())])
    if hasattr(type(leaf), "__next__"):
        return operator.length_hint(leaf, -1) if hasattr(leaf, "__length_hint__") else object()  # may have moved on
    if hasattr(leaf, "bit_generator"):
        return repr(leaf.bit_generator.state)
    try:
        view = memoryview(leaf)
    except (TypeError, ValueError):
        return None
    return view.tobytes() if view.nbytes <= _SMALL else None


def _mark(item: Any) -> Any:
    return item if isinstance(item, int | float | str) else id(item)


def enclosed(function: Any) -> list[Any]:
    """Return the values of the variables of outer functions that a function uses."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not set yet
            found.append(cell.cell_contents)
    return found


def items(value: Any) -> Any:
    """Return what is in a content."""
    return value if isinstance(value, list) else value.values()


@functools.lru_cache(4096)
def foreign(kind: Any, package: str) -> bool:
    """Return whether a class is of another package than this one, and of one that is installed."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "" if kind.__module__ != "__main__" else "."
    return kind.__module__.partition(".")[0] != package and (
        not file or "site-packages" in file or "dist-packages" in file or file.startswith(_STDLIB)
    )


@functools.lru_cache(4096)
def _slots(kind: Any) -> tuple[str, ...]:
    """Return the attributes of a class that are in no dictionary."""
    found = []
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _state(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}
