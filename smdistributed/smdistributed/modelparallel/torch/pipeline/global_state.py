"""What the code of modules writes outside of them: module-level variables, and
attributes of classes.

Python does not tell who reads such a variable. But a write is an instruction that names it. So what
the methods of the modules call is looked through for these, and what they name is watched as the
containers of modules are (module_state.py).
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

__all__ = ["HOOKS", "Outside", "package"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that have its hooks."""

_FOREIGN = ("torch", "smdistributed", "builtins")


class _Code(NamedTuple):
    """What the methods of a module, and all that they call, name.

    Attributes:
        variables: Namespaces of Python modules, with the names that are read or written in them.
        stored: The same, for names that are written.
        holders: Classes and Python modules.
        attributes: Names of attributes that are written.
        read: Names of attributes that are read.
        draws: Packages with a generator of random numbers that are named.
    """

    variables: dict[int, tuple[dict[str, Any], set[str]]]
    stored: dict[int, set[str]]
    holders: dict[int, Any]
    attributes: set[str]
    read: set[str]
    draws: set[str]


def _nothing() -> _Code:
    return _Code({}, collections.defaultdict(set), {}, set(), set(), set())


class Outside:
    """What the modules of a model write outside of them.

    Attributes:
        draws: Packages whose generators of random numbers their code names.
        written: Names of attributes that their forward passes and hooks write.
    """

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        known: dict[tuple[Any, ...], _Code] = {}
        self._code: dict[int, _Code] = {}
        for module in modules:
            own = tuple(
                each for each in module.__dict__.values() if isinstance(each, types.FunctionType)
            )
            if package(type(module)) not in _FOREIGN or own:
                key = (type(module), *own)
                if key not in known:
                    known[key] = (
                        _own(type(module))
                        if _installed(type(module))
                        else _walk(key, package(type(module)))
                    )
                self._code[id(module)] = known[key]
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

    def of(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield what a module can reach, with names: containers, and what
        stands for variables that are written.
        """
        code = self._code.get(id(module))
        if code is None:
            return
        home = "" if _installed(type(module)) else package(type(module))
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
            if self._attributes:
                yield title, self._of(holder, self._attributes)
            for name in self._read[id(code), id(holder)]:
                value = vars(holder).get(name)
                value = value.default if isinstance(value, containers.StandIn) else value
                if not _is_code(value):
                    yield f"{title}.{name}", value

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
    return isinstance(value, containers.WHOLE) and not isinstance(
        value, torch.Tensor | torch.Generator
    )


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
    if kind in containers.BUILTIN:
        return False
    return isinstance(value, containers.WHOLE) or kind.__module__.partition(".")[0] in (
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


def _own(kind: Any) -> _Code:
    """Return what the forward of an installed class names itself: its package
    has registries of its own.
    """
    found = _nothing()
    forward = inspect.unwrap(kind.forward)
    if isinstance(forward, types.FunctionType):
        for value in _named(forward, found):
            found.draws.update(_generators(value))
    return found._replace(stored={}, attributes=set())


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
        for each in _instructions(function.__code__):
            if each.opname == "STORE_ATTR":
                found.add(each.argval)
            elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                todo.append(methods.get(each.argval))
            elif each.opname == "LOAD_GLOBAL" and follows:
                value = function.__globals__.get(each.argval)
                if isinstance(value, types.FunctionType) and _ours(value.__module__, package(kind)):
                    todo.append(value)
    return found


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function, and of those in it."""
    yield from dis.get_instructions(code)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _instructions(each)


def _walk(start: Sequence[Any], home: str) -> _Code:
    found = _nothing()
    seen: set[int] = set()
    todo = list(start)
    while todo:
        value = todo.pop()
        value = getattr(value, "__func__", value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        found.draws.update(_generators(value))
        if isinstance(value, functools.partial):
            todo.append(value.func)
        elif isinstance(value, property):
            todo += [value.fget, value.fset]
        elif isinstance(value, types.ModuleType) and _ours(value.__name__, home):
            found.holders[id(value)] = value
        elif isinstance(value, type):
            for base in value.__mro__:
                if package(base) not in _FOREIGN and not containers.foreign(base, home):
                    found.holders[id(base)] = base
                    todo += vars(base).values()
        elif isinstance(value, types.FunctionType) and _ours(value.__module__, home):
            todo += _named(value, found)
    return found


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
    yield from containers.enclosed(function)
    yield getattr(function, "__wrapped__", None)
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for each in dis.get_instructions(code):
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                variables.add(each.argval)
                yield namespace.get(each.argval)
            elif each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                variables.add(each.argval)
                found.stored[id(namespace)].add(each.argval)
            elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                found.read.add(each.argval)
            elif each.opname == "STORE_ATTR" and code.co_name != "__init__":
                found.attributes.add(each.argval)
