"""Modules that scripts of 2021 to 2023 import and that no longer exist: ``torch._six``, and two
functions of ``apex``.

A finder at the end of Python's list creates them. So a real module has precedence, and a process
that imports none of them loses no time. Each is announced once, in a line on standard error.
``torch.sagemaker``, smp's second version, has no stand-in: its import fails with advice.
"""

from __future__ import annotations

import collections.abc
import importlib.abc
import importlib.machinery
import math
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


SECOND = "torch.sagemaker"
"""The module of smp's second version. trainworks-preflight has the same three texts."""

SECOND_IS = (
    "it is smp's second version, a conda package of AWS's, and these images have only the first one"
)

INSTEAD_OF_SECOND = (
    "Use FSDP2 of PyTorch under torchrun: for each layer and the model, call"
    " torch.distributed.fsdp.fully_shard(module, mesh=mesh) in the place of tsm.transform(model)."
    ' docs/smdistributed.md, "From torch.sagemaker to FSDP2", has a line for each feature'
)


APEX_AMP = (
    "Take it out of the script: `fp16` or `bf16` of smp's configuration and"
    " smp.model_creation(dtype=...) are its mixed precision, and smp.amp.GradScaler scales losses"
)
"""What to do instead of apex.amp."""


def install() -> None:
    """Add the finder of these modules to Python's list. A second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of ``MODULES``; Python asks it last."""

    def find_spec(self, fullname: str, *_where: object) -> importlib.machinery.ModuleSpec | None:
        if fullname == SECOND:
            raise ModuleNotFoundError(
                f"No module named {SECOND!r}: {SECOND_IS}. {INSTEAD_OF_SECOND}", name=SECOND
            )
        # A real apex without one of the modules stays as it is.
        parent = sys.modules.get("apex") if fullname.startswith("apex.") else None
        if parent is not None and not isinstance(parent.__loader__, _Finder):
            return None
        if fullname == "apex.amp":
            # No ModuleNotFoundError: `from apex import amp` would swallow it, and say less.
            raise ImportError(
                f"apex is not installed, and smp does not work with apex.amp. {APEX_AMP}",
                name=fullname,
            )
        if fullname not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, origin="trainworks", is_package=fullname == "apex"
        )

    def create_module(self, _spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        remark, contents = MODULES[module.__name__]
        vars(module).update(contents)
        if remark:
            print(
                f"smdistributed: the module {module.__name__} is not installed: {remark}",
                file=sys.stderr,
            )


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag: Any, tensor_lists: Any, *args: Any
) -> Any:
    """Call a function of this module on lists of tensors. Apex calls its own function in chunks."""
    return op(0, noop_flag, tensor_lists, *args)


multi_tensor_applier.available = True  # type: ignore[attr-defined]


def multi_tensor_scale(
    chunk_size: int,  # noqa: ARG001  the place of the real function's argument
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    scale: float,
) -> None:
    """Write the tensors of the first list, scaled, into those of the second.

    Args:
        chunk_size: Not used.
        noop_flag: Set to 1 if an element of a source is infinite or not a number.
        tensor_lists: Sources and destinations, which may have different types.
        scale: The factor.
    """
    for source, destination in zip(*tensor_lists, strict=True):
        destination.copy_(source.float() * scale)
        if not source.isfinite().all():
            noop_flag.fill_(1)


def multi_tensor_l2norm(
    chunk_size: int,  # noqa: ARG001  the place of the real function's argument
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    per_tensor: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors of a list together, and the norm of each tensor.

    Args:
        chunk_size: Not used.
        noop_flag: A tensor on the device of the results.
        tensor_lists: One list of tensors.
        per_tensor: Whether to return the norm of each tensor; else the second result is empty.
    """
    values = [float(tensor.detach().float().norm()) for tensor in tensor_lists[0]]
    norms = noop_flag.float().new_tensor(values)
    total = norms.norm()[None]
    if not per_tensor:
        return total, norms[:0]
    return total, norms


MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "torch._six": (
        "its names come from Python now",
        {
            "inf": math.inf,
            "nan": math.nan,
            "string_classes": (str, bytes),
            "int_classes": int,
            "container_abcs": collections.abc,
        },
    ),
    "apex": ("", {}),
    "apex.multi_tensor_apply": (
        "a stand-in calls functions of amp_C",
        {"multi_tensor_applier": multi_tensor_applier},
    ),
    "amp_C": (
        "multi_tensor_scale and multi_tensor_l2norm are plain PyTorch",
        {"multi_tensor_scale": multi_tensor_scale, "multi_tensor_l2norm": multi_tensor_l2norm},
    ),
}
"""Name of a module -> (remark for the user, contents). The remark of a parent package is empty."""
