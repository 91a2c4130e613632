"""docs/smdistributed-torch.md names every private part of torch that the package reads."""

from __future__ import annotations

import ast
import collections
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "smdistributed-torch.md"
PACKAGE = Path(__file__).parents[1] / "smdistributed" / "modelparallel"
BACKEND: Any = torch._C
FUNCTION: Any = torch.autograd.Function
OBJECTS: tuple[Any, ...] = (
    torch.ones(1),
    nn.Module(),
    torch.optim.SGD([nn.Parameter(torch.ones(1))]),
    torch.amp.GradScaler,
    torch.autograd.Variable,
    FUNCTION._backward_cls,
    BACKEND._autograd,
    BACKEND._functorch,
)
"""Objects of torch that have more private names than their modules and classes show."""

TUPLES = frozenset(dir(collections.namedtuple("TUPLES", "")))
"""Names of every NamedTuple, such as ``_replace``: Python's, not torch's."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def names(node: ast.AST) -> Iterator[str]:
    """Yield the private names that a part of a program may take from torch."""
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not own:
            yield node.attr
    elif isinstance(node, ast.Import):
        for imported in node.names:
            if is_of_torch(imported.name):
                yield from imported.name.split(".")
    elif isinstance(node, ast.ImportFrom) and is_of_torch(node.module or ""):
        yield from (node.module or "").split(".")
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value  # vars(module)["_buffers"]


def is_of_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def not_names(program: ast.AST) -> Iterator[ast.AST]:
    """Yield the texts of a program that are the words of a message, or declare own attributes."""
    for node in ast.walk(program):
        if isinstance(node, ast.JoinedStr):
            yield from node.values
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from ast.walk(node.value)


def read_by(program: ast.AST) -> set[str]:
    """Return the private names that a program may take from torch, and other private names."""
    left_out = set(not_names(program))
    nodes = [node for node in ast.walk(program) if node not in left_out]
    return {name for node in nodes for name in names(node) if private(name)}


def import_modules(program: ast.AST) -> None:
    """Import the modules of torch that a program imports."""
    modules: list[str] = []
    for node in ast.walk(program):
        if isinstance(node, ast.Import):
            modules += [imported.name for imported in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    for module in filter(is_of_torch, modules):
        importlib.import_module(module)


def torchs_private_names() -> set[str]:
    """Return the private names in all modules of torch that are imported, and in their classes."""
    present = {name for item in OBJECTS for name in dir(item)}
    for name, module in tuple(sys.modules.items()):
        if is_of_torch(name) and isinstance(module, ModuleType):
            present.update(name.split("."))
            present.update(vars(module))
            for value in tuple(vars(module).values()):
                # isinstance() would ask torch's deprecated objects for their class.
                is_class = issubclass(type(value), type)
                if is_class and is_of_torch(value.__module__ or ""):
                    present.update(dir(value))
    return {name for name in present if private(name)} - TUPLES


@pytest.mark.core
def test_every_private_name_of_torch_is_on_the_page() -> None:
    code = " ".join(re.findall(r"`([^`]+)`", PAGE.read_text(encoding="utf-8")))
    on_page = set(re.findall(r"\w+", code))
    programs: dict[str, ast.AST] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        programs[name] = ast.parse(file.read_text(encoding="utf-8"))
        import_modules(programs[name])
    torchs = torchs_private_names()
    taken = {file: read_by(program) & torchs for file, program in programs.items()}
    assert len(set().union(*taken.values())) > 20
    missing = {
        file: names_taken - on_page for file, names_taken in taken.items() if names_taken - on_page
    }
    assert not missing


FORMS = {
    "import torch\ntorch._inductor": "_inductor",
    "import torch._inductor": "_inductor",
    "from torch.optim import _functional": "_functional",
    "def f(tensor): tensor._is_view()": "_is_view",
    "def f(optimizer): optimizer._optimizer_step_pre_hooks": "_optimizer_step_pre_hooks",
    "from torch.optim.lr_scheduler import LRScheduler\nLRScheduler._update_lr": "_update_lr",
    "def f(module): vars(module)['_buffers']": "_buffers",
}
"""A program, and the private name of torch that it takes."""


def test_each_form_of_a_private_name_is_found() -> None:
    programs = {ast.parse(text): name for text, name in FORMS.items()}
    for program in programs:
        import_modules(program)
    torchs = torchs_private_names()
    for program, name in programs.items():
        assert read_by(program) & torchs == {name}
