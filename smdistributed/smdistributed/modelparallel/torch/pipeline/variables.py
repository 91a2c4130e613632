"""Context variables that a microbatch has set: a remote call takes them along.

Hugging Face collects hidden states, attentions and the logits of routers so: hooks on the layers
append to a list that a context variable of the model has. It sets these hooks when a model that
collects runs for the first time, so a rank that owns such layers is told to set its own.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.transport.containers import PLAIN_CLASSES

_UNSET = object()
_COLLECTOR = ("transformers.utils.output_capturing", "_active_collector")
"""Python module and name of Hugging Face's collector of outputs."""
_HOOKED = "_output_capturing_hooks_installed"
"""Attribute of a model with hooks that collect outputs."""


def find_changed(base: contextvars.Context) -> list[tuple[tuple[str, str], Any]]:
    """Return the names and values of the context variables of this thread that differ from another
    context's.

    A variable without a name is left out, because other ranks cannot find it.

    Args:
        base: The other context.

    Returns:
        For each variable ((Python module, name in the module), value).
    """
    named = []
    for variable, value in contextvars.copy_context().items():
        if base.get(variable, base) is value:
            continue
        name = _name(variable)
        if name is not None and (name != _COLLECTOR or value):
            named.append((name, value))
    return named


class LeftVariables:
    """Values of context variables that microbatches have set and not reset.

    The next microbatch sees these values. The thread that called the step does not: there the
    values count that the script sets between steps.
    """

    def __init__(self) -> None:
        self._values: dict[contextvars.ContextVar[Any], tuple[Any, Any]] = {}

    def begin(self, base: contextvars.Context) -> contextvars.Context:
        """Return the variables that the microbatches of a step begin with.

        Values that the script has set again since then are forgotten.

        The base itself is not changed.

        Args:
            base: The variables of the thread that calls the step.
        """
        result = base.copy()
        for variable, (value, before) in list(self._values.items()):
            if base.get(variable, None) is before:
                result.run(variable.set, value)
            else:
                del self._values[variable]
        return result

    def end(
        self, microbatch: contextvars.Context, start: contextvars.Context, base: contextvars.Context
    ) -> list[contextvars.ContextVar[Any]]:
        """Store the variables that a microbatch has set and not reset, and return them.

        Variables of torch and of this library are left out, because each rank sets its own.

        Args:
            microbatch: The variables at the end of the microbatch.
            start: The variables that the next microbatch begins with. They are changed.
            base: The variables of the thread that calls the step.

        Returns:
            The variables that were stored; an empty list if all are as before.
        """
        left = []
        for variable, value in microbatch.items():
            before = start.get(variable, _UNSET)
            is_plain = type(value) is type(before) and isinstance(value, PLAIN_CLASSES)
            is_same = value is before or (is_plain and value == before)
            if not is_same and not _is_of_torch(variable):
                start.run(variable.set, value)
                self._values[variable] = (value, base.get(variable, None))
                left.append(variable)
        return left


def title(variable: contextvars.ContextVar[Any]) -> str:
    """Return words for a variable, such as "context variable 'depth'"."""
    return f"context variable {variable.name!r}"


def split_changed(base: contextvars.Context) -> tuple[tuple[tuple[str, str], ...], list[Any]]:
    """Return the names, and in the same order the values, of the variables that a call has set.

    Args:
        base: The variables before the call.
    """
    named = find_changed(base)
    return tuple(name for name, _ in named), [value for _, value in named]


def _is_of_torch(variable: contextvars.ContextVar[Any]) -> bool:
    """Return whether a variable is of torch or of this library: each rank sets its own."""
    name = _name(variable)
    return name is not None and name[0].partition(".")[0] in ("torch", "smdistributed")


def collects(names: Sequence[tuple[str, str]]) -> bool:
    """Return whether Hugging Face's collector is one of the names."""
    return _COLLECTOR in names


def is_of_collector(hook: Any) -> bool:
    """Return whether a hook is one with which Hugging Face collects outputs."""
    return getattr(hook, "__module__", None) == _COLLECTOR[0]


def hooked(modules: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the numbers of the modules that are models with Hugging Face's hooks set."""
    return tuple(number for number, module in enumerate(modules) if module.__dict__.get(_HOOKED))


def put(
    names: Sequence[tuple[str, str]], values: Sequence[Any], models: Sequence[nn.Module]
) -> None:
    """Set variables in the present context, and Hugging Face's hooks of models.

    Models are looked at only if there are any; then transformers must be installed.

    Args:
        names: (Python module, name in the module) of each variable. The module is imported.
        values: The values, in the same order.
        models: The models that get the hooks, unless they have them.

    Raises:
        ImportError: This rank has no such Python module.
        AttributeError: The Python module has no such variable.
    """
    for (module, name), value in zip(names, values, strict=True):
        holder: Any = importlib.import_module(module)
        for part in name.split("."):
            holder = getattr(holder, part)
        holder.set(value)
    for model in models:
        importlib.import_module(_COLLECTOR[0]).maybe_install_capturing_hooks(model)


@functools.lru_cache(1024)
def _name(variable: contextvars.ContextVar[Any]) -> tuple[str, str] | None:
    """Return (Python module, name in it) under which every rank finds a variable.

    For example ``("model", "depth")``. A variable of a class has a name like ``Model.outputs``.
    None if there is no name.

    The Python modules that are loaded are searched; none is imported. The answer is cached, also if
    it is None.
    """
    collector = getattr(sys.modules.get(_COLLECTOR[0]), _COLLECTOR[1], None)
    if getattr(collector, "context_var", None) is variable:
        return _COLLECTOR
    # Copies of the items, because another thread may import meanwhile.
    for module, content in list(sys.modules.items()):
        for name, value in list(getattr(content, "__dict__", {}).items()):
            if value is variable:
                return module, name
    for module, content in list(sys.modules.items()):
        for name, value in list(getattr(content, "__dict__", {}).items()):
            if isinstance(value, type) and value.__module__ == module:
                for attribute, attribute_value in list(vars(value).items()):
                    if attribute_value is variable:
                        return module, f"{name}.{attribute}"
    return None
