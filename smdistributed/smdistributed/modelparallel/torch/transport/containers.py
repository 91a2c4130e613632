"""Containers that a module may write to: what is in them, whether that changed,
and how the change goes to a copy.
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import copy
import functools
import itertools
import operator
import random
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator
from typing import Any, ClassVar

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
BUILTIN = {
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
_LEAVES = (
    torch.Tensor,
    torch.Generator,
    types.FunctionType,
    random.Random,
    itertools.count,
    bytearray,
)
_SUMMED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.bool,
}
_SMALL = 1 << 16
_STDLIB = sysconfig.get_path("stdlib")
_DATA_DEPTH = 8
"""Levels of containers in an attribute of an object of an installed class."""
_VALUES = (bool, int, float, complex, str, bytes, type(None), list, dict, set, tuple)
LARGE = 4096
"""Containers with more items than this are not compared whenever a microbatch ends or waits."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Values that do not change, and are cheap to send."""


_NOTHING_INSIDE = {*PLAIN, torch.Tensor}


class StandIn:
    """Is in a class for an attribute whose objects are looked at.

    Attributes:
        default: What the class has.
    """

    default: Any


class Held:
    """Stands for an object in a variable or an attribute of a class: the object
    itself does not go to another rank.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __reduce__(self) -> str:
        """Go to another rank as an object of this one."""
        return "ELSEWHERE"


ELSEWHERE = Held()
"""An object that is on another rank."""


class Names:
    """Variables of a Python module, or attributes of a class, as a container.

    Attributes:
        holder: The variables of a Python module, or a class.
        names: The names.
    """

    def __init__(self, holder: Any, names: frozenset[str]) -> None:
        self.holder, self.names = holder, sorted(names)
        self._held: dict[int, Held] = {}

    def get(self) -> dict[str, Any]:
        """Return the values.

        One of a kind that cannot go to another rank is ``Held``. Code stays, and is left out.
        """
        space = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        found: dict[str, Any] = {}
        held: dict[int, Held] = {}
        for name in self.names:
            value = space.get(name, self)
            value = value.default if isinstance(value, StandIn) else value
            if isinstance(value, (*_VALUES, torch.Tensor)):
                found[name] = value
            elif _is_object(value):
                found[name] = held[id(value)] = self._held.get(id(value)) or Held(value)
        self._held = held
        return found

    def put(self, value: dict[str, Any]) -> None:
        """Set the values, and delete the names that have none."""
        for name in self.get().keys() - value.keys():
            if isinstance(self.holder, dict):
                self.holder.pop(name)
            else:
                delattr(self.holder, name)
        for name, each in value.items():
            if isinstance(each, Held):
                self._held[id(each.value)] = each
            self._set(name, each.value if isinstance(each, Held) else each)

    def settled(self, value: dict[str, Any]) -> dict[str, Any] | None:
        """Return values of another rank, with objects of this one in the place
        of those that stayed there.

        Returns:
            The values; None: this rank has no such object.
        """
        now = self.get()
        found = {name: now.get(name) if each is ELSEWHERE else each for name, each in value.items()}
        stayed = [name for name, each in value.items() if each is ELSEWHERE]
        return found if all(isinstance(found[name], Held) for name in stayed) else None

    def _set(self, name: str, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[name] = value
        elif isinstance(there := vars(self.holder).get(name), StandIn):
            there.default = value
        else:
            setattr(self.holder, name, value)


def _is_object(value: Any) -> bool:
    """Return whether a value is an object that has a state, and neither code
    nor of this library.
    """
    kind: Any = type(value)
    if isinstance(value, WHOLE) or kind.__module__.partition(".")[0] in (
        "builtins",
        "smdistributed",
    ):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(_slots(kind))


class Settings:
    """The plain attributes of an object of an installed class, as a container.

    Such an object may be a configuration, whose values a caller sets for a module that it calls. It
    may also be a writer with open files: so nothing else of it is looked at, and the object itself
    does not go to another rank.
    """

    known: ClassVar[dict[int, Settings | Local | Written]] = {}
    """Those of the present step, by the identity of the object."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    @classmethod
    def of(cls, holder: Any) -> Any:
        """Return the one of an object: the same one until the step ends."""
        found = cls.known.get(id(holder))
        if found is None:
            found = cls.known[id(holder)] = cls(holder)
        return found

    def _spaces(self) -> list[dict[Any, Any]]:
        own = self.holder
        return [own.__dict__, own] if isinstance(own, dict) else [own.__dict__]

    def get(self) -> dict[tuple[int, Any], Any]:
        """Return the plain values, by the dictionary that has them (the
        attributes, or the items) and by name.
        """
        found = {}
        for number, space in enumerate(self._spaces()):
            for name, each in dict.items(space):
                if isinstance(each, PLAIN):
                    found[number, name] = each
        return found

    def put(self, value: dict[tuple[int, Any], Any]) -> None:
        """Set the values, and delete the plain ones that are not among them."""
        spaces = self._spaces()
        for number, name in self.get().keys() - value.keys():
            dict.__delitem__(spaces[number], name)
        for (number, name), each in value.items():
            dict.__setitem__(spaces[number], name, each)


class Local:
    """What a ``threading.local`` has on the thread that asks, as a container."""

    def __init__(self, holder: threading.local) -> None:
        self.holder = holder

    @classmethod
    def of(cls, holder: threading.local) -> Any:
        """Return the one of an object: the same one until the step ends."""
        found = Settings.known.get(id(holder))
        if found is None:
            found = Settings.known[id(holder)] = cls(holder)
        return found

    def get(self) -> dict[str, Any]:
        """Return the values of this thread."""
        return dict(self.holder.__dict__)

    def put(self, value: dict[str, Any]) -> None:
        """Set the values of this thread, and delete all others."""
        own = self.holder.__dict__
        own.clear()
        own.update(value)


class Written:
    """What is in a tensor, an array or a bytearray, as a container."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self._state: Any = None
        self._content: dict[str, Any] = {}

    @classmethod
    def of(cls, holder: Any) -> Any:
        """Return the one of an object: the same one until the step ends."""
        found = Settings.known.get(id(holder))
        if found is None:
            found = Settings.known[id(holder)] = cls(holder)
        return found

    def get(self) -> dict[str, Any]:
        """Return a copy of the values: the same one until they are written."""
        now = state(self.holder)
        if not self._content or now != self._state:
            self._state, self._content = now, {"value": _copied(self.holder)}
        return dict(self._content)

    def put(self, value: dict[str, Any]) -> None:
        """Write the values."""
        assign(self.holder, value["value"])
        self._state, self._content = state(self.holder), dict(value)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.copy(leaf)


def held(cell: Any) -> Any:
    """Return the object that a container stands for."""
    return cell.holder if isinstance(cell, Settings | Local | Written) else cell


def has_settings(value: Any) -> bool:
    """Return whether an object of an installed class has attributes that are
    the same in all threads.
    """
    unlike = (*_LEAVES, threading.local, contextlib.AbstractContextManager)
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, unlike)


def _nested(value: Any) -> list[Any]:
    """Return what of an object of an installed class is looked at, too: parts
    of a configuration, and plain data.
    """
    if isinstance(value, dict):
        return list(dict.values(value))
    parts = isinstance(value, collections.abc.Mapping | collections.abc.Sequence)
    inner = (dict, list, collections.abc.Mapping, collections.abc.Sequence)
    found = []
    for each in vars(value).values():
        if parts and isinstance(each, inner):
            found.append(each)
        elif type(each) in BUILTIN:
            # A writer has lists of files and of other writers. Such a list is
            # left alone, as the writer is.
            if _is_data(each, 0):
                found.append(each)
        elif has_settings(each) and _are_alike(type(each), type(value)):
            found.append(each)
    return found


def _is_data(value: Any, depth: int) -> bool:
    """Return whether a container has only plain values, tensors, arrays and
    other such containers in it.
    """
    if isinstance(value, types.SimpleNamespace) or depth > _DATA_DEPTH:
        return False
    inside = value.values() if isinstance(value, dict) else value
    for kind in set(map(type, inside)) - set(PLAIN):
        if (
            kind not in BUILTIN
            and not issubclass(kind, torch.Tensor)
            and kind.__name__ != "ndarray"
        ):
            return False
    return all(_is_data(each, depth + 1) for each in inside if type(each) in BUILTIN)


def _are_alike(one: type, other: type) -> bool:
    """Return whether two classes have a base of their own in common, as the
    parts of a configuration have.
    """
    return any(base in one.__mro__ for base in other.__mro__[:-1] if base not in (dict, list))


def content(cell: Any) -> Any:
    """Return what is in a container now: a list or a dictionary."""
    if isinstance(cell, Names | Settings | Local | Written):
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
        return all(map(operator.is_, one, other))
    return all(map(operator.is_, one.values(), other.values())) and list(one) == list(other)


def before(each: Any) -> Any:
    """Return what is in a tensor or a container now, so that ``changed`` can
    tell whether that was written.
    """
    return each._version if isinstance(each, torch.Tensor) else content(each)  # noqa: SLF001


def changed(each: Any, then: Any) -> bool:
    """Return whether a tensor or a container was written since ``before`` returned this."""
    now = before(each)
    return bool(now != then) if isinstance(each, torch.Tensor) else not same(now, then)


def writable(leaf: Any) -> bool:
    """Return whether ``assign`` can put the ``value`` of one leaf into another: arrays, and
    generators of numbers.
    """
    kinds = (torch.Generator, random.Random, bytearray)
    return (
        isinstance(leaf, kinds)
        or hasattr(leaf, "bit_generator")
        or type(leaf).__name__ == "ndarray"
    )


def value(leaf: Any) -> Any:
    """Return what a writable leaf has in it."""
    if isinstance(leaf, torch.Generator):
        return leaf.get_state()
    if isinstance(leaf, random.Random):
        return leaf.getstate()
    return leaf.bit_generator.state if hasattr(leaf, "bit_generator") else copy.copy(leaf)


def assign(cell: Any, value: Any) -> None:
    """Put another content into a container, or into a leaf that is writable."""
    if isinstance(cell, Names | Settings | Local | Written):
        cell.put(value)
    elif isinstance(cell, torch.Tensor):
        with torch.no_grad():
            cell.copy_(value)
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
        target.update(
            {name: value[name] for name in value if name not in slots} if slots else value
        )


def cells(value: Any, package: str = "") -> Iterator[Any]:
    """Yield the containers in a value, each once.

    A copy of the value yields its own in the same order.

    Args:
        value: The value.
        package: Of objects of other installed packages, such as a configuration, a log or a writer,
            only plain attributes are looked at; empty: they are as all others.
    """
    if isinstance(value, WHOLE):
        return
    seen: set[int] = set()
    todo = [iter([value])]
    while todo:
        each = next(todo[-1], todo)
        if each is todo:
            todo.pop()
            continue
        if isinstance(each, WHOLE) or id(each) in seen:
            continue
        seen.add(id(each))
        kind: Any = type(each)
        if kind is Names:
            yield each
        elif isinstance(each, threading.local):
            if package:  # one among the arguments of a call is that of the caller's thread
                yield Local.of(each)
        elif package and kind not in BUILTIN and foreign(kind, package):
            if has_settings(each):
                yield Settings.of(each)
                todo.append(iter(_nested(each)))
        elif isinstance(each, tuple):
            todo.append(iter(each))
        elif isinstance(each, set):
            yield each
        elif isinstance(each, (*_SEQUENCES, dict)):
            yield each
            inside = list(items(content(each)))
            if len(inside) <= LARGE or not set(map(type, inside)) <= _NOTHING_INSIDE:
                todo.append(iter(inside))
        elif isinstance(getattr(each, "__dict__", None), dict) or _slots(kind):
            yield each
            todo.append(iter(list(_state(each).values())))


def leaves(value: Any, package: str) -> Iterator[Any]:
    """Yield what is in a value that is no container, and can be written in place."""
    if is_leaf(value):
        yield value
    for cell in cells(value, package):
        # Of an object of an installed class only plain attributes are its content.
        inside = vars(cell.holder).values() if isinstance(cell, Settings) else items(content(cell))
        for item in inside:
            if is_leaf(item):
                yield item


def is_leaf(value: Any) -> bool:
    """Return whether a value is no container, and can be written in place."""
    kind: Any = type(value)
    iterates = hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
    return iterates or isinstance(value, _LEAVES) or kind.__module__.partition(".")[0] == "numpy"


def state(leaf: Any) -> Any:
    """Return what changes when a leaf is written, as far as that can be seen without much work."""
    if isinstance(leaf, torch.Tensor):
        # torch does not count what is written to a tensor's `data`.
        small = (
            not leaf.requires_grad and leaf.layout is torch.strided and 0 < leaf.numel() <= _SMALL
        )
        total = (
            leaf.detach().sum(dtype=torch.float64).item() if small and leaf.dtype in _SUMMED else 0
        )
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
        # May have moved on.
        return operator.length_hint(leaf, -1) if hasattr(leaf, "__length_hint__") else object()
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
    file = (
        getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        if kind.__module__ != "__main__"
        else "."
    )
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
