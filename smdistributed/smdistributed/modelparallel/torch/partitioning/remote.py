"""Replace modules, parameters and buffers of other partitions: they have no memory and no hooks,
and raise an error when they are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from smdistributed.modelparallel.torch.exceptions import StepError

# Attributes and methods of a tensor that do not need its values. Optimizers, clip_grad_norm_ and
# load_state_dict need no others.
_ALLOWED = frozenset(
    """
    shape size numel nelement dim ndim ndimension stride storage_offset is_contiguous dtype device
    layout names element_size itemsize nbytes grad grad_fn grad_dtype requires_grad requires_grad_
    is_leaf retains_grad output_nr is_cuda is_cpu is_meta is_sparse is_quantized is_nested
    is_mkldnn is_floating_point is_complex is_signed is_shared is_pinned is_inference data_ptr
    untyped_storage get_device register_hook
    register_post_accumulate_grad_hook _version _is_view _backward_hooks _post_accumulate_grad_hooks
    """.split()  # noqa: SIM905  a list would take a screen
)


class _Guard:
    """The base of remote tensors: refuses operations that need the values."""

    _smp_remote: tuple[str, int, int]  # name, its partition, this rank's partition

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with a remote tensor among its arguments. torch calls this.

        Attributes such as the shape are read as of any tensor. ``copy_`` to a remote tensor does
        nothing, so that ``load_state_dict`` works: the owner takes the values.

        Raises:
            StepError: The function needs the values, or switches ``requires_grad`` in a step.
            Exception: An error of the function, for one that needs no values.
        """
        name = getattr(func, "__name__", str(func))
        is_assignment = name == "__set__"
        if name in ("__get__", "__set__", "__delete__"):
            # An attribute: its descriptor has the name.
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name == "requires_grad_" or (name == "requires_grad" and is_assignment):
            value = args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)
            _check_switch(args[0], value)
        if name in _ALLOWED and func is not torch.autograd.grad:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  what torch's own subclasses do
                return func(*args, **(kwargs or {}))
        if name == "copy_" and isinstance(args[0], _Guard):
            return args[0]  # load_state_dict: the owner takes the values
        tensor = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, _Guard))
        full_name, owner, own_partition = tensor._smp_remote  # noqa: SLF001
        module, _, key = full_name.rpartition(".")
        raise StepError(
            f"{name}: {key!r} of module {module!r} is on partition {owner},"
            f" and was read on partition {own_partition}.\n"
            "Only the module itself can read its parameters."
            " Put the module that reads them on the same partition with smp.set_partition,"
            " or use local_parameters(), local_state_dict() or state_dict() of the model."
        )


def _check_switch(tensor: Any, value: bool) -> None:
    """Refuse to switch the gradient of a parameter in a step, because its owner does not know the
    moment.

    Args:
        tensor: The parameter of another partition.
        value: What ``requires_grad`` would be.

    Raises:
        StepError: A step runs, and the value differs.
    """
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        is_same = tensor.requires_grad == value
    name, owner, _ = tensor._smp_remote  # noqa: SLF001
    if not is_same and getattr(tensor, "_smp_in_step", bool)():
        raise StepError(
            f"requires_grad of {name!r}, which is on partition {owner}, was switched in a step\n"
            "Switch it before the step on all ranks,"
            " detach the module's result, or place it with smp.set_partition."
        )


class RemoteParameter(_Guard, nn.Parameter):
    """A parameter of another partition. The object keeps its identity, shape and attributes."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Return its name and partition."""
        return _text(self)


class RemoteBuffer(_Guard, torch.Tensor):
    """A buffer of another partition."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Return its name and partition."""
        return _text(self)


def _text(tensor: _Guard) -> str:
    """Return the text for a remote tensor: ``<head.weight, on partition 1>``."""
    name, owner, _ = tensor._smp_remote  # noqa: SLF001
    return f"<{name}, on partition {owner}>"


def empty(tensor: torch.Tensor, name: str, owner: int, own_partition: int) -> None:
    """Free the memory of a parameter or buffer that is on another partition.

    The object stays, with its shape. Its class changes, so that a use of its values is refused.

    The gradient is dropped. Views that share the old memory keep it. A parameter on the meta device
    only changes its class.

    Args:
        tensor: The parameter or buffer.
        name: Its name in the model.
        owner: Its partition.
        own_partition: This rank's partition.
    """
    if not tensor.is_meta:
        # A new storage, because other tensors may be in the old one.
        without_memory = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        without_memory.untyped_storage().resize_(0)
        tensor.data = without_memory
    tensor.grad = None
    tensor._smp_remote = (name, owner, own_partition)  # type: ignore[attr-defined]  # noqa: SLF001
    tensor.__class__ = RemoteParameter if isinstance(tensor, nn.Parameter) else RemoteBuffer


class _RemoteParameters(dict[str, Any]):
    """The parameters of a remote module. They cannot be replaced in a step, because the owner would
    not know of it.

    Attributes:
        where: Words for the module.
        in_step: Returns whether this thread runs a step.
    """

    where: str
    in_step: Callable[[], bool]

    def __setitem__(self, name: str, value: Any) -> None:
        """Replace a parameter.

        Raises:
            StepError: A step runs.
        """
        if self.in_step():
            raise StepError(
                f"parameter {name!r} of {self.where} was replaced in a step,"
                " by torch.func.functional_call or an assignment:"
                " the module is on another partition, where that has no effect.\n"
                "Place it with the module that calls it with smp.set_partition,"
                " or pass the values as arguments."
            )
        super().__setitem__(name, value)


def detach_module(module: nn.Module, name: str, in_step: Callable[[], bool]) -> None:
    """Change a module of another partition so that it only forwards calls to its owner.

    Its hooks and its own ``__call__`` run on its owner, once, and not also at the caller. ``to()``,
    ``half()`` and the like skip its tensors.

    The parameters get a dictionary that refuses replacements in a step. The module's
    ``_call_impl``, ``_apply`` and, for a ``__call__`` of its own, its class are replaced.

    Args:
        module: The module.
        name: Its name.
        in_step: Whether this thread runs a step function.
    """
    kept = _RemoteParameters(module._parameters)  # noqa: SLF001
    kept.where, kept.in_step = f"module {name!r} ({type(module).__name__})", in_step
    object.__setattr__(module, "_parameters", kept)
    for parameter in kept.values():
        if parameter is not None:
            parameter._smp_in_step = in_step  # noqa: SLF001
    object.__setattr__(module, "_call_impl", module.forward)
    vars(module).pop("_compiled_call_impl", None)  # its owner compiles it
    object.__setattr__(module, "_apply", functools.partial(_apply_children, module))
    kind: Any = type(module)
    if kind.__call__ is not nn.Module.__call__:
        module.__class__ = type(kind)(kind.__name__, (kind,), {"__call__": nn.Module.__call__})


def _apply_children(module: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
    """Apply a function to the tensors of a module's children, and return the module.

    Takes the place of ``Module._apply``, which ``to()`` and ``half()`` call.

    Args:
        module: The module. Its own tensors are left out.
        fn: Gets a tensor, and returns the one that takes its place.
        recurse: Whether to go into the children.
    """
    if recurse:
        for child in module.children():
            child._apply(fn)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return module
