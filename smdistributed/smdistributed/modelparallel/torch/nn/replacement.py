"""Select the modules that are split over tensor ranks, and replace them when a model is wrapped."""

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
    """The replacement for the modules of a class.

    Attributes:
        target: The class of the replacement.
        init_hook: Converts the arguments of the original's ``__init__`` for the replacement's.
        forward_hook: Converts the arguments of ``forward``.
        return_hook: Converts the result of the replacement's ``forward`` to the original's.
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
"""Class of a module -> its replacement. Scripts add more with `tp_register`."""
_open_contexts: list[tuple[bool, dict[str, object]]] = []
"""(enabled, config) of the open contexts `tensor_parallelism`, the innermost last."""


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **config: object) -> Iterator[None]:
    """Split supported modules that are created in this context over the tensor ranks.

    The innermost context counts.

    Modules get a mark when they are created. The open contexts are of the process, and not of a
    thread.

    Args:
        enabled: Whether to split.
        config: Arguments of the distributed modules, instead of those of the originals. Arguments
            that a module does not have are ignored.
    """
    _open_contexts.append((enabled, config))
    try:
        yield
    finally:
        _open_contexts.pop()


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **config: object) -> None:
    """Set whether the supported modules of a tree are split over the tensor ranks.

    The last call for a module counts.

    The modules get the attribute ``_smp_tp``; they are replaced when the model is wrapped.

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
    """Mark a new module with the innermost context of ``tensor_parallelism``."""
    if _open_contexts:
        object.__setattr__(module, "_smp_tp", _open_contexts[-1])


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> None:
    """Register the class that replaces the modules of a class when they are split over tensor
    ranks.

    The entry holds for the whole process, and replaces an earlier one. ``__init__`` of the original
    class is replaced by one that stores the arguments in each new instance.

    Args:
        module_cls: The original class. Instances of its subclasses are not replaced.
        dist_module: The class of the replacement.
        init_hook: Takes the arguments of the original's ``__init__`` (without ``self``), and
            returns ``(args, kwargs)`` for the replacement's.
        forward_hook: Takes the arguments of the original's ``forward``, and returns
            ``(args, kwargs)`` for the replacement's.
        return_hook: Takes the result of the replacement's ``forward``, and returns the result that
            the original would return.

    Raises:
        TypeError: ``module_cls`` is not a subclass of ``torch.nn.Module``, or ``dist_module`` is
            not a subclass of ``smp.nn.DistributedModule``.
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
    """Decorate a class of modules: see ``tp_register_with_module``.

    Raises:
        TypeError: As ``tp_register_with_module``, when the class is decorated.
    """

    def register(module_cls: Class) -> Class:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def distribute(root: nn.Module, degree: int) -> nn.Module:
    """Replace the modules of a tree that are to be split, the outermost first.

    A module that cannot be split is not replaced. Rank 0 logs a warning with the reason.

    The tree is changed in place: a module's entry in its parent is replaced.

    Args:
        root: The root of the tree.
        degree: The tensor-parallel degree.

    Returns:
        The root, or its replacement.

    Raises:
        SMPConfigError: A replacement cannot take the arguments of its original.
    """
    # A parameter counts once for each module that has it.
    holders: Counter[int] = Counter()
    for module in root.modules():
        for parameter in module._parameters.values():  # noqa: SLF001
            if parameter is not None:
                holders[id(parameter)] += 1
    done: dict[int, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> nn.Module:
        """Return a module, or its replacement; replace the modules below it."""
        if id(module) in done:
            return done[id(module)]
        enabled, config = getattr(module, "_smp_tp", (False, {}))
        entry = _find_entry(type(module)) if enabled else None
        if entry is not None:
            try:
                _check_replaceable(module, holders)
                done[id(module)] = _make_replacement(module, name, entry, config, degree)
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


def _check_class(cls: object, base: type, name: str) -> None:
    """Refuse a value that is no subclass of ``base``.

    Args:
        cls: The value.
        base: The class.
        name: Name of this class, for the error.

    Raises:
        TypeError: The value is no such class.
    """
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise TypeError(f"tp_register: {cls!r} is not a subclass of {name}")


def _find_entry(cls: type[nn.Module]) -> _Entry | None:
    """Return the replacement for the modules of a class; None if they are not split.

    Only the exact class counts, and no base class.
    """
    if cls in _registered:
        return _registered[cls]
    # By its name, because this library does not import transformers.
    if cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers."):
        return _Entry(DistributedConv1D)
    return None


class _Hooked:
    """A replacement's ``forward`` with the interface of the original."""

    def __init__(self, forward: Hook, entry: _Entry) -> None:
        self.forward, self.entry = forward, entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.entry.forward_hook is not None:
            args, kwargs = self.entry.forward_hook(*args, **kwargs)
        result = self.forward(*args, **kwargs)
        if self.entry.return_hook is None:
            return result
        return self.entry.return_hook(result)


def _check_replaceable(module: nn.Module, holders: Counter[int]) -> None:
    """Check that a module can be replaced, and nothing but its class is lost.

    Args:
        module: The module.
        holders: ``id()`` of a parameter -> number of modules of the model that have it.

    Raises:
        NotSplitError: The module shares a parameter with another one, or has hooks.
    """
    for name, parameter in module.named_parameters():
        holders_inside = 0
        for part in module.modules():
            for own_parameter in part._parameters.values():  # noqa: SLF001
                holders_inside += parameter is own_parameter
        if holders[id(parameter)] > holders_inside:
            raise NotSplitError(f"its {name} is shared with another module")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if "forward" in vars(module) or any(getattr(module, hook, None) for hook in hooks):
        raise NotSplitError("it has hooks or a forward of its own")


def _make_replacement(
    module: nn.Module, name: str, entry: _Entry, config: dict[str, object], degree: int
) -> DistributedModule:
    """Return the replacement of a module, with the module's values.

    The generator of random numbers does not advance, if all values are the module's.

    The original is not changed.

    Args:
        module: The module.
        name: Its name in the model, for errors.
        entry: The class of the replacement, with its hooks.
        config: Arguments in the place of the original's.
        degree: The tensor-parallel degree.

    Raises:
        NotSplitError: The arguments of the module are unknown, or it cannot be split.
        SMPConfigError: The replacement cannot take the arguments.
        Exception: An error of ``init_hook`` or of the class of the replacement.
    """
    arguments: Arguments | None = getattr(module, "_smp_arguments", None)
    if not arguments:
        arguments = entry.target.arguments(module)
    if arguments is None:
        raise NotSplitError(f"it was made before {type(module).__name__} was registered")
    args, kwargs = arguments
    if entry.init_hook is not None:
        args, kwargs = entry.init_hook(*args, **kwargs)
    try:
        bound = inspect.signature(entry.target).bind(*args, **kwargs)
    except TypeError as error:
        raise SMPConfigError(
            f"{name} ({type(module).__name__}): smp.nn.{entry.target.__name__} cannot take its"
            f" arguments: {error}. Register it with an init_hook that returns (args, kwargs)"
        ) from None
    for key, value in config.items():
        if key in bound.signature.parameters:
            bound.arguments[key] = value
    random_state = torch.get_rng_state()
    complete = True
    try:
        new = entry.target(*bound.args, **bound.kwargs)
        complete = _copy_values(new, module, degree)
    finally:
        # All random values of the new module are overwritten: draw the same ones as without it.
        if complete:
            torch.set_rng_state(random_state)
    for part in new.modules():
        if hasattr(module, "_smp_partition"):
            object.__setattr__(part, "_smp_partition", module._smp_partition)  # noqa: SLF001
    if entry.forward_hook is not None or entry.return_hook is not None:
        new.forward = _Hooked(new.forward, entry)
    return new.train(module.training)


def _copy_values(new: nn.Module, old: nn.Module, degree: int) -> bool:
    """Copy the values of tensors with equal names, or this rank's slices of them.

    The tensors of ``new`` get the device, type and ``requires_grad`` of their source. A delayed
    source makes them delayed.

    Args:
        new: The replacement.
        old: The original.
        degree: The tensor-parallel degree.

    Returns:
        Whether all tensors of ``new`` got values.
    """
    sources = {**dict(old.named_parameters()), **dict(old.named_buffers())}
    index, complete = tensor_group().rank(), True
    for name, tensor in [*new.named_parameters(), *new.named_buffers()]:
        source = sources.get(name)
        # A split tensor has a part of the original's size along its axis.
        axis = getattr(tensor, "_smp_axis", None)
        size = list(tensor.shape)
        if axis is not None:
            size[axis] *= degree
        if source is None or list(source.shape) != size:
            complete = False
            continue
        tensor.data = tensor.data.to(source.device, dtype_of_parameters(source))
        if axis is None:
            put_slice(tensor, source, 0, 1, 0)
        else:
            put_slice(tensor, source, axis, degree, index)
        tensor.requires_grad_(source.requires_grad)
    return complete


def _keep_arguments(cls: type[nn.Module]) -> None:
    """Let new instances of a class store the arguments of their ``__init__``, for an
    ``init_hook``.

    ``__init__`` of the class is replaced.
    """
    init = cls.__init__

    @functools.wraps(init)
    def keeping_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Store the arguments, and initialize. An object of a subclass has other arguments."""
        if type(self) is cls:
            object.__setattr__(self, "_smp_arguments", (args, kwargs))
        init(self, *args, **kwargs)

    cls.__init__ = keeping_init  # type: ignore[method-assign]
