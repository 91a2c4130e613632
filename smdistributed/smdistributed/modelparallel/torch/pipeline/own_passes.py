"""Refuse backward passes and optimizer steps that a step function runs itself.

``model.backward`` divides the gradients by the number of microbatches and scales them. The
optimizer's step must wait for all microbatches, on all ranks. A script that was ported by hand may
still call ``loss.backward()``: without this module its gradients would be too large, without an
error. torch has no hook for all passes. So ``torch.autograd.backward``, which ``Tensor.backward``
calls, is replaced when this module is imported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.job.wrapped import wrapped

__all__ = ["check_optimizer", "inside", "script"]

_torch_backward = torch.autograd.backward
_SIGNATURE = inspect.signature(_torch_backward)


class _ThreadState(threading.local):
    """State of a thread.

    Attributes:
        in_script: Whether the thread runs the step function itself, and not the model or its
            backward pass.
    """

    in_script = False


_thread = _ThreadState()


@contextlib.contextmanager
def _set_in_script(in_script: bool) -> Iterator[None]:
    """Set within a block whether this thread runs the step function itself.

    The switch is of this thread, and has its former value after the block.
    """
    before = _thread.in_script
    _thread.in_script = in_script
    try:
        yield
    finally:
        _thread.in_script = before


def script(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a step function on one microbatch, and return its result.

    Backward passes within are checked, unless the model runs them.
    """
    with _set_in_script(in_script=True):
        return function(*args, **kwargs)


def inside() -> contextlib.AbstractContextManager[None]:
    """Return a context for the model's own forward and backward passes, which are not checked."""
    return _set_in_script(in_script=False)


@functools.wraps(_torch_backward)
def _backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Run ``torch.autograd.backward``, which this function replaces in the whole process; check it
    in a step function.

    An iterator among the arguments is read into a list. Gradients are added to as torch does.

    Raises:
        StepError: The step function itself calls, and adds to gradients of the model.
        TypeError: The arguments are not those of torch's function.
        RuntimeError: torch refused the pass.
    """
    if not _thread.in_script:
        _torch_backward(tensors, *args, **kwargs)
        return
    # The step function itself calls backward, not the model.
    arguments = _SIGNATURE.bind(tensors, *args, **kwargs).arguments
    for name in ("tensors", "inputs"):
        if isinstance(arguments.get(name), Iterator):
            # An iterator can be read only once: torch gets the list.
            arguments[name] = list(arguments[name])
    inputs = arguments.get("inputs")
    _check_backward(
        roots=_as_list(arguments["tensors"]),
        inputs=None if inputs is None else _as_list(inputs),
    )
    _torch_backward(**arguments)


def _as_list(tensors: Any) -> list[Any]:
    """Return the tensors, or edges of the graph, of an argument of torch's backward as a list.

    torch takes a single one, a sequence, or the values of a mapping.

    An iterator is used up.
    """
    if isinstance(tensors, torch.Tensor | GradientEdge):
        return [tensors]
    if isinstance(tensors, Mapping):
        return list(tensors.values())
    return list(tensors)


def _check_backward(roots: Sequence[Any], inputs: Sequence[Any] | None) -> None:
    """Refuse a backward pass with other gradients than ``model.backward`` would give.

    Nothing is refused without a wrapped model, for one that does not change its gradients, and
    within a ``torch.autograd.Function`` of the script.

    Args:
        roots: The tensors, or edges of the graph, that the pass begins at.
        inputs: The tensors, or edges to them, that get gradients; None: all leaves of the graph.

    Raises:
        StepError: The pass adds to gradients of the model.
    """
    model = wrapped.model
    if model is None or not model.changes_gradients or _in_function():
        return
    if inputs is None:
        adds = _leads_to(model, roots)
    else:
        adds = any(model.partition_of(_leaf_of(value)) is not None for value in inputs)
    if adds:
        raise StepError(
            "loss.backward() or torch.autograd.backward() was called in a function decorated"
            " with smp.step, and adds to the gradients of the model, which would be too large:"
            " they must be divided by the number of microbatches, and scaled\n"
            "Call model.backward(loss) in its place."
        )


def _leaf_of(value: Any) -> Any:
    """Return a tensor, or the leaf that an edge of the graph leads to; None for other edges."""
    if isinstance(value, GradientEdge):
        return getattr(value.node, "variable", None)
    return value


def _leads_to(model: Any, roots: Sequence[Any]) -> bool:
    """Return whether a backward pass adds to a gradient of the model, on this rank or another one.

    The graph is walked, and not run. A node of a remote call, of a copy of the model's outputs or
    of FSDP counts as leading to the model.

    Args:
        model: The wrapped model.
        roots: The tensors, or edges of the graph, that the pass begins at.
    """
    # Nodes of the graph; a leaf stands for itself.
    to_visit: list[Any] = []
    for root in roots:
        if isinstance(root, GradientEdge):
            to_visit.append(root.node)
        elif isinstance(root, torch.Tensor):
            to_visit.append(root if root.grad_fn is None else root.grad_fn)
    visited = set()
    while to_visit:
        node = to_visit.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        is_leaf = isinstance(node, torch.Tensor)
        leaf = node if is_leaf else getattr(node, "variable", None)
        if leaf is not None and model.partition_of(leaf) is not None:
            return True
        if is_leaf:
            continue
        # The class of a node that a `torch.autograd.Function` has made.
        function = getattr(type(node), "_forward_cls", None)
        package = getattr(function, "__module__", "")
        # A call of another rank, a copy of the model's output, or a block that fully_shard gathers.
        if package.startswith(("smdistributed.modelparallel.", "torch.distributed.fsdp.")):
            return True
        to_visit += [next_node for next_node, _ in node.next_functions]
    return False


def _in_function() -> bool:
    """Return whether a ``torch.autograd.Function`` of the script runs, forward or backward.

    Gradients that such a function returns are divided later, with those of the model.

    The frames of the stack are walked.
    """
    apply_codes = {
        torch.autograd.Function.apply.__code__,
        torch.autograd.function.BackwardCFunction.apply.__code__,
    }
    # From the caller up to the frame that called the step function.
    frame: Any = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code is not script.__code__:
        if frame.f_code in apply_codes:
            return True
        frame = frame.f_back
    return False


def check_optimizer(optimizer: Any, *_: Any) -> None:
    """Refuse a step of an optimizer of the model before the step function has ended.

    torch calls this before each step of any optimizer.

    Nothing is refused outside of a step function, and with one microbatch on a single rank.

    Args:
        optimizer: The optimizer. One without a parameter of the model is not refused.

    Raises:
        StepError: It was called in a step function.
    """
    model = wrapped.model
    if not _thread.in_script or model is None or not model.is_spread:
        return
    parameters: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    if any(model.partition_of(parameter) is not None for parameter in parameters):
        raise StepError(
            "optimizer.step() was called in a function decorated with smp.step, which runs once for"
            " each microbatch: the gradients of the others, and of other ranks, are still to"
            " come\nCall it after the step function has returned."
        )


torch.autograd.backward = _backward
register_optimizer_step_pre_hook(check_optimizer)
