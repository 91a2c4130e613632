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

_FOREIGN_PACKAGES = ("torch", "smdistributed", "builtins")


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
        random_packages: Packages with a generator of random numbers that are named.
        bound: Objects that functions are bound to, with words: defaults, arguments of a partial,
            the object of a method.
        closure_variables: ``id()`` of a variable of an outer function -> (words, name, the
            variable).
        stored_closure_variables: ``id()`` of such variables that are assigned to.
        used_closure_variables: ``id()`` of such variables that are used, and not only written to.
    """

    variables: dict[int, tuple[dict[str, Any], set[str]]]
    stored: dict[int, set[str]]
    holders: dict[int, Any]
    attributes: set[str]
    read: set[str]
    used: set[str]
    random_packages: set[str]
    bound: list[tuple[str, Any]]
    closure_variables: dict[int, tuple[str, str, types.CellType]]
    stored_closure_variables: set[int]
    used_closure_variables: set[int]


def _empty_code() -> _Code:
    """Return a value without names, which the search adds to."""
    stored: dict[int, set[str]] = collections.defaultdict(set)
    return _Code({}, stored, {}, set(), set(), set(), set(), [], {}, set(), set())


class GlobalState:
    """The state outside of the modules of a model that their code names.

    Attributes:
        random_packages: Packages with generators of random numbers that the code names.
        written_attributes: Names of attributes that forward passes and hooks write.
    """

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        """Search the code of modules and of their hooks. It is read, and not run.

        Args:
            modules: All modules of the model.
        """
        # Modules of the same class with the same functions have the same names.
        known: dict[tuple[int, ...], _Code] = {}
        self._code: dict[int, _Code] = {}
        self._hooks: dict[int, _Code] = {}
        for module in modules:
            own = _code_in_attributes(module)
            if package(type(module)) not in _FOREIGN_PACKAGES or own:
                key = (id(type(module)), *map(id, own))
                if key not in known:
                    known[key] = _names_of_class(type(module), own)
                self._code[id(module)] = known[key]
            hooks = hooks_of(module)
            if hooks:
                # Only their cells are followed: hooks may collect observations in module-level
                # variables.
                self._hooks[id(module)] = _find_names(hooks, package(type(module)))
        stored: dict[int, set[str]] = collections.defaultdict(set)
        attributes: set[str] = set()
        for code in known.values():
            attributes |= code.attributes
            for place, names in code.stored.items():
                stored[place] |= names
        # A variable that is never assigned to, with code or a plain value, cannot change.
        for code in known.values():
            for place, (namespace, names) in code.variables.items():
                for name in names - stored[place]:
                    if _cannot_change(namespace.get(name)):
                        names.discard(name)
        self._stored_names, self._written_names = stored, frozenset(attributes)
        self._read_names = {
            (id(code), id(holder)): _names_of_attributes(holder, code.read, self._written_names)
            for code in known.values()
            for holder in code.holders.values()
        }
        by_kind: dict[type, list[Any]] = {}
        for module in modules:
            hooks = [hook for kind in HOOKS for hook in module.__dict__[kind].values()]
            by_kind.setdefault(type(module), []).extend(hooks)
        self.written_attributes = frozenset().union(
            *(_find_written_attributes(hooks, kind) for kind, hooks in by_kind.items())
        )
        self.random_packages = frozenset().union(*(code.random_packages for code in known.values()))
        self._containers_by_id: dict[int, containers.Namespace] = {}
        every = [*known.values(), *self._hooks.values()]
        self._used_names = frozenset().union(*(code.used for code in known.values()))
        self._stored_closure_variables = frozenset().union(
            *(code.stored_closure_variables for code in every)
        )
        self._used_closure_variables = frozenset().union(
            *(code.used_closure_variables for code in every)
        )

    def iterate_state(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield (name, state) for the state outside of the modules that a module can reach.

        The state is a container, an object, or a container that stands for variables which are
        written. Each name is unique: the second one of two equal names ends with "(2)".

        The present values of the variables are read. Nothing is called or written.

        Args:
            module: A module of the model.
        """
        if id(module) not in self._code and id(module) not in self._hooks:
            return
        home = "" if _is_installed(type(module)) else package(type(module))
        names: collections.Counter[str] = collections.Counter()
        for name, value in self._iterate_module_state(module, home):
            names[name] += 1
            yield name if names[name] == 1 else f"{name} ({names[name]})", value

    def _iterate_module_state(self, module: nn.Module, home: str) -> Iterator[tuple[str, Any]]:
        """Yield (name, state) as `iterate_state`, with names that may be equal.

        A namespace that code assigns to is yielded as a `containers.Namespace`, the same object
        every time.

        Args:
            module: A module of the model.
            home: The package of the module's class; empty for an installed one.
        """
        code, hooks = self._code.get(id(module)), self._hooks.get(id(module))
        if hooks is not None:
            yield from self._iterate_closure_state(hooks, home)
        if code is None:
            return
        for place, (namespace, names) in code.variables.items():
            for name in sorted(names):
                value = namespace.get(name)
                if _is_watched(value, home):
                    yield f"globals()[{name}]", value
            if names & self._stored_names.get(place, set()):
                yield (
                    f"globals() of {namespace.get('__name__')}",
                    self._container_of(namespace, self._stored_names[place]),
                )
        for holder in code.holders.values():
            title = getattr(holder, "__qualname__", holder.__name__)
            of_function = isinstance(holder, types.FunctionType)
            attributes = self._written_names
            if of_function:
                attributes = self._written_names & self._used_names
            if attributes:
                yield title, self._container_of(holder, attributes)
            for name in self._read_names[id(code), id(holder)]:
                value = vars(holder).get(name)
                if isinstance(value, containers.AttributeDescriptor):
                    value = value.default
                if not _is_code(value):
                    yield f"{title}.{name}", value
        yield from self._iterate_closure_state(code, home)
        for title, value in code.bound:
            if _is_watched(value, home):
                yield title, value

    def _iterate_closure_state(self, code: _Code, home: str) -> Iterator[tuple[str, Any]]:
        """Yield (name, state) for the variables of outer functions that are used.

        A closure variable that is assigned to is yielded as a `containers.ClosureVariable`, the
        same object every time.

        Args:
            code: The names in the code.
            home: The package of the module's class; empty for an installed one.
        """
        for place, (title, name, cell) in code.closure_variables.items():
            if place not in self._used_closure_variables:
                continue
            if place in self._stored_closure_variables:
                yield (
                    title,
                    self._containers_by_id.setdefault(
                        place, containers.ClosureVariable(cell, name)
                    ),
                )
            value = containers.read_cell(cell)
            if not _is_code(value) and _is_watched(value, home):
                yield f"what is in {title}", value

    def names_attribute(self, name: str) -> bool:
        """Return whether code of the modules reads an attribute of this name, of any object."""
        return any(name in code.read for code in self._code.values())

    def _container_of(self, holder: Any, names: set[str] | frozenset[str]) -> containers.Namespace:
        """Return the container of a namespace or class: the same one every time."""
        container = containers.Namespace(holder, frozenset(names))
        return self._containers_by_id.setdefault(id(holder), container)


def _cannot_change(value: Any) -> bool:
    """Return whether a value is code or plain, and so cannot change in place.

    A module outside the model, a tensor and a generator of random numbers can.

    Plain values are numbers, strings, None and the like.
    """
    if isinstance(value, torch.Tensor | torch.Generator) or containers.is_module_of_other_model(
        value
    ):
        return False
    return isinstance(value, containers.NEVER_SEARCHED)


def _is_watched(value: Any, home: str) -> bool:
    """Return whether the value of a variable is followed.

    Args:
        value: The value.
        home: The package of the module's class: objects of other packages are followed only if they
            have plain attributes, or are tensors, arrays or generators.
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


def _names_of_attributes(holder: Any, read: set[str], stored: frozenset[str]) -> list[str]:
    """Return the names in a class or a Python module that code reads, and that may have a container
    or an object.

    Args:
        holder: The class or Python module.
        read: Names of attributes that are read.
        stored: Names of attributes that are written.

    Returns:
        The names, sorted. Nothing is called.
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
    """Return whether a value is code, or a plain value.

    Containers, tensors and modules outside of the model are neither.
    """
    kind: Any = type(value)
    if kind in containers.BUILTIN_CONTAINERS or containers.is_module_of_other_model(value):
        return False
    if isinstance(value, containers.NEVER_SEARCHED):
        return True
    return kind.__module__.partition(".")[0] in ("builtins", "smdistributed")


def package(kind: type) -> str:
    """Return the name of the top-level package of a class, such as "torch"."""
    return kind.__module__.partition(".")[0]


def _is_installed(kind: Any) -> bool:
    """Return whether a class is of an installed package, and not of the script."""
    return containers.is_foreign(kind, "")


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward and backward hooks of a module, of all kinds."""
    return [hook for kind in HOOKS for hook in module.__dict__[kind].values()]


def _code_in_attributes(module: nn.Module) -> list[Any]:
    """Return the functions in the attributes of a module, and the classes of the objects there.

    Hooks are left out. For a module of an installed class there are no classes.

    Functions in nested tuples, lists and dictionaries are returned, too. Nothing is called.
    """
    home = package(type(module))
    code: list[Any] = []
    for name, value in module.__dict__.items():
        if name in HOOKS:
            continue
        code += [
            item for item in (value, *_nested_items(value)) if isinstance(item, _FUNCTION_CLASSES)
        ]
        if home not in _FOREIGN_PACKAGES and not _is_installed(type(module)):
            objects = map(containers.represented_object, containers.find_containers(value, home))
            kinds = dict.fromkeys(map(type, objects))
            code += [kind for kind in kinds if not containers.is_foreign(kind, home)]
    return code


_FUNCTION_CLASSES = (types.FunctionType, types.MethodType, functools.partial)


def _nested_items(value: Any) -> Iterator[Any]:
    """Yield the items of nested tuples, lists and dictionaries, with the inner containers."""
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


def _names_of_class(kind: type, own: Sequence[Any]) -> _Code:
    """Return the names in the methods of a module's class.

    Args:
        kind: The class.
        own: Functions and classes of objects that a module has in attributes.

    Returns:
        The names. For an installed class without such functions, those of its forward alone.
    """
    if not _is_installed(kind):
        return _find_names([kind, *own], package(kind))
    code = _names_of_installed_forward(kind)
    if not own:
        return code
    return _find_names(own, "", code)


def _names_of_installed_forward(kind: Any) -> _Code:
    """Return the names in the forward of an installed class, without those that it writes.

    Functions that it calls are not searched, because its package has registries of its own.

    An installed class is one of a package outside of the script. Nothing is called.
    """
    code = _empty_code()
    forward = inspect.unwrap(kind.forward)
    if isinstance(forward, types.FunctionType):
        for value in _add_names(forward, code):
            code.random_packages.update(_random_packages(value))
    code.attributes.clear()
    return code._replace(stored=collections.defaultdict(set))


def _find_written_attributes(start: Sequence[Any], kind: type) -> set[str]:
    """Return the names of attributes that functions write, and the functions that they call.

    The code is read, and not run.

    Args:
        start: The functions.
        kind: The class with the methods that are followed; other functions are followed if they are
            in its package.
    """
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if package(base) not in _FOREIGN_PACKAGES:
            methods.update(vars(base))
    follows_functions = not _is_installed(kind)
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
                if isinstance(value, types.FunctionType) and _is_own_module(
                    value.__module__, package(kind)
                ):
                    to_visit.append(value)
    return written


def _find_names(start: Sequence[Any], home: str, code: _Code | None = None) -> _Code:
    """Return the names in functions and classes, and in all functions that they call.

    Functions of other packages are not searched.

    The code is read, and not run. Objects that a function is bound to are added with words for
    them.

    Args:
        start: The functions and classes.
        home: The package that they belong to; empty: only the script's own code.
        code: Names that were found before: this value is added to, and returned. None: a new one.
    """
    code = code or _empty_code()
    visited: set[int] = set()
    to_visit = list(start)
    while to_visit:
        value = to_visit.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        random_packages = list(_random_packages(value))
        code.random_packages.update(random_packages)
        owner = getattr(value, "__self__", None)  # of a method: the object that it is bound to
        if isinstance(value, _BOUND_CLASSES) and not random_packages and not _is_code(owner):
            code.bound.append((f"the object of {value.__qualname__}", owner))
            to_visit.append(type(owner))
        if isinstance(value, functools.partial):
            name = getattr(value.func, "__qualname__", type(value.func).__qualname__)
            code.bound.append((f"arguments of {name}", (value.args, value.keywords)))
            to_visit += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, property):
            to_visit += [value.fget, value.fset]
        elif isinstance(value, types.ModuleType):
            if _is_own_module(value.__name__, home):
                code.holders[id(value)] = value
        elif isinstance(value, type):
            for base in value.__mro__:
                if package(base) not in _FOREIGN_PACKAGES and not containers.is_foreign(base, home):
                    code.holders[id(base)] = base
                    to_visit += vars(base).values()
        elif isinstance(value, types.FunctionType):
            if _is_own_module(value.__module__, home):
                to_visit += _add_names(value, code)
        else:
            # A bound or a static method, a function with a cache, an object with methods.
            to_visit += [getattr(value, name, None) for name in ("__func__", "__wrapped__")]
            kind: type = type(value)
            if package(kind) not in _FOREIGN_PACKAGES and not containers.is_foreign(kind, home):
                to_visit.append(kind)
    return code


_BOUND_CLASSES = (types.MethodType, types.BuiltinMethodType)


def _random_packages(value: Any) -> Iterator[str]:
    """Yield "random" or "numpy", if a value is this package or a function of its generator.

    The packages have a generator of random numbers. Nothing is yielded for other values.
    """
    # A function of the generator, such as random.random or numpy.random.rand, is bound to it.
    owner = type(getattr(value, "__self__", None)).__module__
    name = value.__name__ if isinstance(value, types.ModuleType) else owner
    if name == "random":
        yield "random"
    elif name.partition(".")[0] == "numpy":
        yield "numpy"


def _is_own_module(name: str | None, home: str) -> bool:
    """Return whether a Python module is of the script, or of the package ``home``.

    Args:
        name: Name of the Python module; None for a function without one.
        home: The package; empty: only Python modules outside of installed packages count.
    """
    if name is None:
        name = ""
    # `is_foreign` takes a class, so it gets one of this Python module.
    probe = type("", (), {"__module__": name})
    return name.partition(".")[0] not in _FOREIGN_PACKAGES and not containers.is_foreign(
        probe, home
    )


def _add_names(function: types.FunctionType, code: _Code) -> Iterator[Any]:
    """Add the names in a function to ``code``, and yield the values that it may call.

    Values of its closure, its defaults and the global variables that it names. An attribute that
    ``__init__`` writes does not count: it belongs to a new object.

    The generator must be exhausted: it adds names as it goes. The function is not called.

    Args:
        function: The function.
        code: Gets the names.

    Yields:
        Values that are no functions are among them.
    """
    namespace = function.__globals__
    variables = code.variables.setdefault(id(namespace), (namespace, set()))[1]
    _add_closure_variables(function, code)
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


def _add_closure_variables(function: types.FunctionType, code: _Code) -> None:
    """Add the variables of outer functions that a function uses to ``code``.

    Names are added to ``code.closure_variables``, and to the sets of stored and of used ones. The
    function is not called.
    """
    uses = enclosed.uses(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        title = f"variable {name} of {function.__qualname__}"
        code.closure_variables.setdefault(id(cell), (title, name, cell))
        if name in uses.stored:
            code.stored_closure_variables.add(id(cell))
        if name in uses.used:
            code.used_closure_variables.add(id(cell))
