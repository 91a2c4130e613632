"""Find, from its source, which of its children a module only calls to return their result.

A root module that ends with `return self.head(x)` returns the head's result unchanged, on every
path that gets there. The owner of the head may then hand the outputs out and start its backward
pass without a word from the root's owner. That is decided from the source and not from observed
calls: a result that was passed on and used cannot be taken back.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

from torch import nn

_HIDDEN = {
    "children",
    "modules",
    "named_children",
    "named_modules",
    "get_submodule",
    "_modules",
    "getattr",
    "vars",
}
"""Names through which a class may reach a child without its name."""


def returned_modules(module: nn.Module) -> list[nn.Module]:
    """Return the children whose calls are always `return self.child(...)`, and nothing else.

    Any doubt means no: a decorated or replaced forward, a `try`, a second use
    of the child's name in the class.
    """
    kind = type(module)
    if "forward" in vars(module):
        return []
    if kind.forward is nn.Sequential.forward:
        children = [child for child in module._modules.values() if child is not None]  # noqa: SLF001
        return (
            children[-1:]
            if children and not any(children[-1] is child for child in children[:-1])
            else []
        )
    forward = _function(kind.forward)
    if forward is None or not forward.args.args:
        return []
    this = forward.args.args[0].arg
    names = [name for node in ast.walk(forward) if (name := _returned(node, this)) is not None]
    mentioned = _mentioned(kind)
    if mentioned is None or _HIDDEN.intersection(mentioned):
        return []
    children_by_name = module._modules  # noqa: SLF001
    return [
        child
        for name in names
        if mentioned.count(name) == 1 and (child := children_by_name.get(name)) is not None
    ]


def _function(forward: object) -> ast.FunctionDef | None:
    if not inspect.isfunction(forward) or hasattr(forward, "__wrapped__"):
        return None
    tree = _parse(forward)
    if tree is None or len(tree.body) != 1:
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    refused = (ast.Try, ast.Yield, ast.YieldFrom, ast.FunctionDef, ast.Lambda)
    inside = [node for node in ast.walk(function) if node is not function]
    return None if any(isinstance(node, refused) for node in inside) else function


def _returned(node: ast.AST, this: str) -> str | None:
    """Return NAME of `return this.NAME(...)`."""
    if not (isinstance(node, ast.Return) and isinstance(node.value, ast.Call)):
        return None
    called = node.value.func
    if (
        isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Name)
        and called.value.id == this
    ):
        return called.attr
    return None


def _mentioned(kind: type[nn.Module]) -> list[str] | None:
    """Return every name in the class and its bases, but for those in `__init__`."""
    found: list[str] = []
    for base in kind.__mro__:
        if base is nn.Module or not issubclass(base, nn.Module):
            continue
        tree = _parse(base)
        if tree is None:
            return None
        for node in tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []:
            if not (isinstance(node, ast.FunctionDef) and node.name == "__init__"):
                found += [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)]
                found += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    return found


def _parse(value: object) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(value)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None
