"""Containers that a module may write to: what is in them, whether that changed, and how the change goes to a copy."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_SEQUENCES = (list, collections.deque)
_WHOLE = (
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
_DEPTH, _MOST = 6, 4096
"""How deep containers are followed, and above how many items or containers no more are."""


class Old(NamedTuple):
    """An item that was in the container before.

    Attributes:
        key: Its position or key.
    """

    key: Any


def content(cell: Any) -> Any:
    """Return what is in a container now: a list or a dictionary."""
    if isinstance(cell, _SEQUENCES):
        return list(cell)
    if isinstance(cell, set):
        return dict.fromkeys(cell)
    return dict(cell) if isinstance(cell, dict) else dict(vars(cell))


def same(one: Any, other: Any) -> bool:
    """Return whether two contents have the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, list):
        return all(a is b for a, b in zip(one, other, strict=True))
    return all(a is b for a, b in zip(one.values(), other.values(), strict=True)) and list(one) == list(other)


def assign(cell: Any, value: Any) -> None:
    """Put another content into a container."""
    if isinstance(cell, list):
        cell[:] = value
    elif isinstance(cell, collections.deque):
        cell.clear()
        cell.extend(value)
    else:
        target = cell if isinstance(cell, dict | set) else vars(cell)
        target.clear()
        target.update(value)


def cells(value: Any, package: str = "", depth: int = 0) -> Iterator[Any]:
    """Yield the containers in a value. A copy of the value yields its own in the same order.

    Args:
        value: The value.
        package: Objects of other packages, such as a log or a writer, are left alone; empty: of none.
        depth: How deep in a value this is.
    """
    if depth > _DEPTH or isinstance(value, _WHOLE):
        return
    kind = type(value)
    if package and kind not in _BUILTIN and kind.__module__.partition(".")[0] != package:
        return
    if isinstance(value, tuple):
        items: Any = value
    elif isinstance(value, (*_SEQUENCES, dict)):
        if len(value) > _MOST:
            return
        yield value
        items = value.values() if isinstance(value, dict) else value
    elif isinstance(value, set):
        yield value
        return
    elif isinstance(getattr(value, "__dict__", None), dict):
        yield value
        items = vars(value).values()
    else:
        return
    for item in list(items):
        yield from cells(item, package, depth + 1)


def difference(before: Any, now: Any) -> Any:
    """Return a content with a reference in the place of each item that was there before."""
    pairs = enumerate(before) if isinstance(before, list) else before.items()
    known = {id(item): Old(key) for key, item in pairs}
    if isinstance(now, list):
        return [known.get(id(item), item) for item in now]
    return {key: known.get(id(item), item) for key, item in now.items()}


def restored(before: Any, changed: Any) -> Any:
    """Return the content that `difference` describes, for a copy whose content is `before`."""
    if isinstance(changed, list):
        return [before[item.key] if isinstance(item, Old) else item for item in changed]
    return {key: before[item.key] if isinstance(item, Old) else item for key, item in changed.items()}
