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
NEVER_SEARCHED = (
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

BUILTIN_CONTAINERS = {
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
_LEAF_CLASSES = (
    torch.Tensor,
    torch.Generator,
    types.FunctionType,
    random.Random,
    itertools.count,
    bytearray,
    array.array,
)
MOST_COMPARED_BYTES = 1 << 26
"""Largest size in bytes of an array or a tensor with compared values. Writes that nothing counts
are not found in larger ones.
"""
MOST_COMPARED_ITEMS = 4096
"""Number of items. Containers with more items are not compared whenever a microbatch ends or waits.
"""
PLAIN_CLASSES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Classes of values that do not change, and are cheap to send."""

EXACT_PLAIN_CLASSES = frozenset(PLAIN_CLASSES)
"""The same classes, for a test of the exact type: an object of a subclass may have attributes."""

_CLASSES_WITH_NOTHING_INSIDE = {*PLAIN_CLASSES, torch.Tensor}
_VALUE_CLASSES = (bool, int, float, complex, str, bytes, type(None), list, dict, set, tuple)
"""Classes of variables that are compared and sent by themselves, not by reference."""

_STDLIB_DIRECTORY = sysconfig.get_path("stdlib")
_MODULE_ATTRIBUTES = frozenset(torch.nn.Module().__dict__)
"""Names of the attributes that torch gives each module."""


class AttributeDescriptor:
    """A descriptor in a class, in the place of an attribute with observed reads.

    Attributes:
        default: The value of the attribute in the class.
    """

    default: Any


class ObjectReference:
    """Stands for an object in a variable or in an attribute of a class.

    The object itself does not go to another rank: there a reference is `OBJECT_ON_OTHER_RANK`.

    Attributes:
        value: The object.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __reduce__(self) -> str:
        """Return the name of the module-level variable that unpickling looks up."""
        return "OBJECT_ON_OTHER_RANK"


OBJECT_ON_OTHER_RANK = ObjectReference()
"""A reference that came from another rank."""


class Namespace:
    """Variables of a Python module, or attributes of a class, as a container.

    Attributes:
        holder: The variables of a Python module as a dictionary, or a class.
        names: The names of the variables or attributes, sorted.
    """

    def __init__(self, holder: Any, names: frozenset[str]) -> None:
        self.holder, self.names = holder, sorted(names)
        self._references: dict[int, ObjectReference] = {}  # by id() of the object

    def get(self) -> dict[str, Any]:
        """Return the values, by name; names without a value are left out.

        An object that cannot go to another rank is an `ObjectReference`, the same one in each
        call. Code is left out.

        Returns:
            Name -> value, a new dictionary. The former references to objects that are gone are
            dropped.
        """
        namespace = self._namespace()
        values: dict[str, Any] = {}
        references: dict[int, ObjectReference] = {}
        for name in self.names:
            value = namespace.get(name, self)
            if isinstance(value, AttributeDescriptor):
                value = value.default
            if isinstance(value, (*_VALUE_CLASSES, torch.Tensor)):
                values[name] = value
            elif _is_object(value):
                reference = self._references.get(id(value)) or ObjectReference(value)
                values[name] = references[id(value)] = reference
        # References to objects that are gone are dropped: their id() may come again.
        self._references = references
        return values

    def put(self, values: dict[str, Any]) -> None:
        """Set the variables or attributes, and delete those that have no value.

        Variables of the process are written: all code that uses them sees the values.

        Args:
            values: Name -> value, as `get` returns them.
        """
        for name in self.get().keys() - values.keys():
            self._delete(name)
        for name, value in values.items():
            if isinstance(value, ObjectReference):
                self._references[id(value.value)] = value
                self._set(name, value.value)
            else:
                self._set(name, value)

    def with_own_objects(self, values: dict[str, Any]) -> dict[str, Any] | None:
        """Return values of another rank, with objects of this rank in the place of the objects
        that stayed on the other one.

        Nothing is written.

        Args:
            values: Name -> value, as the other rank sent them.

        Returns:
            The values; None if this rank has no such object.
        """
        own_values = self.get()
        replaced = {}
        for name, value in values.items():
            replaced[name] = value
            if value is OBJECT_ON_OTHER_RANK:
                replaced[name] = own_values.get(name)
                if not isinstance(replaced[name], ObjectReference):
                    return None
        return replaced

    def _namespace(self) -> Mapping[str, Any]:
        """Return all variables or attributes of the holder, by name."""
        return self.holder if isinstance(self.holder, dict) else vars(self.holder)

    def _delete(self, name: str) -> None:
        """Delete a variable or an attribute."""
        if isinstance(self.holder, dict):
            self.holder.pop(name)
        else:
            delattr(self.holder, name)

    def _set(self, name: str, value: Any) -> None:
        """Set a variable or an attribute; a descriptor in the class stays there."""
        if isinstance(self.holder, dict):
            self.holder[name] = value
            return
        descriptor = vars(self.holder).get(name)
        if isinstance(descriptor, AttributeDescriptor):
            descriptor.default = value
        else:
            setattr(self.holder, name, value)


class ClosureVariable(Namespace):
    """A variable of an outer function, as a container with a single name."""

    holder: types.CellType

    def __init__(self, holder: types.CellType, name: str) -> None:
        super().__init__(holder, frozenset([name]))

    def _namespace(self) -> Mapping[str, Any]:
        value = read_cell(self.holder)
        if value is UNSET:
            return {}
        return {self.names[0]: value}

    def _delete(self, name: str) -> None:  # noqa: ARG002  there is a single name
        del self.holder.cell_contents

    def _set(self, name: str, value: Any) -> None:  # noqa: ARG002  there is a single name
        self.holder.cell_contents = value


UNSET = type("Unset", (), {})
"""The value of a variable before its first assignment."""


def read_cell(cell: types.CellType) -> Any:
    """Return the value of a variable of an outer function; UNSET before its first assignment."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNSET


def _is_object(value: Any) -> bool:
    """Return whether a value is an object with attributes, and neither code nor of this library."""
    kind: Any = type(value)
    if isinstance(value, NEVER_SEARCHED):
        return False
    if kind.__module__.partition(".")[0] in ("builtins", "smdistributed"):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(_names_of_slots(kind))


class ObjectAttributes:
    """The plain attributes of an object of an installed class, as a container.

    Such an object may be a configuration: a caller sets its values for a module that it calls. The
    object may also be a writer with open files. So only plain attributes are compared and sent, and
    the object itself does not go to another rank.
    """

    by_object_id: ClassVar[dict[int, ObjectAttributes | ThreadLocalValues | LeafValues]] = {}
    """``id()`` of an object -> its container in the present step."""
    model_module_ids: ClassVar[set[int]] = set()
    """``id()`` of the modules of the model. Another module is an object like others."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    @classmethod
    def of(cls, holder: Any) -> Any:
        """Return the container of an object: the same container until the step ends.

        Containers are kept in `by_object_id`, a dictionary of the class.
        """
        container = cls.by_object_id.get(id(holder))
        if container is None:
            container = cls.by_object_id[id(holder)] = cls(holder)
        return container

    def _namespaces(self) -> list[dict[Any, Any]]:
        """Return the attributes; of a dictionary with attributes [attributes, the dictionary]."""
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
            # dict's own methods, because those of a subclass may have effects.
            for name, value in dict.items(namespace):
                if isinstance(value, PLAIN_CLASSES):
                    values[number, name] = value
        return values

    def put(self, values: dict[tuple[int, Any], Any]) -> None:
        """Set the values, and delete the other plain ones.

        The attributes are written past ``__setattr__`` and properties. Other attributes stay.

        Args:
            values: (0 for an attribute or 1 for an item, name) -> value.
        """
        namespaces = self._namespaces()
        for number, name in self.get().keys() - values.keys():
            dict.__delitem__(namespaces[number], name)
        for (number, name), value in values.items():
            dict.__setitem__(namespaces[number], name, value)


class ThreadLocalValues:
    """The values of a ``threading.local`` on the present thread, as a container."""

    def __init__(self, holder: threading.local) -> None:
        self.holder = holder

    @classmethod
    def of(cls, holder: threading.local) -> Any:
        """Return the container of an object: the same container until the step ends."""
        container = ObjectAttributes.by_object_id.get(id(holder))
        if container is None:
            container = ObjectAttributes.by_object_id[id(holder)] = cls(holder)
        return container

    def get(self) -> dict[str, Any]:
        """Return a copy of the values of this thread, by name."""
        return dict(self.holder.__dict__)

    def put(self, value: dict[str, Any]) -> None:
        """Set the values of this thread, and delete all others of this thread."""
        own = self.holder.__dict__
        own.clear()
        own.update(value)


class LeafValues:
    """The values of a tensor, an array or a bytearray, as a container."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self._state: Any = None
        self._content: dict[str, Any] = {}

    @classmethod
    def of(cls, holder: Any) -> Any:
        """Return the container of an object: the same container until the step ends."""
        container = ObjectAttributes.by_object_id.get(id(holder))
        if container is None:
            container = ObjectAttributes.by_object_id[id(holder)] = cls(holder)
        return container

    def get(self) -> dict[str, Any]:
        """Return ``{"value": a copy of the values}``: the same copy until the object is written.

        A tensor is copied with its memory, outside of the graph.
        """
        new_state = read_state(self.holder, self._state)
        if not self._content or new_state is not self._state:
            self._state = new_state
            self._content = {"value": _copy_leaf(self.holder)}
        return dict(self._content)

    def put(self, value: dict[str, Any]) -> None:
        """Write values, as `get` returns them, into the object."""
        assign(self.holder, value["value"])
        self._state, self._content = read_state(self.holder), dict(value)


def _copy_leaf(leaf: Any) -> Any:
    """Return a copy of a tensor, outside the graph, or of another object."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return copy.copy(leaf)


def represented_object(container: Any) -> Any:
    """Return the object that a container stands for; a list or dictionary stands for itself."""
    if isinstance(container, ObjectAttributes | ThreadLocalValues | LeafValues):
        return container.holder
    return container


def is_module_of_other_model(value: Any) -> bool:
    """Return whether a value is a module outside the followed model, such as a teacher in a list.

    Modules of this library do not count.
    """
    if not isinstance(value, torch.nn.Module) or id(value) in ObjectAttributes.model_module_ids:
        return False
    return type(value).__module__.partition(".")[0] != "smdistributed"


def has_plain_attributes(value: Any) -> bool:
    """Return whether an object of an installed class has attributes, equal in all threads.

    Leaves and context managers do not count: the latter are scopes, and no configuration.
    """
    others = (*_LEAF_CLASSES, threading.local, contextlib.AbstractContextManager)
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, others)


def _parts_of_configuration(value: Any) -> list[Any]:
    """Return the parts of an object of an installed class that are searched for containers.

    They are parts of a configuration, and plain data.

    Such parts are attributes of classes with a common base, and containers of plain data. Nothing
    is changed.
    """
    if isinstance(value, dict):
        return list(dict.values(value))
    collection_kinds = (dict, list, collections.abc.Mapping, collections.abc.Sequence)
    is_collection = isinstance(value, collections.abc.Mapping | collections.abc.Sequence)
    parts = []
    for attribute in vars(value).values():
        if is_collection and isinstance(attribute, collection_kinds):
            # A collection keeps its items in an attribute: they are its content.
            parts.append(attribute)
        elif type(attribute) in BUILTIN_CONTAINERS:
            # A writer has lists of files and of other writers. Such a list is left alone, as the
            # writer is.
            if _is_data(attribute):
                parts.append(attribute)
        elif has_plain_attributes(attribute) and _have_common_base(type(attribute), type(value)):
            parts.append(attribute)
    return parts


def _is_data(value: Any) -> bool:
    """Return whether a builtin container has only plain values, tensors, arrays and builtin
    containers of these, at any depth.

    An empty container has only such values, too.
    """
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
        for kind in kinds - {*PLAIN_CLASSES, *BUILTIN_CONTAINERS}:
            if not issubclass(kind, torch.Tensor) and not _is_array_class(kind):
                return False
        to_visit += [member for member in members if type(member) in BUILTIN_CONTAINERS]
    return True


def _have_common_base(one: type, other: type) -> bool:
    """Return whether two classes have a base in common, as the parts of a configuration have.

    ``object``, ``dict`` and ``list`` do not count.
    """
    # The last class of a method resolution order is `object`.
    return any(base in one.__mro__ for base in other.__mro__[:-1] if base not in (dict, list))


def read_content(container: Any) -> Any:
    """Return a copy of the present content of a container.

    Items themselves are not copied.

    Returns:
        A list for a list or a deque. A dictionary for all others: the items of a dictionary, the
        members of a set as keys, or the attributes of an object by name.
    """
    if isinstance(container, Namespace | ObjectAttributes | ThreadLocalValues | LeafValues):
        return container.get()
    if isinstance(container, _SEQUENCES):
        return list(container)
    if isinstance(container, set):
        return dict.fromkeys(container)
    if isinstance(container, dict):
        return dict(dict.items(container))  # the methods of a subclass may have effects
    return _attributes(container)


def has_same_items(one: Any, other: Any) -> bool:
    """Return whether two contents have the same objects, in the same order, under equal keys.

    Args:
        one: A list or a dictionary, as `read_content` returns it.
        other: The same kind of content.
    """
    if len(one) != len(other):
        return False
    if isinstance(one, list):
        return all(map(operator.is_, one, other))
    return all(map(operator.is_, one.values(), other.values())) and list(one) == list(other)


def snapshot(item: Any) -> Any:
    """Return the version of a tensor, or the content of a container, for a later `has_changed`."""
    if isinstance(item, torch.Tensor):
        return item._version  # noqa: SLF001
    return read_content(item)


def has_changed(item: Any, earlier: Any) -> bool:
    """Return whether a tensor or a container was written since `snapshot` returned ``earlier``."""
    now = snapshot(item)
    if isinstance(item, torch.Tensor):
        return bool(now != earlier)
    return not has_same_items(now, earlier)


def is_assignable(leaf: Any) -> bool:
    """Return whether `assign` can put the `read_value` of one leaf into another.

    So it is for arrays and generators of random numbers.

    Nothing is written.
    """
    kinds = (torch.Generator, random.Random, bytearray, array.array)
    # Only numpy's generators have a bit generator.
    return isinstance(leaf, kinds) or hasattr(leaf, "bit_generator") or is_array(leaf)


def read_value(leaf: Any) -> Any:
    """Return a copy of an assignable array, or the state of a generator of random numbers."""
    if isinstance(leaf, torch.Generator):
        return leaf.get_state()
    if isinstance(leaf, random.Random):
        return leaf.getstate()
    if hasattr(leaf, "bit_generator"):
        return leaf.bit_generator.state
    return copy.copy(leaf)


def assign(target: Any, value: Any) -> None:
    """Write another content into a container, or another value into an assignable leaf, in place.

    A generator of random numbers gets a state. A tensor is written without a graph, also one that
    requires a gradient.

    Args:
        target: The container or the leaf.
        value: A content as `read_content` returns it, or a value as `read_value` returns it.

    Raises:
        RuntimeError: torch refuses the value, for example one of another shape.
        ValueError: An array is read-only or has another shape.
    """
    if isinstance(target, Namespace | ObjectAttributes | ThreadLocalValues | LeafValues):
        target.put(value)
    elif isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(value)
    elif isinstance(target, torch.Generator):
        target.set_state(value)
    elif isinstance(target, random.Random):
        target.setstate(value)
    elif hasattr(target, "bit_generator"):
        target.bit_generator.state = value
    elif isinstance(target, bytearray | array.array):
        target[:] = value
    elif is_array(target):
        target[...] = value
    elif isinstance(target, list):
        target[:] = value
    elif isinstance(target, collections.deque):
        target.clear()
        target.extend(value)
    else:
        _assign_attributes(target, value)


def _assign_attributes(target: Any, value: Mapping[str, Any]) -> None:
    """Replace the items of a dictionary or set, or the attributes of an object, in place.

    A frozen dataclass is written, too.

    Args:
        target: The dictionary, the set or the object.
        value: The new items or attributes; all others are deleted.
    """
    if isinstance(target, dict | set):
        target.clear()
        target.update(value)
        return
    kind: Any = type(target)
    slots = _names_of_slots(kind)
    # object's own methods, because a frozen dataclass refuses to set attributes.
    for name in slots:
        if name in value:
            object.__setattr__(target, name, value[name])
        elif hasattr(target, name):
            object.__delattr__(target, name)
    attributes = getattr(target, "__dict__", {})
    attributes.clear()
    attributes.update((name, item) for name, item in value.items() if name not in slots)


def find_containers(value: Any, package: str = "") -> Iterator[Any]:
    """Yield the containers in a value, each once, with the value itself first.

    A copy of the value yields its own containers in the same order.

    A container is a list, a deque, a set, a dictionary, or an object with attributes. Containers
    for objects of installed packages are made with that, and kept until the step ends
    (`ObjectAttributes.of`). The values are not changed.

    Args:
        value: The value.
        package: Name of a package. Of objects of other installed packages, such as a configuration,
            a log or a writer, only the plain attributes are a container. Empty: objects of all
            packages are treated alike.
    """
    if type(value) in EXACT_PLAIN_CLASSES:
        return
    visited: set[int] = set()
    # A stack of iterators: depth first, in the order of the items.
    to_visit = [iter([value])]
    while to_visit:
        item = next(to_visit[-1], to_visit)
        if item is to_visit:  # the iterator has ended
            to_visit.pop()
            continue
        kind: Any = type(item)
        if kind in EXACT_PLAIN_CLASSES or id(item) in visited or _is_array_class(kind):
            continue
        visited.add(id(item))
        if package and is_module_of_other_model(item):
            yield ObjectAttributes.of(item)
            own_attributes = []
            for name, attribute in vars(item).items():
                if name not in _MODULE_ATTRIBUTES:
                    own_attributes.append(attribute)
            to_visit.append(iter(own_attributes))
            to_visit.append(iter(list(vars(item)["_modules"].values())))
            continue
        if isinstance(item, NEVER_SEARCHED):
            continue
        if isinstance(item, Namespace):
            yield item
        elif isinstance(item, threading.local):
            # Among the arguments of a call it belongs to the caller's thread.
            if package:
                yield ThreadLocalValues.of(item)
        elif package and kind not in BUILTIN_CONTAINERS and is_foreign(kind, package):
            if has_plain_attributes(item):
                yield ObjectAttributes.of(item)
                to_visit.append(iter(_parts_of_configuration(item)))
        elif isinstance(item, tuple):
            # No content of its own to write, but the items may be containers.
            to_visit.append(iter(item))
        elif isinstance(item, set):
            yield item
        elif isinstance(item, (*_SEQUENCES, dict)):
            yield item
            members = list(items_of(read_content(item)))
            # A large table of numbers has no containers: it is not searched one by one.
            is_small = len(members) <= MOST_COMPARED_ITEMS
            if is_small or not set(map(type, members)) <= _CLASSES_WITH_NOTHING_INSIDE:
                to_visit.append(iter(members))
        elif isinstance(getattr(item, "__dict__", None), dict) or _names_of_slots(kind):
            yield item
            to_visit.append(iter(list(_attributes(item).values())))


def find_leaves(value: Any, package: str) -> Iterator[Any]:
    """Yield the leaves in a value: objects that are no containers and can be written in place.

    A leaf that is in several places comes several times.

    A leaf is an object such as a tensor, an array or an iterator (`is_leaf`), and not autograd's.

    Args:
        value: The value.
        package: As for `find_containers`.
    """
    if is_leaf(value):
        yield value
    for container in find_containers(value, package):
        members = list(items_of(read_content(container)))
        if isinstance(container, ObjectAttributes):
            # The content of these has only plain attributes.
            members = list(vars(container.holder).values())
            if isinstance(container.holder, torch.nn.Module):
                members += container.holder._buffers.values()  # noqa: SLF001
                members += container.holder._parameters.values()  # noqa: SLF001
        for member in members:
            if is_leaf(member):
                yield member


def is_leaf(value: Any) -> bool:
    """Return whether a value is a leaf: no container, and can be written in place.

    Such a leaf is not autograd's: it is a tensor, a parameter, an array, a function, a generator or
    another builtin iterator. So is each object of numpy.
    """
    kind: Any = type(value)
    if kind in EXACT_PLAIN_CLASSES:
        return False
    if isinstance(value, _LEAF_CLASSES) or is_array(value):
        return True
    # Each read of a builtin iterator moves it on.
    if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
        return True
    return bool(kind.__module__.partition(".")[0] == "numpy")


def is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy, or of a subclass. numpy is not imported."""
    kind: Any = type(value)
    return _is_array_class(kind)


@functools.lru_cache(4096)
def _is_array_class(kind: Any) -> bool:
    """Return whether a class is numpy's array or a subclass."""
    bases = [(base.__module__, base.__name__) for base in kind.__mro__]
    return ("numpy", "ndarray") in bases


def read_state(leaf: Any, earlier: Any = None, limit: int | None = None) -> Any:
    """Return the state of a leaf: another object after each write to the leaf.

    The caller compares states by identity, and does not look into them.

    Nothing is written, and an iterator is not moved on. Values of a tensor on a GPU are waited for.

    Args:
        leaf: The leaf.
        earlier: An earlier state. This object is returned if the leaf was not written since.
        limit: Largest size in bytes of an array or a tensor with compared values; None: no limit.

    Returns:
        An object to keep. None for a leaf without a state that can be read, and for an array above
        the limit: then writes are not found.
    """
    if isinstance(leaf, torch.Tensor):
        return _state_of_tensor(leaf, earlier, limit)
    if is_array(leaf):
        return _state_of_array(leaf, earlier, limit)
    if is_buffer(leaf) and limit is not None and size_in_bytes(leaf) > limit:
        return None
    now = _state_of_other(leaf)
    if earlier == now:
        return earlier
    return now


def is_buffer(leaf: Any) -> bool:
    """Return whether a leaf has values that are written without a count of the writes."""
    return isinstance(leaf, bytearray | array.array) or is_array(leaf)


def is_constant(values: Any) -> bool:
    """Return whether an array of numpy is read-only, and no view of another array."""
    # Another array may be writable, and shares the memory.
    return is_array(values) and not values.flags.writeable and not is_array(values.base)


def size_in_bytes(leaf: Any) -> int:
    """Return the size in bytes of the values of a tensor, an array or a bytearray."""
    if isinstance(leaf, torch.Tensor):
        return leaf.numel() * leaf.element_size()
    if is_array(leaf):
        return int(leaf.nbytes)
    return memoryview(leaf).nbytes


def _state_of_tensor(tensor: torch.Tensor, earlier: Any, limit: int | None) -> Any:
    """Return (version of a tensor, copy of its values), or ``earlier`` if that is the same state.

    The copy is needed because torch does not count writes to a tensor's `data`. It is None for a
    tensor with values that cannot be compared, or with more bytes than the limit.

    Args:
        tensor: The tensor.
        earlier: An earlier state, or None.
        limit: Largest size in bytes of a tensor with copied values; None: no limit.
    """
    version = None if tensor.is_inference() else tensor._version  # noqa: SLF001
    is_comparable = _has_comparable_values(tensor)
    if not is_comparable or (limit is not None and size_in_bytes(tensor) > limit):
        now = (version, None)
        if earlier == now:
            return earlier
        return now
    if earlier is not None and earlier[0] == version and _are_same_bits(tensor, earlier[1]):
        return earlier
    return version, tensor.detach().clone()


def _has_comparable_values(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor can be compared bit by bit.

    A tensor that requires a gradient is written by torch, which counts the writes.
    """
    if tensor.requires_grad or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


_INTEGER_TYPE_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> a type of integers with as many bytes."""


def _are_same_bits(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same values; a NaN is equal to itself."""
    if other is None or one.dtype != other.dtype:
        return False
    one, other = one.detach(), other.detach()
    if one.is_complex():
        one = torch.view_as_real(one.resolve_conj())
        other = torch.view_as_real(other.resolve_conj())
    # As integers, because torch finds a NaN different from itself.
    integers = _INTEGER_TYPE_OF_SIZE[one.element_size()]
    return torch.equal(one.view(integers), other.view(integers))


def _state_of_array(values: Any, earlier: Any, limit: int | None) -> Any:
    """Return ((shape, type), copy of the values) of an array of numpy, or ``earlier`` if that is
    the same state. None for an array that is constant, or has more bytes than the limit.

    Args:
        values: The array.
        earlier: An earlier state, or None.
        limit: Largest size in bytes; None: no limit.
    """
    if is_constant(values) or (limit is not None and values.nbytes > limit):
        return None
    numpy = sys.modules["numpy"]
    kind = values.shape, values.dtype
    if values.dtype.hasobject:
        # The bytes of such an array are addresses: the objects are compared by identity.
        objects = list(values.flat)
        if earlier is not None and earlier[0] == kind and has_same_items(earlier[1], objects):
            return earlier
        return kind, objects
    octets = numpy.ascontiguousarray(values).reshape(-1).view(numpy.uint8)
    if earlier is not None and earlier[0] == kind and numpy.array_equal(earlier[1], octets):
        return earlier
    return kind, octets.copy()


def _state_of_other(leaf: Any) -> Any:
    """Return the state of a leaf that is no tensor and no array.

    Two states are equal if the leaf was not written between. None for an object without a state
    that can be read.

    The leaf is not changed, and an iterator not moved on.
    """
    if isinstance(leaf, types.FunctionType):
        return [*map(_identity_of, (*vars(leaf).values(), *read_closure(leaf)))]
    if isinstance(leaf, torch.Generator):
        return leaf.get_state().tolist()
    if isinstance(leaf, random.Random):
        return leaf.getstate()
    if isinstance(leaf, itertools.count):
        return repr(leaf)
    if isinstance(leaf, types.GeneratorType):
        frame = leaf.gi_frame
        if frame is None:  # the generator has ended
            return None
        return frame.f_lasti, [*map(_identity_of, frame.f_locals.values())]
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


def _identity_of(item: Any) -> Any:
    """Return a number or a text itself, and the ``id()`` of another object."""
    if isinstance(item, int | float | str):
        return item
    return id(item)


def read_closure(function: Any) -> list[Any]:
    """Return the values of the variables of outer functions that a function uses.

    Variables without a value are left out. Empty for an object that is no function.
    """
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not set yet
            values.append(cell.cell_contents)
    return values


def items_of(content: Any) -> Any:
    """Return the items of a content: a list itself, or the values of a dictionary."""
    if isinstance(content, list):
        return content
    return content.values()


@functools.lru_cache(4096)
def is_foreign(kind: Any, package: str) -> bool:
    """Return whether a class is foreign: of an installed package, and not of the given one.

    Builtin classes and those of the standard library are foreign, too. A class counts by the file
    of its Python module: in ``site-packages``, ``dist-packages`` or the standard library. So a
    class of a package that is installed in place, by ``pip install -e``, belongs to the script, as
    those of ``__main__`` do. A class without a file is builtin. The answer is cached.

    Args:
        kind: The class.
        package: The top-level package that counts as the script's own although it is installed,
            such as that of the model's class; empty: none.

    Returns:
        True for a class of torch, say, unless the package is "torch".
    """
    if kind.__module__.partition(".")[0] == package:
        return False
    # The script that runs: its package has no name.
    if kind.__module__ == "__main__":
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if not file:
        return True
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STDLIB_DIRECTORY)


@functools.lru_cache(4096)
def _names_of_slots(kind: Any) -> tuple[str, ...]:
    """Return the names of the attributes of a class that are in ``__slots__``.

    The slots of its bases are included. A private name is mangled, as Python does:
    ``_Layer__cache`` for ``__cache`` of a class ``Layer``.

    The answer is cached.
    """
    slots = []
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        if isinstance(names, str):  # a single slot may be a text
            names = (names,)
        for name in names:
            if name in ("__dict__", "__weakref__"):
                continue
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{base.__name__.lstrip('_')}{name}"
            slots.append(name)
    return tuple(slots)


def _attributes(value: Any) -> dict[str, Any]:
    """Return a copy of the attributes of an object by name, those in ``__slots__`` included.

    Slots without a value are left out.
    """
    attributes = dict(getattr(value, "__dict__", {}))
    kind: Any = type(value)
    for name in _names_of_slots(kind):
        if hasattr(value, name):
            attributes[name] = getattr(value, name)
    return attributes
