"""Containers that a module may write to: what is in them, whether that changed,
and how the change goes to a copy.
"""

from __future__ import annotations

import array
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
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
    array.array,
)
LARGEST = 1 << 26
"""Bytes of an array or a tensor. What is written to a larger one without a word is not seen."""
_STDLIB = sysconfig.get_path("stdlib")
_VALUES = (bool, int, float, complex, str, bytes, type(None), list, dict, set, tuple)
LARGE = 4096
"""Containers with more items than this are not compared whenever a microbatch ends or waits."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Values that do not change, and are cheap to send."""

ATOMS = frozenset(PLAIN)
"""The same, to be asked for the type of a value: a subclass may have attributes."""
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
        space = self._space()
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
            self._delete(name)
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

    def _space(self) -> Mapping[str, Any]:
        return self.holder if isinstance(self.holder, dict) else vars(self.holder)

    def _delete(self, name: str) -> None:
        if isinstance(self.holder, dict):
            self.holder.pop(name)
        else:
            delattr(self.holder, name)

    def _set(self, name: str, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[name] = value
        elif isinstance(there := vars(self.holder).get(name), StandIn):
            there.default = value
        else:
            setattr(self.holder, name, value)


class Enclosed(Names):
    """A variable of an outer function, as a container."""

    holder: types.CellType

    def __init__(self, holder: types.CellType, name: str) -> None:
        super().__init__(holder, frozenset([name]))

    def _space(self) -> Mapping[str, Any]:
        value = content_of(self.holder)
        return {} if value is UNSET else {self.names[0]: value}

    def _delete(self, name: str) -> None:  # noqa: ARG002  there is but one
        del self.holder.cell_contents

    def _set(self, name: str, value: Any) -> None:  # noqa: ARG002  there is but one
        self.holder.cell_contents = value


UNSET = type("Unset", (), {})
"""In the place of the value of a variable that has none yet."""


def content_of(cell: types.CellType) -> Any:
    """Return the value of a variable of an outer function."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNSET


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
    model: ClassVar[set[int]] = set()
    """The identities of the modules of the model. Another module is an object like others."""

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
        now = state(self.holder, self._state)
        if not self._content or now is not self._state:
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


def is_outside(value: Any) -> bool:
    """Return whether a value is a module that is not of the model, such as a teacher in a list."""
    if not isinstance(value, torch.nn.Module) or id(value) in Settings.model:
        return False
    return type(value).__module__.partition(".")[0] != "smdistributed"


_OF_TORCH = frozenset(torch.nn.Module().__dict__)
"""Attributes of a module that are torch's."""


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
            if _is_data(each):
                found.append(each)
        elif has_settings(each) and _are_alike(type(each), type(value)):
            found.append(each)
    return found


def _is_data(value: Any) -> bool:
    """Return whether a container has only plain values, tensors, arrays and
    other such containers in it.
    """
    seen: set[int] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, types.SimpleNamespace):
            return False
        inside = each.values() if isinstance(each, dict) else each
        kinds: set[Any] = set(map(type, inside))
        for kind in kinds - {*PLAIN, *BUILTIN}:
            if not issubclass(kind, torch.Tensor) and not _is_array_kind(kind):
                return False
        todo += [item for item in inside if type(item) in BUILTIN]
    return True


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
    kinds = (torch.Generator, random.Random, bytearray, array.array)
    return isinstance(leaf, kinds) or hasattr(leaf, "bit_generator") or is_array(leaf)


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
    elif isinstance(cell, bytearray | array.array):
        cell[:] = value
    elif is_array(cell):
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
    if type(value) in ATOMS:
        return
    seen: set[int] = set()
    todo = [iter([value])]
    while todo:
        each = next(todo[-1], todo)
        if each is todo:
            todo.pop()
            continue
        kind: Any = type(each)
        if kind in ATOMS or id(each) in seen or _is_array_kind(kind):
            continue
        seen.add(id(each))
        if package and is_outside(each):
            yield Settings.of(each)
            todo.append(
                iter([value for name, value in vars(each).items() if name not in _OF_TORCH])
            )
            todo.append(iter(list(vars(each)["_modules"].values())))
            continue
        if isinstance(each, WHOLE):
            continue
        if isinstance(each, Names):
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
        inside = list(items(content(cell)))
        if isinstance(cell, Settings):
            inside = list(vars(cell.holder).values())
            if isinstance(cell.holder, torch.nn.Module):
                inside += cell.holder._buffers.values()  # noqa: SLF001
                inside += cell.holder._parameters.values()  # noqa: SLF001
        for item in inside:
            if is_leaf(item):
                yield item


def is_leaf(value: Any) -> bool:
    """Return whether a value is no container, and can be written in place."""
    kind: Any = type(value)
    if kind in ATOMS:
        return False
    iterates = hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
    of_numpy = kind.__module__.partition(".")[0] == "numpy" or is_array(value)
    return iterates or isinstance(value, _LEAVES) or of_numpy


def is_array(value: Any) -> bool:
    """Return whether a value is one of numpy's arrays."""
    kind: Any = type(value)
    return _is_array_kind(kind)


@functools.lru_cache(4096)
def _is_array_kind(kind: Any) -> bool:
    bases = [(base.__module__, base.__name__) for base in kind.__mro__]
    return ("numpy", "ndarray") in bases


def state(leaf: Any, then: Any = None, limit: int | None = None) -> Any:
    """Return what is another object after a leaf was written.

    Args:
        leaf: The leaf.
        then: What this returned before. The same object comes back if nothing was written.
        limit: The bytes of an array or a tensor above which its values are not compared.
    """
    if isinstance(leaf, torch.Tensor):
        return _state_of_tensor(leaf, then, limit)
    if is_array(leaf):
        return _state_of_array(leaf, then, limit)
    if is_buffer(leaf) and limit is not None and size(leaf) > limit:
        return None
    now = _state_of_other(leaf)
    return then if then == now else now


def is_buffer(leaf: Any) -> bool:
    """Return whether a leaf has values that nothing counts the writes of."""
    return isinstance(leaf, bytearray | array.array) or is_array(leaf)


def is_constant(values: Any) -> bool:
    """Return whether an array cannot be written, and is no view of one that can."""
    return is_array(values) and not values.flags.writeable and not is_array(values.base)


def size(leaf: Any) -> int:
    """Return the bytes of a tensor, an array or a bytearray."""
    if isinstance(leaf, torch.Tensor):
        return leaf.numel() * leaf.element_size()
    return memoryview(leaf).nbytes if not is_array(leaf) else int(leaf.nbytes)


def _state_of_tensor(tensor: torch.Tensor, then: Any, limit: int | None) -> Any:
    """Return the version of a tensor, and a copy of its values: torch does not
    count what is written to a tensor's `data`.
    """
    version = None if tensor.is_inference() else tensor._version  # noqa: SLF001
    if not _has_values(tensor) or (limit is not None and size(tensor) > limit):
        now = (version, None)
        return then if then == now else now
    if then is not None and then[0] == version and _are_same_bits(tensor, then[1]):
        return then
    return version, tensor.detach().clone()


def _has_values(tensor: torch.Tensor) -> bool:
    if tensor.requires_grad or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _are_same_bits(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same values; a NaN is the same as itself."""
    if other is None or one.dtype != other.dtype:
        return False
    one, other = one.detach(), other.detach()
    if one.is_complex():
        one, other = (
            torch.view_as_real(one.resolve_conj()),
            torch.view_as_real(other.resolve_conj()),
        )
    kind = _OF_WIDTH[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))


def _state_of_array(values: Any, then: Any, limit: int | None) -> Any:
    """Return a copy of the values of one of numpy's arrays."""
    if is_constant(values) or (limit is not None and values.nbytes > limit):
        return None
    numpy = sys.modules["numpy"]
    kind = values.shape, values.dtype
    if values.dtype.hasobject:
        objects = list(values.flat)
        if then is not None and then[0] == kind and same(then[1], objects):
            return then
        return kind, objects
    octets = numpy.ascontiguousarray(values).reshape(-1).view(numpy.uint8)
    if then is not None and then[0] == kind and numpy.array_equal(then[1], octets):
        return then
    return kind, octets.copy()


def _state_of_other(leaf: Any) -> Any:
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
        return memoryview(leaf).tobytes()
    except (TypeError, ValueError):
        return None


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
