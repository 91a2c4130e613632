"""Find the state outside of modules that their code writes: module-level variables, attributes of
classes, and state of functions.

Reads of such a variable cannot be observed. But the instruction of a write names the variable. So
the code of the modules' methods, and of all functions that they call, is searched for such
instructions, and the named state is followed in the same way as the containers of modules
(module_state.py). The state of a function is: variables of outer functions (enclosed.py),
attributes, defaults, and the object or the arguments that the function is bound to.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch.transport import containers

from . import enclosed

__all__ = ["HOOKS", "GlobalState", "package"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that have its hooks."""

_FOREIGN = ("torch", "smdistributed", "builtins")


class _Code(NamedTuple):
    """The names in the methods of a module, and in all functions that they call.

    Attributes:
        variables: ``id()`` of a Python module's namespace -> (the namespace, names in it that are
            read or written).
        stored: ``id()`` of a namespace -> names in it that are written.
        holders: ``id()`` -> a class, a Python module, or a function with attributes.
        attributes: Names of attributes that are written.
        read: Names of attributes that are read.
        used: Names of attributes that are read for more than to write them again.
        draws: Packages with a generator of random numbers that are named.
        bound: Objects that functions are bound to, with words: defaults, arguments of a partial,
            the object of a method.
        cells: ``id()`` of a variable of an outer function -> (words, name, the variable).
        stored_cells: ``id()`` of such variables that are assigned to.
        used_cells: ``id()`` of such variables that are used, and not only written to.
    """

    variables: dict[int, tuple[dict[str, Any], set[str]]]
    stored: dict[int, set[str]]
    holders: dict[int, Any]
    attributes: set[str]
    read: set[str]
    used: set[str]
    draws: set[str]
    bound: list[tuple[str, Any]]
    cells: dict[int, tuple[str, str, types.CellType]]
    stored_cells: set[int]
    used_cells: set[int]


def _nothing() -> _Code:
    stored: dict[int, set[str]] = collections.defaultdict(set)
    return _Code({}, stored, {}, set(), set(), set(), set(), [], {}, set(), set())


class GlobalState:
    """The state outside of the modules of a model that their code names.

    Attributes:
        draws: Packages with generators of random numbers that the code names.
        written: Names of attributes that forward passes and hooks write.
    """

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        known: dict[tuple[int, ...], _Code] = {}
        self._code: dict[int, _Code] = {}
        self._hooks: dict[int, _Code] = {}
        for module in modules:
            own = _held_code(module)
            if package(type(module)) not in _FOREIGN or own:
                key = (id(type(module)), *map(id, own))
                if key not in known:
                    known[key] = _code_of(type(module), own)
                self._code[id(module)] = known[key]
            hooks = hooks_of(module)
            if hooks:
                # Only their cells are followed: hooks may collect observations in module-level
                # variables.
                self._hooks[id(module)] = _walk(hooks, package(type(module)))
        stored: dict[int, set[str]] = collections.defaultdict(set)
        attributes: set[str] = set()
        for code in known.values():
            attributes |= code.attributes
            for place, names in code.stored.items():
                stored[place] |= names
        # A variable that is never assigned to, with code or a plain value, cannot change.
        for code in known.values():
            for place, (namespace, names) in code.variables.items():
                constants = {n for n in names - stored[place] if _stays(namespace.get(n))}
                names -= constants
        self._stored, self._attributes = stored, frozenset(attributes)
        self._read = {
            (id(code), id(holder)): _attributes(holder, code.read, self._attributes)
            for code in known.values()
            for holder in code.holders.values()
        }
        by_kind: dict[type, list[Any]] = {}
        for module in modules:
            hooks = [hook for kind in HOOKS for hook in module.__dict__[kind].values()]
            by_kind.setdefault(type(module), []).extend(hooks)
        self.written = frozenset().union(*(_stored(hooks, kind) for kind, hooks in by_kind.items()))
        self.draws = frozenset().union(*(code.draws for code in known.values()))
        self._names: dict[int, containers.Namespace] = {}
        every = [*known.values(), *self._hooks.values()]
        self._used = frozenset().union(*(code.used for code in known.values()))
        self._stored_cells = frozenset().union(*(code.stored_cells for code in every))
        self._used_cells = frozenset().union(*(code.used_cells for code in every))

    def of(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield the state that a module can reach, each with a unique name.

        They are containers, and containers that stand for variables which are written.
        """
        if id(module) not in self._code and id(module) not in self._hooks:
            return
        home = "" if _installed(type(module)) else package(type(module))
        names: collections.Counter[str] = collections.Counter()
        for name, value in self._of_module(module, home):
            names[name] += 1
            yield name if names[name] == 1 else f"{name} ({names[name]})", value

    def _of_module(self, module: nn.Module, home: str) -> Iterator[tuple[str, Any]]:
        code, hooks = self._code.get(id(module)), self._hooks.get(id(module))
        if hooks is not None:
            yield from self._of_cells(hooks, home)
        if code is None:
            return
        for place, (namespace, names) in code.variables.items():
            for name in sorted(names):
                value = namespace.get(name)
                if _is_watched(value, home):
                    yield f"globals()[{name}]", value
            if names & self._stored.get(place, set()):
                yield (
                    f"globals() of {namespace.get('__name__')}",
                    self._of(namespace, self._stored[place]),
                )
        for holder in code.holders.values():
            title = getattr(holder, "__qualname__", holder.__name__)
            of_function = isinstance(holder, types.FunctionType)
            attributes = self._attributes
            if of_function:
                attributes = self._attributes & self._used
            if attributes:
                yield title, self._of(holder, attributes)
            for name in self._read[id(code), id(holder)]:
                value = vars(holder).get(name)
                if isinstance(value, containers.AttributeDescriptor):
                    value = value.default
                if not _is_code(value):
                    yield f"{title}.{name}", value
        yield from self._of_cells(code, home)
        for title, value in code.bound:
            if _is_watched(value, home):
                yield title, value

    def _of_cells(self, code: _Code, home: str) -> Iterator[tuple[str, Any]]:
        """Yield the variables of outer functions that are used."""
        for place, (title, name, cell) in code.cells.items():
            if place not in self._used_cells:
                continue
            if place in self._stored_cells:
                yield title, self._names.setdefault(place, containers.ClosureVariable(cell, name))
            value = containers.read_cell(cell)
            if not _is_code(value) and _is_watched(value, home):
                yield f"what is in {title}", value

    def reads(self, name: str) -> bool:
        """Return whether code of the modules names an attribute."""
        return any(name in code.read for code in self._code.values())

    def _of(self, holder: Any, names: set[str] | frozenset[str]) -> containers.Namespace:
        """Return the container of a namespace or class: the same one every time."""
        container = containers.Namespace(holder, frozenset(names))
        return self._names.setdefault(id(holder), container)


def _stays(value: Any) -> bool:
    """Return whether a value is code or plain, and so cannot change in place."""
    if isinstance(value, torch.Tensor | torch.Generator) or containers.is_module_of_other_model(
        value
    ):
        return False
    return isinstance(value, containers.NEVER_SEARCHED)


def _is_watched(value: Any, home: str) -> bool:
    """Return whether the value of a variable is followed.

    Args:
        value: The value.
        home: The package of the module's class.
    """
    kind: Any = type(value)
    if kind in containers.BUILTIN_CONTAINERS or isinstance(
        value, weakref.WeakKeyDictionary | threading.local
    ):
        return True
    if isinstance(value, types.FunctionType):
        return False
    return (
        not containers.is_foreign(kind, home)
        or containers.has_plain_attributes(value)
        or containers.is_leaf(value)
    )


def _attributes(holder: Any, read: set[str], stored: frozenset[str]) -> list[str]:
    """Return the names in a class or a Python module that code reads, and that may have a container
    or an object.

    Args:
        holder: The class or Python module.
        read: Names of attributes that are read.
        stored: Names of attributes that are written.
    """
    names = []
    for name, value in sorted(vars(holder).items()):
        if name not in read or name.startswith("__"):
            continue
        # Code that is never assigned to cannot change.
        if name in stored or not _is_code(value):
            names.append(name)
    return names


def _is_code(value: Any) -> bool:
    """Return whether a value is code, or a plain value."""
    kind: Any = type(value)
    if kind in containers.BUILTIN_CONTAINERS or containers.is_module_of_other_model(value):
        return False
    if isinstance(value, containers.NEVER_SEARCHED):
        return True
    return kind.__module__.partition(".")[0] in ("builtins", "smdistributed")


def package(kind: type) -> str:
    """Return the top-level package of a class."""
    return kind.__module__.partition(".")[0]


def _installed(kind: Any) -> bool:
    return containers.is_foreign(kind, "")


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module."""
    return [hook for kind in HOOKS for hook in module.__dict__[kind].values()]


def _held_code(module: nn.Module) -> list[Any]:
    """Return the functions in the attributes of a module, and the classes of the objects there."""
    home = package(type(module))
    code: list[Any] = []
    for name, value in module.__dict__.items():
        if name in HOOKS:
            continue
        code += [item for item in (value, *_items(value)) if isinstance(item, _FUNCTIONS)]
        if home not in _FOREIGN and not _installed(type(module)):
            objects = map(containers.represented_object, containers.find_containers(value, home))
            kinds = dict.fromkeys(map(type, objects))
            code += [kind for kind in kinds if not containers.is_foreign(kind, home)]
    return code


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _items(value: Any) -> Iterator[Any]:
    """Yield the items of nested tuples, lists and dictionaries."""
    visited: set[int] = set()
    to_visit = [value]
    while to_visit:
        container = to_visit.pop()
        if type(container) not in (tuple, list, dict) or id(container) in visited:
            continue
        visited.add(id(container))
        items = list(container.values() if isinstance(container, dict) else container)
        yield from items
        to_visit += items


def _code_of(kind: type, own: Sequence[Any]) -> _Code:
    """Return the names in the methods of a module's class.

    Args:
        kind: The class.
        own: Functions and classes of objects that a module has in attributes.
    """
    if not _installed(kind):
        return _walk([kind, *own], package(kind))
    code = _own(kind)
    if not own:
        return code
    return _walk(own, "", code)


def _own(kind: Any) -> _Code:
    """Return the names in the forward of an installed class.

    Functions that it calls are not searched, because its package has registries of its own.
    """
    code = _nothing()
    forward = inspect.unwrap(kind.forward)
    if isinstance(forward, types.FunctionType):
        for value in _named(forward, code):
            code.draws.update(_generators(value))
    code.attributes.clear()
    return code._replace(stored=collections.defaultdict(set))


def _stored(start: Sequence[Any], kind: type) -> set[str]:
    """Return the names of attributes that functions write, and the functions that they call.

    Args:
        start: The functions.
        kind: The class with the methods that are followed; other functions are followed if they are
            in its package.
    """
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if package(base) not in _FOREIGN:
            methods.update(vars(base))
    follows_functions = not _installed(kind)
    written: set[str] = set()
    visited: set[int] = set()
    to_visit = [*start, methods.get("forward"), methods.get("__call__")]
    while to_visit:
        function = to_visit.pop()
        if isinstance(function, property):
            to_visit += [function.fget, function.fset]
            continue
        if callable(function):
            function = inspect.unwrap(function)
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in visited:
            continue
        visited.add(id(function))
        for instruction in enclosed.instructions(function.__code__):
            name = instruction.argval
            if instruction.opname == "STORE_ATTR":
                written.add(name)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                to_visit.append(methods.get(name))
            elif instruction.opname == "LOAD_GLOBAL" and follows_functions:
                value = function.__globals__.get(name)
                if isinstance(value, types.FunctionType) and _ours(value.__module__, package(kind)):
                    to_visit.append(value)
    return written


def _walk(start: Sequence[Any], home: str, code: _Code | None = None) -> _Code:
    """Return the names in functions and classes, and in all functions that they call.

    Args:
        start: The functions and classes.
        home: The package that they belong to.
        code: Names from elsewhere, which are added to.
    """
    code = code or _nothing()
    visited: set[int] = set()
    to_visit = list(start)
    while to_visit:
        value = to_visit.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        draws = list(_generators(value))
        code.draws.update(draws)
        owner = getattr(value, "__self__", None)
        if isinstance(value, _BOUND) and not draws and not _is_code(owner):
            code.bound.append((f"the object of {value.__qualname__}", owner))
            to_visit.append(type(owner))
        if isinstance(value, functools.partial):
            name = getattr(value.func, "__qualname__", type(value.func).__qualname__)
            code.bound.append((f"arguments of {name}", (value.args, value.keywords)))
            to_visit += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, property):
            to_visit += [value.fget, value.fset]
        elif isinstance(value, types.ModuleType):
            if _ours(value.__name__, home):
                code.holders[id(value)] = value
        elif isinstance(value, type):
            for base in value.__mro__:
                if package(base) not in _FOREIGN and not containers.is_foreign(base, home):
                    code.holders[id(base)] = base
                    to_visit += vars(base).values()
        elif isinstance(value, types.FunctionType):
            if _ours(value.__module__, home):
                to_visit += _named(value, code)
        else:
            # A bound or a static method, a function with a cache, an object with methods.
            to_visit += [getattr(value, name, None) for name in ("__func__", "__wrapped__")]
            kind: type = type(value)
            if package(kind) not in _FOREIGN and not containers.is_foreign(kind, home):
                to_visit.append(kind)
    return code


_BOUND = (types.MethodType, types.BuiltinMethodType)


def _generators(value: Any) -> Iterator[str]:
    """Yield the package of a generator of random numbers, if a value is the package or a function
    of the generator.
    """
    # A function of the generator, such as random.random or numpy.random.rand, is bound to it.
    owner = type(getattr(value, "__self__", None)).__module__
    name = value.__name__ if isinstance(value, types.ModuleType) else owner
    if name == "random":
        yield "random"
    elif name.partition(".")[0] == "numpy":
        yield "numpy"


def _ours(name: str | None, home: str) -> bool:
    """Return whether a Python module is of the script, or of the package ``home``."""
    if name is None:
        name = ""
    probe = type("", (), {"__module__": name})
    return name.partition(".")[0] not in _FOREIGN and not containers.is_foreign(probe, home)


def _named(function: types.FunctionType, code: _Code) -> Iterator[Any]:
    """Add the names in a function to ``code``, and yield the values that it may call."""
    namespace = function.__globals__
    variables = code.variables.setdefault(id(namespace), (namespace, set()))[1]
    _note_cells(function, code)
    yield from containers.read_closure(function)
    yield getattr(function, "__wrapped__", None)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not all(map(_is_code, defaults)):
        code.bound.append((f"defaults of {function.__qualname__}", defaults))
    if vars(function).keys() - {"__wrapped__"}:
        code.holders[id(function)] = function
    before: dis.Instruction | None = None
    value: Any = None  # of the last variable that was loaded
    for instruction in enclosed.instructions(function.__code__):
        opname, name = instruction.opname, instruction.argval
        if opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(name)
            value = namespace.get(name)
            yield value
        elif opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            variables.add(name)
            code.stored[id(namespace)].add(name)
        elif opname in ("LOAD_ATTR", "LOAD_METHOD"):
            code.read.add(name)
            if not enclosed.is_augmented(before):
                code.used.add(name)
        elif opname == "STORE_ATTR" and function.__name__ != "__init__":
            code.attributes.add(name)
            is_of_global = before is not None and before.opname == "LOAD_GLOBAL"
            if is_of_global and isinstance(value, types.FunctionType):
                code.holders[id(value)] = value
        before = instruction


def _note_cells(function: types.FunctionType, code: _Code) -> None:
    """Add the variables of outer functions that a function has to ``code``."""
    uses = enclosed.uses(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        title = f"variable {name} of {function.__qualname__}"
        code.cells.setdefault(id(cell), (title, name, cell))
        if name in uses.stored:
            code.stored_cells.add(id(cell))
        if name in uses.used:
            code.used_cells.add(id(cell))
