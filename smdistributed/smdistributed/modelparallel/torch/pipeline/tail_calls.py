"""Find the children of a module that it only calls to return their result.

A root module that ends with `return self.head(x)` returns the head's result unchanged. Then the
owner of the head may send the outputs to all ranks and start its backward pass, without a message
from the root's owner. The source of the module decides this, and not observed calls: a result that
was passed on and used cannot be taken back.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

from torch import nn

_INDIRECT_NAMES = {
    "children",
    "modules",
    "named_children",
    "named_modules",
    "get_submodule",
    "_modules",
    "getattr",
    "vars",
}
"""Names with which a class may reach a child without the child's name."""


def returned_modules(module: nn.Module) -> list[nn.Module]:
    """Return the children that a module only calls as `return self.child(...)`; an empty list if
    there is none.

    In doubt a child is left out: after a decorated or replaced forward, a `try`, or a second use of
    the child's name in the class.

    The source file of the class is read, and nothing is called.
    """
    kind = type(module)
    # A forward that was replaced on this module: the source of the class does not tell.
    if "forward" in vars(module):
        return []
    if kind.forward is nn.Sequential.forward:
        # The last child returns the result, unless it is in the chain twice.
        children = [child for child in module._modules.values() if child is not None]  # noqa: SLF001
        if not children or any(children[-1] is child for child in children[:-1]):
            return []
        return children[-1:]
    forward = _parse_forward(kind.forward)
    if forward is None or not forward.args.args:
        return []
    mentioned = _names_in_class(kind)
    if mentioned is None or _INDIRECT_NAMES.intersection(mentioned):
        return []
    this = forward.args.args[0].arg
    returned = []
    for node in ast.walk(forward):
        name = _name_of_returned_call(node, this)
        if name is None or mentioned.count(name) != 1:
            continue
        child = module._modules.get(name)  # noqa: SLF001
        if child is not None:
            returned.append(child)
    return returned


def _parse_forward(forward: object) -> ast.FunctionDef | None:
    """Return the syntax tree of a forward; None in doubt.

    Doubtful is a forward that is wrapped or decorated, has no source, or has a `try`, a `yield` or
    a function inside.
    """
    if not inspect.isfunction(forward) or hasattr(forward, "__wrapped__"):
        return None
    tree = _parse(forward)
    if tree is None or len(tree.body) != 1:
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    refused = (ast.Try, ast.Yield, ast.YieldFrom, ast.FunctionDef, ast.Lambda)
    for node in ast.walk(function):
        if node is not function and isinstance(node, refused):
            return None
    return function


def _name_of_returned_call(node: ast.AST, this: str) -> str | None:
    """Return NAME of a statement `return this.NAME(...)`; None for any other node."""
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


def _names_in_class(kind: type[nn.Module]) -> list[str] | None:
    """Return all names in a class and its bases, without those in `__init__`.

    None if the source is missing.

    A name that is mentioned twice is in the list twice.
    """
    names: list[str] = []
    for base in kind.__mro__:
        if base is nn.Module or not issubclass(base, nn.Module):
            continue
        tree = _parse(base)
        if tree is None:
            return None
        definition = tree.body[0]
        if not isinstance(definition, ast.ClassDef):
            continue
        for statement in definition.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute):
                    names.append(node.attr)
                elif isinstance(node, ast.Name):
                    names.append(node.id)
    return names


def _parse(value: object) -> ast.Module | None:
    """Return the syntax tree of a function or class; None if its source is missing."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(value)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None
