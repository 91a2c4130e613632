"""Read, compare and write the contents of containers and other objects that modules may write to.

A container has a content: a list of items, or a dictionary. Contents are compared by the identity
of their items. An object that is no container and can be written in place, such as a tensor, an
array or a generator, is a leaf. A leaf has a state: an object that stays the same while the leaf is
not written.
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
UNOPENED = (
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
"""Classes of values that are never searched for containers."""

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
"""Largest size in bytes of an array or a tensor with compared values. Writes that nothing counts
are not found in larger ones.
"""
_STDLIB = sysconfig.get_path("stdlib")
_VALUES = (bool, int, float, complex, str, bytes, type(None), list, dict, set, tuple)
LARGE = 4096
"""Number of items. Containers with more items are not compared whenever a microbatch ends or waits.
"""
PLAIN_CLASSES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Values that do not change, and are cheap to send."""

ATOMS = frozenset(PLAIN_CLASSES)
"""The same classes, for a test of the exact type: an object of a subclass may have attributes."""
_NOTHING_INSIDE = {*PLAIN_CLASSES, torch.Tensor}


class StandIn:
    """A descriptor in a class, in the place of an attribute with observed reads.

    Attributes:
        default: The value of the attribute in the class.
    """

    default: Any


class Held:
    """Stands for an object in a variable or in an attribute of a class.

    The object itself does not go to another rank.

    Attributes:
        value: The object.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __reduce__(self) -> str:
        """Pickle as `ELSEWHERE`."""
        return "ELSEWHERE"


ELSEWHERE = Held()
"""An object that is on another rank."""


class Names:
    """Variables of a Python module, or attributes of a class, as a container.

    Attributes:
        holder: The variables of a Python module as a dictionary, or a class.
        names: The names of the variables or attributes, sorted.
    """

    def __init__(self, holder: Any, names: frozenset[str]) -> None:
        self.holder, self.names = holder, sorted(names)
        self._held: dict[int, Held] = {}

    def get(self) -> dict[str, Any]:
        """Return the values, by name.

        An object that cannot go to another rank is a ``Held``. Code is left out.
        """
        namespace = self._namespace()
        values: dict[str, Any] = {}
        held_objects: dict[int, Held] = {}  # the same ``Held`` stands for an object every time
        for name in self.names:
            value = namespace.get(name, self)
            if isinstance(value, StandIn):
                value = value.default
            if isinstance(value, (*_VALUES, torch.Tensor)):
                values[name] = value
            elif _is_object(value):
                held_object = self._held.get(id(value)) or Held(value)
                values[name] = held_objects[id(value)] = held_object
        self._held = held_objects
        return values

    def put(self, values: dict[str, Any]) -> None:
        """Set the values, and delete the names without a value."""
        for name in self.get().keys() - values.keys():
            self._delete(name)
        for name, value in values.items():
            if isinstance(value, Held):
                self._held[id(value.value)] = value
                self._set(name, value.value)
            else:
                self._set(name, value)

    def settled(self, values: dict[str, Any]) -> dict[str, Any] | None:
        """Return values of another rank, with objects of this rank in the place of the objects
        that stayed on the other one.

        Returns:
            The values; None if this rank has no such object.
        """
        own_values = self.get()
        settled = {}
        for name, value in values.items():
            settled[name] = value
            if value is ELSEWHERE:
                settled[name] = own_values.get(name)
                if not isinstance(settled[name], Held):
                    return None
        return settled

    def _namespace(self) -> Mapping[str, Any]:
        return self.holder if isinstance(self.holder, dict) else vars(self.holder)

    def _delete(self, name: str) -> None:
        if isinstance(self.holder, dict):
            self.holder.pop(name)
        else:
            delattr(self.holder, name)

    def _set(self, name: str, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[name] = value
            return
        descriptor = vars(self.holder).get(name)
        if isinstance(descriptor, StandIn):
            descriptor.default = value
        else:
            setattr(self.holder, name, value)


class Enclosed(Names):
    """A variable of an outer function, as a container."""

    holder: types.CellType

    def __init__(self, holder: types.CellType, name: str) -> None:
        super().__init__(holder, frozenset([name]))

    def _namespace(self) -> Mapping[str, Any]:
        value = content_of(self.holder)
        if value is UNSET:
            return {}
        return {self.names[0]: value}

    def _delete(self, name: str) -> None:  # noqa: ARG002  there is a single name
        del self.holder.cell_contents

    def _set(self, name: str, value: Any) -> None:  # noqa: ARG002  there is a single name
        self.holder.cell_contents = value


UNSET = type("Unset", (), {})
"""The value of a variable before its first assignment."""


def content_of(cell: types.CellType) -> Any:
    """Return the value of a variable of an outer function; UNSET before its first assignment."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNSET


def _is_object(value: Any) -> bool:
    """Return whether a value is an object with attributes, and neither code nor of this library."""
    kind: Any = type(value)
    if isinstance(value, UNOPENED):
        return False
    if kind.__module__.partition(".")[0] in ("builtins", "smdistributed"):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(_slots(kind))


class Settings:
    """The plain attributes of an object of an installed class, as a container.

    Such an object may be a configuration: a caller sets its values for a module that it calls. The
    object may also be a writer with open files. So only plain attributes are compared and sent, and
    the object itself does not go to another rank.
    """

    known: ClassVar[dict[int, Settings | Local | Written]] = {}
    """``id()`` of an object -> its container in the present step."""
    model: ClassVar[set[int]] = set()
    """``id()`` of the modules of the model. Another module is an object like others."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    @classmethod
    def of(cls, holder: Any) -> Any:
        """Return the container of an object: the same container until the step ends."""
        container = cls.known.get(id(holder))
        if container is None:
            container = cls.known[id(holder)] = cls(holder)
        return container

    def _namespaces(self) -> list[dict[Any, Any]]:
        """Return the attributes, and the items of a dictionary."""
        own = self.holder
        if isinstance(own, dict):
            return [own.__dict__, own]
        return [own.__dict__]

    def get(self) -> dict[tuple[int, Any], Any]:
        """Return the plain values.

        Returns:
            (0 for an attribute or 1 for an item, name) -> value.
        """
        values = {}
        for number, namespace in enumerate(self._namespaces()):
            for name, value in dict.items(namespace):
                if isinstance(value, PLAIN_CLASSES):
                    values[number, name] = value
        return values

    def put(self, values: dict[tuple[int, Any], Any]) -> None:
        """Set the values, and delete the other plain ones."""
        namespaces = self._namespaces()
        for number, name in self.get().keys() - values.keys():
            dict.__delitem__(namespaces[number], name)
        for (number, name), value in values.items():
            dict.__setitem__(namespaces[number], name, value)


class Local:
    """The values of a ``threading.local`` on the present thread, as a container."""

    def __init__(self, holder: threading.local) -> None:
        self.holder = holder

    @classmethod
    def of(cls, holder: threading.local) -> Any:
        """Return the container of an object: the same container until the step ends."""
        container = Settings.known.get(id(holder))
        if container is None:
            container = Settings.known[id(holder)] = cls(holder)
        return container

    def get(self) -> dict[str, Any]:
        """Return the values of this thread."""
        return dict(self.holder.__dict__)

    def put(self, value: dict[str, Any]) -> None:
        """Set the values of this thread, and delete all others."""
        own = self.holder.__dict__
        own.clear()
        own.update(value)


class Written:
    """The values of a tensor, an array or a bytearray, as a container."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self._state: Any = None
        self._content: dict[str, Any] = {}

    @classmethod
    def of(cls, holder: Any) -> Any:
        """Return the container of an object: the same container until the step ends."""
        container = Settings.known.get(id(holder))
        if container is None:
            container = Settings.known[id(holder)] = cls(holder)
        return container

    def get(self) -> dict[str, Any]:
        """Return a copy of the values: the same copy until the object is written."""
        new_state = state(self.holder, self._state)
        if not self._content or new_state is not self._state:
            self._state = new_state
            self._content = {"value": _copied(self.holder)}
        return dict(self._content)

    def put(self, value: dict[str, Any]) -> None:
        """Write the values."""
        assign(self.holder, value["value"])
        self._state, self._content = state(self.holder), dict(value)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return copy.copy(leaf)


def held(cell: Any) -> Any:
    """Return the object that a container stands for; other containers themselves."""
    if isinstance(cell, Settings | Local | Written):
        return cell.holder
    return cell


def is_outside(value: Any) -> bool:
    """Return whether a value is a module of another model, such as a teacher in a list."""
    if not isinstance(value, torch.nn.Module) or id(value) in Settings.model:
        return False
    return type(value).__module__.partition(".")[0] != "smdistributed"


_OF_TORCH = frozenset(torch.nn.Module().__dict__)
"""Attributes of a module that are torch's."""


def has_settings(value: Any) -> bool:
    """Return whether an object of an installed class has attributes, equal in all threads."""
    others = (*_LEAVES, threading.local, contextlib.AbstractContextManager)
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, others)


def _nested(value: Any) -> list[Any]:
    """Return the parts of an object of an installed class that are searched for containers.

    They are parts of a configuration, and plain data.
    """
    if isinstance(value, dict):
        return list(dict.values(value))
    is_collection = isinstance(value, collections.abc.Mapping | collections.abc.Sequence)
    collection_kinds = (dict, list, collections.abc.Mapping, collections.abc.Sequence)
    parts = []
    for attribute in vars(value).values():
        if is_collection and isinstance(attribute, collection_kinds):
            parts.append(attribute)
        elif type(attribute) in BUILTIN:
            # A writer has lists of files and of other writers. Such a list is left alone, as the
            # writer is.
            if _is_data(attribute):
                parts.append(attribute)
        elif has_settings(attribute) and _have_common_base(type(attribute), type(value)):
            parts.append(attribute)
    return parts


def _is_data(value: Any) -> bool:
    """Return whether a container has only plain values, tensors, arrays and containers of these."""
    visited: set[int] = set()
    to_visit = [value]
    while to_visit:
        container = to_visit.pop()
        if id(container) in visited:
            continue
        visited.add(id(container))
        if isinstance(container, types.SimpleNamespace):
            return False
        members = container.values() if isinstance(container, dict) else container
        kinds: set[Any] = set(map(type, members))
        for kind in kinds - {*PLAIN_CLASSES, *BUILTIN}:
            if not issubclass(kind, torch.Tensor) and not _is_array_kind(kind):
                return False
        to_visit += [member for member in members if type(member) in BUILTIN]
    return True


def _have_common_base(one: type, other: type) -> bool:
    """Return whether two classes have a base in common, as the parts of a configuration have.

    ``object``, ``dict`` and ``list`` do not count.
    """
    return any(base in one.__mro__ for base in other.__mro__[:-1] if base not in (dict, list))


def content(cell: Any) -> Any:
    """Return the present content of a container: a list or a dictionary."""
    if isinstance(cell, Names | Settings | Local | Written):
        return cell.get()
    if isinstance(cell, _SEQUENCES):
        return list(cell)
    if isinstance(cell, set):
        return dict.fromkeys(cell)
    if isinstance(cell, dict):
        return dict(dict.items(cell))  # the methods of a subclass may have effects
    return _attributes(cell)


def same(one: Any, other: Any) -> bool:
    """Return whether two contents have the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, list):
        return all(map(operator.is_, one, other))
    return all(map(operator.is_, one.values(), other.values())) and list(one) == list(other)


def before(item: Any) -> Any:
    """Return the version of a tensor, or the content of a container, for a later ``changed``."""
    if isinstance(item, torch.Tensor):
        return item._version  # noqa: SLF001
    return content(item)


def changed(item: Any, earlier: Any) -> bool:
    """Return whether a tensor or a container was written since ``before`` returned ``earlier``."""
    now = before(item)
    if isinstance(item, torch.Tensor):
        return bool(now != earlier)
    return not same(now, earlier)


def writable(leaf: Any) -> bool:
    """Return whether ``assign`` can put the ``value`` of one leaf into another.

    So it is for arrays and generators of random numbers.
    """
    kinds = (torch.Generator, random.Random, bytearray, array.array)
    return isinstance(leaf, kinds) or hasattr(leaf, "bit_generator") or is_array(leaf)


def value(leaf: Any) -> Any:
    """Return the values of a writable leaf, or the state of a generator."""
    if isinstance(leaf, torch.Generator):
        return leaf.get_state()
    if isinstance(leaf, random.Random):
        return leaf.getstate()
    if hasattr(leaf, "bit_generator"):
        return leaf.bit_generator.state
    return copy.copy(leaf)


def assign(cell: Any, value: Any) -> None:
    """Put another content into a container, or another value into a writable leaf."""
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
        _assign_attributes(cell, value)


def _assign_attributes(cell: Any, value: Mapping[str, Any]) -> None:
    """Replace the items of a dictionary or set, or the attributes of an object."""
    if isinstance(cell, dict | set):
        cell.clear()
        cell.update(value)
        return
    kind: Any = type(cell)
    slots = _slots(kind)
    for name in slots:
        if name in value:
            object.__setattr__(cell, name, value[name])
        elif hasattr(cell, name):
            object.__delattr__(cell, name)
    attributes = getattr(cell, "__dict__", {})
    attributes.clear()
    attributes.update((name, item) for name, item in value.items() if name not in slots)


def cells(value: Any, package: str = "") -> Iterator[Any]:
    """Yield the containers in a value, each once.

    A copy of the value yields its own containers in the same order.

    Args:
        value: The value.
        package: Name of a package. Of objects of other installed packages, such as a configuration,
            a log or a writer, only the plain attributes are a container. Empty: objects of all
            packages are treated alike.
    """
    if type(value) in ATOMS:
        return
    visited: set[int] = set()
    # A stack of iterators: depth first, in the order of the items.
    to_visit = [iter([value])]
    while to_visit:
        item = next(to_visit[-1], to_visit)
        if item is to_visit:
            to_visit.pop()
            continue
        kind: Any = type(item)
        if kind in ATOMS or id(item) in visited or _is_array_kind(kind):
            continue
        visited.add(id(item))
        if package and is_outside(item):
            yield Settings.of(item)
            own_attributes = [
                attribute for name, attribute in vars(item).items() if name not in _OF_TORCH
            ]
            to_visit.append(iter(own_attributes))
            to_visit.append(iter(list(vars(item)["_modules"].values())))
            continue
        if isinstance(item, UNOPENED):
            continue
        if isinstance(item, Names):
            yield item
        elif isinstance(item, threading.local):
            # Among the arguments of a call it belongs to the caller's thread.
            if package:
                yield Local.of(item)
        elif package and kind not in BUILTIN and foreign(kind, package):
            if has_settings(item):
                yield Settings.of(item)
                to_visit.append(iter(_nested(item)))
        elif isinstance(item, tuple):
            to_visit.append(iter(item))
        elif isinstance(item, set):
            yield item
        elif isinstance(item, (*_SEQUENCES, dict)):
            yield item
            members = list(items(content(item)))
            if len(members) <= LARGE or not set(map(type, members)) <= _NOTHING_INSIDE:
                to_visit.append(iter(members))
        elif isinstance(getattr(item, "__dict__", None), dict) or _slots(kind):
            yield item
            to_visit.append(iter(list(_attributes(item).values())))


def leaves(value: Any, package: str) -> Iterator[Any]:
    """Yield the leaves in a value: objects that are no containers and can be written in place."""
    if is_leaf(value):
        yield value
    for cell in cells(value, package):
        members = list(items(content(cell)))
        if isinstance(cell, Settings):
            # The content of these has only plain attributes.
            members = list(vars(cell.holder).values())
            if isinstance(cell.holder, torch.nn.Module):
                members += cell.holder._buffers.values()  # noqa: SLF001
                members += cell.holder._parameters.values()  # noqa: SLF001
        for member in members:
            if is_leaf(member):
                yield member


def is_leaf(value: Any) -> bool:
    """Return whether a value is no container, and can be written in place."""
    kind: Any = type(value)
    if kind in ATOMS:
        return False
    if isinstance(value, _LEAVES) or is_array(value):
        return True
    if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
        return True
    return bool(kind.__module__.partition(".")[0] == "numpy")


def is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy."""
    kind: Any = type(value)
    return _is_array_kind(kind)


@functools.lru_cache(4096)
def _is_array_kind(kind: Any) -> bool:
    bases = [(base.__module__, base.__name__) for base in kind.__mro__]
    return ("numpy", "ndarray") in bases


def state(leaf: Any, earlier: Any = None, limit: int | None = None) -> Any:
    """Return the state of a leaf: another object after each write to the leaf.

    Args:
        leaf: The leaf.
        earlier: An earlier state. This object is returned if the leaf was not written since.
        limit: Largest size in bytes of an array or a tensor with compared values; None: no limit.
    """
    if isinstance(leaf, torch.Tensor):
        return _state_of_tensor(leaf, earlier, limit)
    if is_array(leaf):
        return _state_of_array(leaf, earlier, limit)
    if is_buffer(leaf) and limit is not None and size(leaf) > limit:
        return None
    now = _state_of_other(leaf)
    if earlier == now:
        return earlier
    return now


def is_buffer(leaf: Any) -> bool:
    """Return whether a leaf has values that are written without a count of the writes."""
    return isinstance(leaf, bytearray | array.array) or is_array(leaf)


def is_constant(values: Any) -> bool:
    """Return whether an array is read-only, and no view of a writable one."""
    return is_array(values) and not values.flags.writeable and not is_array(values.base)


def size(leaf: Any) -> int:
    """Return the size of a tensor, an array or a bytearray in bytes."""
    if isinstance(leaf, torch.Tensor):
        return leaf.numel() * leaf.element_size()
    if is_array(leaf):
        return int(leaf.nbytes)
    return memoryview(leaf).nbytes


def _state_of_tensor(tensor: torch.Tensor, earlier: Any, limit: int | None) -> Any:
    """Return the version of a tensor, and a copy of its values.

    The copy is needed because torch does not count writes to a tensor's `data`.
    """
    version = None if tensor.is_inference() else tensor._version  # noqa: SLF001
    if not _has_values(tensor) or (limit is not None and size(tensor) > limit):
        now = (version, None)
        if earlier == now:
            return earlier
        return now
    if earlier is not None and earlier[0] == version and _are_same_bits(tensor, earlier[1]):
        return earlier
    return version, tensor.detach().clone()


def _has_values(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor can be compared."""
    if tensor.requires_grad or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _are_same_bits(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same values; a NaN is equal to itself."""
    if other is None or one.dtype != other.dtype:
        return False
    one, other = one.detach(), other.detach()
    if one.is_complex():
        one = torch.view_as_real(one.resolve_conj())
        other = torch.view_as_real(other.resolve_conj())
    integers = _OF_WIDTH[one.element_size()]
    return torch.equal(one.view(integers), other.view(integers))


def _state_of_array(values: Any, earlier: Any, limit: int | None) -> Any:
    """Return the shape and type of an array of numpy, and a copy of its values."""
    if is_constant(values) or (limit is not None and values.nbytes > limit):
        return None
    numpy = sys.modules["numpy"]
    kind = values.shape, values.dtype
    if values.dtype.hasobject:
        objects = list(values.flat)
        if earlier is not None and earlier[0] == kind and same(earlier[1], objects):
            return earlier
        return kind, objects
    octets = numpy.ascontiguousarray(values).reshape(-1).view(numpy.uint8)
    if earlier is not None and earlier[0] == kind and numpy.array_equal(earlier[1], octets):
        return earlier
    return kind, octets.copy()


def _state_of_other(leaf: Any) -> Any:
    """Return the state of a leaf that is no tensor and no array. Equal states: not written."""
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
        if frame is None:
            return None
        return frame.f_lasti, [*map(_mark, frame.f_locals.values())]
    if hasattr(type(leaf), "__next__"):
        if hasattr(leaf, "__length_hint__"):
            return operator.length_hint(leaf, -1)
        return object()  # the iterator may have moved on
    if hasattr(leaf, "bit_generator"):
        return repr(leaf.bit_generator.state)
    try:
        return memoryview(leaf).tobytes()
    except (TypeError, ValueError):
        return None


def _mark(item: Any) -> Any:
    """Return a plain value itself, and the ``id()`` of an object."""
    if isinstance(item, int | float | str):
        return item
    return id(item)


def enclosed(function: Any) -> list[Any]:
    """Return the values of the variables of outer functions that a function uses."""
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not set yet
            values.append(cell.cell_contents)
    return values


def items(value: Any) -> Any:
    """Return the items of a content."""
    if isinstance(value, list):
        return value
    return value.values()


@functools.lru_cache(4096)
def foreign(kind: Any, package: str) -> bool:
    """Return whether a class is of an installed package, and not of the given one.

    Builtin classes and those of the standard library are foreign, too.
    """
    if kind.__module__.partition(".")[0] == package:
        return False
    if kind.__module__ == "__main__":
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if not file:
        return True
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STDLIB)


@functools.lru_cache(4096)
def _slots(kind: Any) -> tuple[str, ...]:
    """Return the names of the attributes of a class that are in ``__slots__``."""
    slots = []
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        if isinstance(names, str):
            names = (names,)
        for name in names:
            if name in ("__dict__", "__weakref__"):
                continue
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{base.__name__.lstrip('_')}{name}"
            slots.append(name)
    return tuple(slots)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in ``__slots__`` included."""
    attributes = dict(getattr(value, "__dict__", {}))
    kind: Any = type(value)
    for name in _slots(kind):
        if hasattr(value, name):
            attributes[name] = getattr(value, name)
    return attributes
