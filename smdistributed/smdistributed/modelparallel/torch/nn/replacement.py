"""Which modules are split over tensor ranks, and their replacement when the model is wrapped."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from smdistributed.modelparallel.torch.job.config import SMPConfigError
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.job.wrapped import wrapped

from .delayed import put_slice
from .embedding import DistributedEmbedding
from .layer_norm import DistributedLayerNorm, FusedLayerNorm
from .linear import DistributedConv1D, DistributedLinear
from .module import Arguments, DistributedModule, NotSplitError, dtype_of_parameters, tensor_group

__all__ = [
    "distribute",
    "set_tensor_parallelism",
    "tag",
    "tensor_parallelism",
    "tp_register",
    "tp_register_with_module",
]

_logger = logging.getLogger("smdistributed.modelparallel")

Hook = Callable[..., Any]
Class = TypeVar("Class", bound=type[nn.Module])


@dataclass(frozen=True)
class _Entry:
    """What replaces the modules of a class.

    Attributes:
        target: The class of the replacement.
        init_hook: From the arguments of the original's ``__init__`` to those of the replacement's.
        forward_hook: The same for ``forward``.
        return_hook: From what the replacement returns to what the original would.
    """

    target: type[DistributedModule]
    init_hook: Hook | None = None
    forward_hook: Hook | None = None
    return_hook: Hook | None = None


_registered: dict[type[nn.Module], _Entry] = {
    nn.Linear: _Entry(DistributedLinear),
    nn.Embedding: _Entry(DistributedEmbedding),
    nn.LayerNorm: _Entry(DistributedLayerNorm),
    FusedLayerNorm: _Entry(DistributedLayerNorm),
}
_open: list[tuple[bool, dict[str, object]]] = []


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **config: object) -> Iterator[None]:
    """Split supported modules that are made in this context over the tensor ranks.

    The innermost context counts.

    Args:
        enabled: Whether to split.
        config: Arguments of the distributed modules, instead of those of the originals. Arguments
            that a module does not have are ignored.
    """
    _open.append((enabled, config))
    try:
        yield
    finally:
        _open.pop()


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **config: object) -> None:
    """Split the supported modules of a tree over the tensor ranks, or do not.

    The last call for a module counts.

    Args:
        module: Root of the tree.
        enabled: Whether to split.
        config: See ``smp.tensor_parallelism``.

    Raises:
        SMPConfigError: The model is wrapped already.
    """
    if wrapped.model is not None:
        raise SMPConfigError(
            "call smp.set_tensor_parallelism before smp.DistributedModel wraps the model"
        )
    for part in module.modules():
        object.__setattr__(part, "_smp_tp", (enabled, config))


def tag(module: nn.Module) -> None:
    """Note on a module that is being made whether it is to be split."""
    if _open:
        object.__setattr__(module, "_smp_tp", _open[-1])


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> None:
    """Say which class replaces the modules of a class when these are split over tensor ranks.

    Args:
        module_cls: The original. Its instances are replaced, those of its subclasses are not.
        dist_module: The replacement.
        init_hook: Takes the arguments of the original's ``__init__`` (without ``self``), and
            returns ``(args, kwargs)`` for the replacement's.
        forward_hook: The same for ``forward``.
        return_hook: Takes what the replacement returns, and returns what the original would.

    Raises:
        TypeError: A class is not of the kind that is needed.
    """
    _check_class(module_cls, nn.Module, "torch.nn.Module")
    _check_class(dist_module, DistributedModule, "smp.nn.DistributedModule")
    if module_cls not in _registered:
        _keep_arguments(module_cls)
    _registered[module_cls] = _Entry(dist_module, init_hook, forward_hook, return_hook)


def tp_register(
    dist_module: type[DistributedModule],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> Callable[[Class], Class]:
    """Decorate a class of modules: see ``tp_register_with_module``."""

    def register(module_cls: Class) -> Class:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def distribute(root: nn.Module, degree: int) -> nn.Module:
    """Replace the modules of a tree that are to be split, outermost first, and
    return the root or its replacement.

    A module that cannot be split stays as it is. Rank 0 says which and why, one line each.
    """
    holders = Counter(
        id(parameter)
        for module in root.modules()
        for parameter in (module._parameters.values())  # noqa: SLF001  a parameter counts once for each module
        if parameter is not None
    )
    done: dict[int, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> nn.Module:
        if id(module) in done:
            return done[id(module)]
        enabled, config = getattr(module, "_smp_tp", (False, {}))
        entry = _entry(type(module)) if enabled else None
        if entry is not None:
            try:
                _check(module, holders)
                done[id(module)] = _replacement(module, name, entry, config, degree)
                return done[id(module)]
            except NotSplitError as error:
                if state.topo.rank == 0:
                    _logger.warning(
                        "%s (%s) is not split over tensor ranks: %s",
                        name,
                        type(module).__name__,
                        error,
                    )
        done[id(module)] = module
        for key, child in list(module._modules.items()):  # noqa: SLF001  named_children leaves out repeated ones
            if child is not None:
                module._modules[key] = visit(child, f"{name}.{key}" if name else key)  # noqa: SLF001
        return module

    return visit(root, "")


def _check_class(given: object, base: type, name: str) -> None:
    if not isinstance(given, type) or not issubclass(given, base):
        raise TypeError(f"tp_register: {given!r} is not a subclass of {name}")


def _entry(cls: type[nn.Module]) -> _Entry | None:
    if (
        cls not in _registered
        and cls.__name__ == "Conv1D"
        and cls.__module__.startswith("transformers.")
    ):
        return _Entry(DistributedConv1D)  # by name: this library does not import transformers
    return _registered.get(cls)


class _Hooked:
    """A replacement's ``forward`` with the interface of the original."""

    def __init__(self, forward: Hook, entry: _Entry) -> None:
        self.forward, self.entry = forward, entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.entry.forward_hook is not None:
            args, kwargs = self.entry.forward_hook(*args, **kwargs)
        result = self.forward(*args, **kwargs)
        return result if self.entry.return_hook is None else self.entry.return_hook(result)


def _check(module: nn.Module, holders: Counter[int]) -> None:
    for name, parameter in module.named_parameters():
        inside = sum(
            parameter is own
            for part in module.modules()
            for own in part._parameters.values()  # noqa: SLF001
        )
        if holders[id(parameter)] > inside:
            raise NotSplitError(f"its {name} is shared with another module")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if "forward" in vars(module) or any(getattr(module, hook, None) for hook in hooks):
        raise NotSplitError("it has hooks or a forward of its own")


def _replacement(
    module: nn.Module, name: str, entry: _Entry, config: dict[str, object], degree: int
) -> DistributedModule:
    found: Arguments | None = getattr(module, "_smp_arguments", None) or entry.target.arguments(
        module
    )
    if found is None:
        raise NotSplitError(f"it was made before {type(module).__name__} was registered")
    args, kwargs = found
    if entry.init_hook is not None:
        args, kwargs = entry.init_hook(*args, **kwargs)
    try:
        bound = inspect.signature(entry.target).bind(*args, **kwargs)
    except TypeError as error:
        raise SMPConfigError(
            f"{name} ({type(module).__name__}): smp.nn.{entry.target.__name__} cannot take its"
            f" arguments: {error}. Register it with an init_hook that returns (args, kwargs)"
        ) from None
    known = bound.signature.parameters
    bound.arguments.update({key: value for key, value in config.items() if key in known})
    random_state = torch.get_rng_state()
    complete = True
    try:
        new = entry.target(*bound.args, **bound.kwargs)
        complete = _take_values(new, module, degree)
    finally:
        if complete:  # no random value is left of the making
            torch.set_rng_state(random_state)
    for part in new.modules():
        if hasattr(module, "_smp_partition"):
            object.__setattr__(part, "_smp_partition", module._smp_partition)  # noqa: SLF001
    if entry.forward_hook is not None or entry.return_hook is not None:
        new.forward = _Hooked(new.forward, entry)
    return new.train(module.training)


def _take_values(new: nn.Module, old: nn.Module, degree: int) -> bool:
    """Copy the values of tensors of one name, whole or sliced, and return
    whether all of ``new`` were copied.
    """
    sources = {**dict(old.named_parameters()), **dict(old.named_buffers())}
    index, complete = tensor_group().rank(), True
    for name, tensor in [*new.named_parameters(), *new.named_buffers()]:
        source = sources.get(name)
        axis = getattr(tensor, "_smp_axis", None)
        size = list(tensor.shape)
        if axis is not None:
            size[axis] *= degree
        if source is None or list(source.shape) != size:
            complete = False
            continue
        tensor.data = tensor.data.to(source.device, dtype_of_parameters(source))
        put_slice(
            tensor,
            source,
            axis or 0,
            degree if axis is not None else 1,
            index if axis is not None else 0,
        )
        tensor.requires_grad_(source.requires_grad)
    return complete


def _keep_arguments(cls: type[nn.Module]) -> None:
    """Let new instances of a class remember the arguments that they were made
    with, for an ``init_hook``.
    """
    init = cls.__init__

    @functools.wraps(init)
    def keeping_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            object.__setattr__(self, "_smp_arguments", (args, kwargs))
        init(self, *args, **kwargs)

    cls.__init__ = keeping_init  # type: ignore[method-assign]
