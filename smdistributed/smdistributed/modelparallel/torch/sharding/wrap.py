"""Share the parameters of a model: choose the modules that are gathered alone, and replace the
parameters by shards.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch.exceptions import SMPConfigError
from smdistributed.modelparallel.torch.job.state import state

from . import mesh
from .order import BlockOrder

__all__ = ["blocks", "shard", "sharded_parameter"]

Named = list[tuple[str, torch.Tensor]]

_replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
"""``id()`` of a parameter before -> (this parameter, the shared parameter)."""


def sharded_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return the shared parameter that replaced a parameter; the parameter itself if none did."""
    if id(parameter) not in _replaced:
        return parameter
    _, shared = _replaced[id(parameter)]
    return shared


def blocks(root: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: repeated layers.

    A block is a child of a ModuleList or a Sequential that has several children of the same class.
    Only the outermost ones are blocks, because a rank may skip an inner module that another rank
    calls. Ranks may also choose different children of a ModuleDict, if several have the same class:
    neither these children nor their modules are blocks. A module that shares a parameter with a
    module outside is no block, but may contain blocks.

    The model is not changed.
    """
    uses = collections.Counter(_parameters_of(root.modules()))
    found_blocks: list[nn.Module] = []
    visited: set[int] = set()

    def walk(module: nn.Module) -> None:
        """Add the blocks below a module to ``found_blocks``."""
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        is_dict = isinstance(module, nn.ModuleDict)
        kinds = collections.Counter(map(type, module.children()))
        for child in module.children():
            is_repeated = kinds[type(child)] > 1
            if id(child) in visited or (is_dict and is_repeated):
                continue
            visited.add(id(child))
            own_uses = collections.Counter(_parameters_of(child.modules()))
            is_alone = all(count == uses[key] for key, count in own_uses.items())
            is_called = type(child).forward is not nn.Module.forward
            if is_list and is_repeated and own_uses and is_alone and is_called:
                found_blocks.append(child)
            else:
                walk(child)

    walk(root)
    return found_blocks


def _parameters_of(modules: Iterable[nn.Module]) -> list[int]:
    """Return the ``id()`` of each parameter, once for each module that has the parameter."""
    ids: list[int] = []
    for module in modules:
        parameters = [p for p in module._parameters.values() if p is not None]  # noqa: SLF001
        ids += map(id, parameters)
    return ids


def shard(
    root: nn.Module, prepare: Callable[[Named], None], *, half: torch.dtype | None, unused: bool
) -> BlockOrder:
    """Share the parameters of a model, block by block, so that no rank needs memory for all of it.

    Collective. Parameters without dimensions, and those with other numbers than floating-point
    ones, are not shared.

    The parameters of the modules are replaced by shared ones, which `sharded_parameter` finds. The
    memory of the former ones is freed. The modules get FSDP's hooks, and a class of FSDP in front
    of their own.

    Args:
        root: The model.
        prepare: Allocates the memory of parameters and buffers, and sets their first values, equal
            on all ranks. Gets (name, tensor) pairs.
        half: The type in which blocks run, while the parameters are float32. None: the type of the
            parameters.
        unused: Whether ranks may use different parameters.

    Returns:
        The comparison of the ranks in each pass.

    Raises:
        SMPConfigError: A parameter has no values, a block has several types, an embedding has
            ``max_norm`` or ``sparse``, or this PyTorch cannot leave a parameter whole that has no
            rows.
        Exception: An error of ``prepare``, or of FSDP.
    """
    _check_embeddings(root)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = {id(t): n for n, t in (*root.named_buffers(), *root.named_parameters())}
    unshared = {p for p in root.parameters() if p.dim() == 0 or not p.is_floating_point()}
    # A small model stays gathered between its forward and its backward pass.
    limit = state.cfg.sdp_max_live_parameters
    stays_gathered = limit is not None and sum(p.numel() for p in root.parameters()) <= limit
    options: dict[str, Any] = {"mesh": mesh.mesh()}
    modules = [*blocks(root), root]
    _replaced.clear()
    if half is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    if unshared:
        if "ignored_params" not in inspect.signature(fully_shard).parameters:
            # PyTorch 2.6 has no such option.
            unshared_names = ", ".join(sorted(names[id(p)] for p in unshared))
            raise SMPConfigError(
                f"PyTorch {torch.__version__} cannot leave parameters whole that have no rows:"
                f" {unshared_names}"
            )
        options["ignored_params"] = unshared

    done: set[int] = set()  # ids of the tensors of earlier blocks
    for module in modules:
        places = _unshared_parameters(module, done)
        tensors: dict[int, torch.Tensor] = {}
        for place in places:
            tensors[id(place.parameter)] = place.parameter
        for buffer in module.buffers():
            if id(buffer) not in done:
                tensors[id(buffer)] = buffer
        named = [(names[key], tensor) for key, tensor in tensors.items()]
        _check_values(named)
        prepare(named)
        done |= tensors.keys()
        trainable: Named = []
        for place in places:
            if place.parameter not in unshared and place.parameter.requires_grad:
                trainable.append((names[id(place.parameter)], place.parameter))
        _check_types(trainable)
        reshards = module is not root and not stays_gathered
        fully_shard(module, reshard_after_forward=reshards, **options)
        for place in places:
            new = place.holder._parameters[place.key]  # noqa: SLF001
            if new is not None and new is not place.parameter:
                _replace(place.parameter, new)
    unused = unused and hasattr(root, "set_reduce_scatter_unused_params")  # not of every PyTorch
    if unused:
        root.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return BlockOrder(root, gathered_again=not stays_gathered, unused=unused)


class _Place(NamedTuple):
    """A parameter in a module.

    Attributes:
        holder: The module.
        key: Name of the parameter in the module.
        parameter: The parameter.
    """

    holder: nn.Module
    key: str
    parameter: nn.Parameter


def _unshared_parameters(module: nn.Module, done: set[int]) -> list[_Place]:
    """Return the parameters of a module that are not shared yet.

    Args:
        module: The module.
        done: ``id()`` of the parameters of earlier blocks.

    Returns:
        A parameter that several modules have is there once for each.
    """
    places = []
    for holder in module.modules():
        for key, parameter in holder._parameters.items():  # noqa: SLF001
            if parameter is None or mesh.is_sharded(parameter) or id(parameter) in done:
                continue
            places.append(_Place(holder, key, parameter))
    return places


def _check_embeddings(root: nn.Module) -> None:
    """Refuse embeddings that cannot work with shared parameters.

    Raises:
        SMPConfigError: An embedding has a ``max_norm`` or ``sparse=True``.
    """
    for name, module in root.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        title = f"{name or 'the model'} ({type(module).__name__})"
        if module.max_norm is not None:
            raise SMPConfigError(
                f"{title} has a max_norm: it scales its"
                " parameter when it is called, and with sharded data parallelism that is a copy."
                " Leave max_norm out"
            )
        if module.sparse:
            raise SMPConfigError(
                f"{title} has sparse=True:"
                " a sparse gradient cannot be summed over the ranks that share a parameter."
                " Make it with sparse=False"
            )


def _replace(old: nn.Parameter, new: nn.Parameter) -> None:
    """Record that a shared parameter replaced another one, and free the memory of the old one,
    which other objects may still hold. The new one gets the attributes of the old one.

    Attributes that public scripts read, such as ``ds_numel``, are set on the new one and on its
    part. A parameter that was replaced already is left as it is.

    Args:
        old: The parameter before.
        new: The shared parameter.
    """
    if id(old) in _replaced:
        return
    _replaced[id(old)] = old, new
    vars(new).update(vars(old))
    part: Any = mesh.local(new).detach()
    part.ds_numel = part.numel()
    # Public scripts read these.
    vars(new).update(ds_shape=new.shape, ds_numel=new.numel(), ds_tensor=part)
    old.data = torch.empty(0, dtype=old.dtype)


def _check_values(named: Named) -> None:
    """Refuse tensors on the meta device, which have no values.

    Raises:
        SMPConfigError: With the name of the first one.
    """
    for name, tensor in named:
        if tensor.is_meta:
            raise SMPConfigError(
                f"{name} is on the meta device and has no values."
                " Make the model in smp.delay_param_initialization() or smp.model_creation():"
                " then no rank has all of it either"
            )


def _check_types(named: Named) -> None:
    """Refuse a block with parameters of several types.

    Raises:
        SMPConfigError: With an example for each type.
    """
    examples: dict[torch.dtype, str] = {}
    for name, tensor in named:
        examples.setdefault(tensor.dtype, name)
    if len(examples) > 1:
        types = [f"{name} is {str(kind).removeprefix('torch.')}" for kind, name in examples.items()]
        raise SMPConfigError(
            "sharded data parallelism needs parameters of one type in a block:"
            f" {', '.join(types)}. Convert"
            " the model, or set fp16 or bf16 in the configuration"
        )
