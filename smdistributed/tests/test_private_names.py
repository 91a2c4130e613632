"""docs/smdistributed-torch.md names every private part of torch that the package reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm, module
from torch.utils import _python_dispatch

PAGE = Path(__file__).parents[2] / "docs" / "smdistributed-torch.md"
PACKAGE = Path(__file__).parents[1] / "smdistributed" / "modelparallel"
BACKEND: Any = torch._C
FUNCTION: Any = torch.autograd.Function
PARTS: tuple[Any, ...] = (
    torch,
    torch.utils,
    torch.overrides,
    torch.ones(1),
    nn.Module(),
    BACKEND,
    BACKEND._autograd,
    BACKEND._functorch,
    torch.amp.GradScaler,
    FUNCTION._backward_cls,
    torch.autograd.Variable,
    distributed_c10d,
    batchnorm,
    module,
    _python_dispatch,
)
"""Parts of torch of which code may take a private name."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names(node: ast.AST) -> Iterator[str]:
    """Yield the private names that a part of a program may take from torch."""
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not own:
            yield node.attr
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        yield from (node.module or "").split(".")
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value  # vars(module)["_buffers"]


def read_by(file: Path) -> set[str]:
    program = ast.parse(file.read_text(encoding="utf-8"))
    private_names = {name for node in ast.walk(program) for name in names(node) if private(name)}
    return {name for name in private_names if any(hasattr(part, name) for part in PARTS)}


@pytest.mark.core
def test_every_private_name_of_torch_is_on_the_page() -> None:
    code = " ".join(re.findall(r"`([^`]+)`", PAGE.read_text(encoding="utf-8")))
    on_page = set(re.findall(r"\w+", code))
    taken = {file.name: read_by(file) for file in sorted(PACKAGE.rglob("*.py"))}
    assert len(set().union(*taken.values())) > 20
    missing = {
        file: names_taken - on_page for file, names_taken in taken.items() if names_taken - on_page
    }
    assert not missing
