"""Share the parameters of a model: which modules are gathered alone, and what
takes the place of a parameter.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.exceptions import SMPConfigError
from smdistributed.modelparallel.torch.job.state import state

from . import mesh
from .order import BlockOrder

__all__ = ["blocks", "shard", "sharded_parameter"]

Named = list[tuple[str, torch.Tensor]]

_replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the id of what was there before


def sharded_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return the shared parameter that took the place of another one; or that one itself."""
    return _replaced[id(parameter)][1] if id(parameter) in _replaced else parameter


def blocks(root: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: repeated layers.

    They are the children of a ModuleList or a Sequential whose class is there more than once. Only
    the outermost count: what is inside may be called by one rank and not by another. So may
    children of a ModuleDict of one class, which are chosen by name: neither they nor what is in
    them are blocks. A block that shares a parameter with what is outside is not one; what is in it
    may be.
    """
    uses = collections.Counter(_parameters_of(root.modules()))
    found, seen = [], set()

    def walk(module: nn.Module) -> None:
        listed, named = (
            isinstance(module, nn.ModuleList | nn.Sequential),
            isinstance(module, nn.ModuleDict),
        )
        kinds = collections.Counter(map(type, module.children()))
        for child in module.children():
            if id(child) in seen or (named and kinds[type(child)] > 1):
                continue
            seen.add(id(child))
            mine = collections.Counter(_parameters_of(child.modules()))
            alone = all(count == uses[key] for key, count in mine.items())
            called = type(child).forward is not nn.Module.forward
            if listed and kinds[type(child)] > 1 and mine and alone and called:
                found.append(child)
            else:
                walk(child)

    walk(root)
    return found


def _parameters_of(modules: Iterable[nn.Module]) -> list[int]:
    return [id(p) for module in modules for p in module._parameters.values() if p is not None]  # noqa: SLF001


def shard(
    root: nn.Module, ready: Callable[[Named], None], *, half: torch.dtype | None, unused: bool
) -> BlockOrder:
    """Share the parameters of a model, block by block, so that no rank has all of it at a time.

    Collective.

    Parameters without dimensions, and those that are not floating-point
    numbers, stay whole on each rank.

    Args:
        root: The model.
        ready: Gives parameters and buffers, with their names, their memory and
            first values, equal on all ranks.
        half: The type in which blocks run; the parameters are float32 then. None: their own.
        unused: Ranks may use different parameters.

    Returns:
        What compares the ranks in each pass.

    Raises:
        SMPConfigError: A parameter has no values, a block has several types, or
            a module changes its parameter.
    """
    for name, module in root.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise SMPConfigError(
                f"{name or 'the model'} ({type(module).__name__}) has a max_norm: it scales its"
                " parameter when it is called, and with sharded data parallelism that is a copy."
                " Leave max_norm out"
            )
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise SMPConfigError(
                f"{name or 'the model'} ({type(module).__name__}) has sparse=True:"
                " a sparse gradient cannot be summed over the ranks that share a parameter."
                " Make it with sparse=False"
            )
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    over, parts = mesh.mesh(), blocks(root)
    done: set[int] = set()
    _replaced.clear()
    names = {id(t): n for n, t in (*root.named_buffers(), *root.named_parameters())}
    apart = {p for p in root.parameters() if p.dim() == 0 or not p.is_floating_point()}
    limit = state.cfg.sdp_max_live_parameters
    kept = limit is not None and sum(p.numel() for p in root.parameters()) <= limit
    options: dict[str, Any] = {"mesh": over}
    if half is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    if apart and "ignored_params" not in inspect.signature(fully_shard).parameters:
        # PyTorch 2.6 has no such option.
        found = ", ".join(sorted(names[id(p)] for p in apart))
        raise SMPConfigError(
            f"PyTorch {torch.__version__} cannot leave parameters whole that have no rows: {found}"
        )
    if apart:
        options["ignored_params"] = apart
    for module in [*parts, root]:
        holders = [
            (holder, key, parameter)
            for holder in module.modules()
            for key, parameter in holder._parameters.items()  # noqa: SLF001
            if parameter is not None
            and not mesh.is_sharded(parameter)
            and id(parameter) not in done
        ]
        buffers = [buffer for buffer in module.buffers() if id(buffer) not in done]
        mine = {id(t): t for t in (*(parameter for _, _, parameter in holders), *buffers)}
        _check([(names[key], t) for key, t in mine.items()])
        ready([(names[key], t) for key, t in mine.items()])
        done |= mine.keys()
        _check_types(
            [(names[id(p)], p) for _, _, p in holders if p not in apart and p.requires_grad]
        )
        fully_shard(module, reshard_after_forward=module is not root and not kept, **options)
        for holder, key, old in holders:
            new = holder._parameters[key]  # noqa: SLF001
            if new is not None and new is not old:
                _replace(old, new)
    unused = unused and hasattr(root, "set_reduce_scatter_unused_params")  # not of every PyTorch
    if unused:
        root.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return BlockOrder(root, gathered_again=not kept, unused=unused)


def _replace(old: nn.Parameter, new: nn.Parameter) -> None:
    """Take note of a new parameter, and free the memory of the old one, whoever still has it."""
    if id(old) in _replaced:
        return
    _replaced[id(old)] = old, new
    vars(new).update(vars(old))
    part: Any = mesh.local(new).detach()
    part.ds_numel = part.numel()
    # Public scripts look these up.
    vars(new).update(ds_shape=new.shape, ds_numel=new.numel(), ds_tensor=part)
    old.data = torch.empty(0, dtype=old.dtype)


def _check(named: Named) -> None:
    for name, tensor in named:
        if tensor.is_meta:
            raise SMPConfigError(
                f"{name} is on the meta device and has no values."
                " Make the model in smp.delay_param_initialization() or smp.model_creation():"
                " then no rank has all of it either"
            )


def _check_types(named: Named) -> None:
    first: dict[torch.dtype, str] = {}
    for name, tensor in named:
        first.setdefault(tensor.dtype, name)
    if len(first) > 1:
        found = ", ".join(
            f"{name} is {str(kind).removeprefix('torch.')}" for kind, name in first.items()
        )
        raise SMPConfigError(
            f"sharded data parallelism needs parameters of one type in a block: {found}. Convert"
            " the model, or set fp16 or bf16 in the configuration"
        )
