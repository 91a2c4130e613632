"""What the code of modules writes outside of them: module-level variables, attributes of classes,
and what functions have.

Python does not tell who reads such a variable. But a write is an instruction that names it. So what
the methods of the modules call is looked through for these, and what they name is watched as the
containers of modules are (module_state.py). Functions have variables of outer functions
(enclosed.py), attributes, defaults, and the object or the arguments that they are bound to.
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
    """What the methods of a module, and all that they call, name.

    Attributes:
        variables: Namespaces of Python modules, with the names that are read or written in them.
        stored: The same, for names that are written.
        holders: Classes, Python modules, and functions that have attributes.
        attributes: Names of attributes that are written.
        read: Names of attributes that are read.
        used: The same, for more than to write them again.
        draws: Packages with a generator of random numbers that are named.
        bound: What functions are bound to, with words: defaults, arguments of a partial, an object.
        cells: Variables of outer functions, with words and their names.
        stored_cells: Those of them that code stores to.
        used_cells: Those of them that code uses for more than to write them.
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
    """What the modules of a model write outside of them.

    Attributes:
        draws: Packages whose generators of random numbers their code names.
        written: Names of attributes that their forward passes and hooks write.
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
                # What hooks only note in module-level variables stays as it is.
                self._hooks[id(module)] = _walk(hooks, package(type(module)))
        stored: dict[int, set[str]] = collections.defaultdict(set)
        attributes: set[str] = set()
        for code in known.values():
            attributes |= code.attributes
            for place, names in code.stored.items():
                stored[place] |= names
        for (
            code
        ) in known.values():  # what is code or plain, and is never stored to, stays what it is
            for place, (namespace, names) in code.variables.items():
                names -= {n for n in names - stored[place] if _stays(namespace.get(n))}
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
        self._names: dict[int, containers.Names] = {}
        every = [*known.values(), *self._hooks.values()]
        self._used = frozenset().union(*(code.used for code in known.values()))
        self._stored_cells = frozenset().union(*(code.stored_cells for code in every))
        self._used_cells = frozenset().union(*(code.used_cells for code in every))

    def of(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield what a module can reach, each with a name of its own: containers, and what
        stands for variables that are written.
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
            watched = self._attributes & self._used if of_function else self._attributes
            if watched:
                yield title, self._of(holder, watched)
            for name in self._read[id(code), id(holder)]:
                value = vars(holder).get(name)
                value = value.default if isinstance(value, containers.StandIn) else value
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
                yield title, self._names.setdefault(place, containers.Enclosed(cell, name))
            value = containers.content_of(cell)
            if not _is_code(value) and _is_watched(value, home):
                yield f"what is in {title}", value

    def reads(self, name: str) -> bool:
        """Return whether code of the modules names an attribute."""
        return any(name in code.read for code in self._code.values())

    def _of(self, holder: Any, names: set[str] | frozenset[str]) -> containers.Names:
        made = containers.Names(holder, frozenset(names))
        return self._names.setdefault(id(holder), made)


def _stays(value: Any) -> bool:
    """Return whether a value is code or plain: a variable that is never stored
    to stays what it is.
    """
    if isinstance(value, torch.Tensor | torch.Generator) or containers.is_outside(value):
        return False
    return isinstance(value, containers.UNOPENED)


def _is_watched(value: Any, home: str) -> bool:
    """Return whether what a variable has is looked at.

    Args:
        value: The value.
        home: The package of the class of the module.
    """
    kind: Any = type(value)
    if kind in containers.BUILTIN or isinstance(value, weakref.WeakKeyDictionary | threading.local):
        return True
    if isinstance(value, types.FunctionType):
        return False
    return (
        not containers.foreign(kind, home)
        or containers.has_settings(value)
        or containers.is_leaf(value)
    )


def _attributes(holder: Any, read: set[str], stored: frozenset[str]) -> list[str]:
    """Return the names in a class or a Python module that code reads, and that
    may have a container or an object.
    """
    found = []
    for name, value in sorted(vars(holder).items()):
        if name not in read or name.startswith("__"):
            continue
        # Code that is never stored to stays what it is.
        if name in stored or not _is_code(value):
            found.append(name)
    return found


def _is_code(value: Any) -> bool:
    kind: Any = type(value)
    if kind in containers.BUILTIN or containers.is_outside(value):
        return False
    return isinstance(value, containers.UNOPENED) or kind.__module__.partition(".")[0] in (
        "builtins",
        "smdistributed",
    )


def package(kind: type) -> str:
    """Return the package of a class: what belongs to another one, such as a log
    or a writer, is left alone.
    """
    return kind.__module__.partition(".")[0]


def _installed(kind: Any) -> bool:
    return containers.foreign(kind, "")


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module."""
    return [hook for kind in HOOKS for hook in module.__dict__[kind].values()]


def _held_code(module: nn.Module) -> list[Any]:
    """Return the functions that a module has in attributes, and the classes of objects there."""
    home = package(type(module))
    found: list[Any] = []
    for name, value in module.__dict__.items():
        if name in HOOKS:
            continue
        found += [each for each in (value, *_items(value)) if isinstance(each, _FUNCTIONS)]
        if home not in _FOREIGN and not _installed(type(module)):
            objects = map(containers.held, containers.cells(value, home))
            kinds = dict.fromkeys(map(type, objects))
            found += [kind for kind in kinds if not containers.foreign(kind, home)]
    return found


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _items(value: Any) -> Iterator[Any]:
    """Yield what is in tuples, lists and dictionaries, and in those in them."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        if type(each) not in (tuple, list, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        inside = list(each.values() if isinstance(each, dict) else each)
        yield from inside
        todo += inside


def _code_of(kind: type, own: Sequence[Any]) -> _Code:
    """Return what the methods of a class of modules name.

    Args:
        kind: The class.
        own: Functions and classes that a module has besides.
    """
    if not _installed(kind):
        return _walk([kind, *own], package(kind))
    found = _own(kind)
    return _walk(own, "", found) if own else found


def _own(kind: Any) -> _Code:
    """Return what the forward of an installed class names itself: its package
    has registries of its own.
    """
    found = _nothing()
    forward = inspect.unwrap(kind.forward)
    if isinstance(forward, types.FunctionType):
        for value in _named(forward, found):
            found.draws.update(_generators(value))
    found.attributes.clear()
    return found._replace(stored=collections.defaultdict(set))


def _stored(start: Sequence[Any], kind: type) -> set[str]:
    """Return the names of attributes that functions write, and what they call:
    methods of a class, and own functions.

    Args:
        start: The functions.
        kind: The class.
    """
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if package(base) not in _FOREIGN:
            methods.update(vars(base))
    follows = not _installed(kind)
    found: set[str] = set()
    seen: set[int] = set()
    todo = [*start, methods.get("forward"), methods.get("__call__")]
    while todo:
        function = todo.pop()
        if isinstance(function, property):
            todo += [function.fget, function.fset]
            continue
        function = inspect.unwrap(function) if callable(function) else function
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        for each in enclosed.instructions(function.__code__):
            if each.opname == "STORE_ATTR":
                found.add(each.argval)
            elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                todo.append(methods.get(each.argval))
            elif each.opname == "LOAD_GLOBAL" and follows:
                value = function.__globals__.get(each.argval)
                if isinstance(value, types.FunctionType) and _ours(value.__module__, package(kind)):
                    todo.append(value)
    return found


def _walk(start: Sequence[Any], home: str, found: _Code | None = None) -> _Code:
    """Return what functions and classes name, and all that they call.

    Args:
        start: The functions and classes.
        home: The package that they belong to.
        found: What else is known.
    """
    found = found or _nothing()
    seen: set[int] = set()
    todo = list(start)
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        draws = list(_generators(value))
        found.draws.update(draws)
        owner = getattr(value, "__self__", None)
        if isinstance(value, _BOUND) and not draws and not _is_code(owner):
            found.bound.append((f"the object of {value.__qualname__}", owner))
            todo.append(type(owner))
        if isinstance(value, functools.partial):
            name = getattr(value.func, "__qualname__", type(value.func).__qualname__)
            found.bound.append((f"arguments of {name}", (value.args, value.keywords)))
            todo += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, property):
            todo += [value.fget, value.fset]
        elif isinstance(value, types.ModuleType):
            if _ours(value.__name__, home):
                found.holders[id(value)] = value
        elif isinstance(value, type):
            for base in value.__mro__:
                if package(base) not in _FOREIGN and not containers.foreign(base, home):
                    found.holders[id(base)] = base
                    todo += vars(base).values()
        elif isinstance(value, types.FunctionType):
            if _ours(value.__module__, home):
                todo += _named(value, found)
        else:
            # A bound or a static method, a function with a cache, an object with methods.
            todo += [getattr(value, name, None) for name in ("__func__", "__wrapped__")]
            kind: type = type(value)
            if package(kind) not in _FOREIGN and not containers.foreign(kind, home):
                todo.append(kind)
    return found


_BOUND = (types.MethodType, types.BuiltinMethodType)


def _generators(value: Any) -> Iterator[str]:
    """Yield the package of a generator of random numbers, if a value is that
    package or belongs to it.
    """
    # A function of the generator, such as random.random or numpy.random.rand, is bound to it.
    owner = type(getattr(value, "__self__", None)).__module__
    name = value.__name__ if isinstance(value, types.ModuleType) else owner
    if name == "random":
        yield "random"
    elif name.partition(".")[0] == "numpy":
        yield "numpy"


def _ours(name: str | None, home: str) -> bool:
    probe = type("", (), {"__module__": name or ""})
    return (name or "").partition(".")[0] not in _FOREIGN and not containers.foreign(probe, home)


def _named(function: types.FunctionType, found: _Code) -> Iterator[Any]:
    """Note what a function names, and yield what it may call."""
    namespace = function.__globals__
    variables = found.variables.setdefault(id(namespace), (namespace, set()))[1]
    _note_cells(function, found)
    yield from containers.enclosed(function)
    yield getattr(function, "__wrapped__", None)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not all(map(_is_code, defaults)):
        found.bound.append((f"defaults of {function.__qualname__}", defaults))
    if vars(function).keys() - {"__wrapped__"}:
        found.holders[id(function)] = function
    before: dis.Instruction | None = None
    value: Any = None  # of the last variable that was named
    for each in enclosed.instructions(function.__code__):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(each.argval)
            value = namespace.get(each.argval)
            yield value
        elif each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            variables.add(each.argval)
            found.stored[id(namespace)].add(each.argval)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found.read.add(each.argval)
            if not enclosed.is_augmented(before):
                found.used.add(each.argval)
        elif each.opname == "STORE_ATTR" and function.__name__ != "__init__":
            found.attributes.add(each.argval)
            named = before is not None and before.opname == "LOAD_GLOBAL"
            if named and isinstance(value, types.FunctionType):
                found.holders[id(value)] = value
        before = each


def _note_cells(function: types.FunctionType, found: _Code) -> None:
    """Note the variables of outer functions that a function has."""
    does = enclosed.uses(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        title = f"variable {name} of {function.__qualname__}"
        found.cells.setdefault(id(cell), (title, name, cell))
        if name in does.stored:
            found.stored_cells.add(id(cell))
        if name in does.used:
            found.used_cells.add(id(cell))
