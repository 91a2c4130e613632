"""What a step function must not do itself: run the model's backward pass, or its optimizer.

``model.backward`` divides the gradients by the number of microbatches and scales them. The
optimizer's step waits for all microbatches, on all ranks. A script that was ported by hand may
still have ``loss.backward()``: its gradients were too large, and nothing said so. torch has no
place that sees every pass, so ``torch.autograd.backward`` is replaced when this module is imported:
it is what ``Tensor.backward`` calls.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.job.wrapped import wrapped

__all__ = ["check_optimizer", "inside", "script"]

_torch_backward = torch.autograd.backward


class _Place(threading.local):
    """Where a thread is.

    Attributes:
        in_script: It runs the step function itself, and not the model or its backward pass.
    """

    in_script = False


_place = _Place()


@contextlib.contextmanager
def _set(in_script: bool) -> Iterator[None]:
    before = _place.in_script
    _place.in_script = in_script
    try:
        yield
    finally:
        _place.in_script = before


def script(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a step function on one microbatch."""
    with _set(in_script=True):
        return function(*args, **kwargs)


def inside() -> contextlib.AbstractContextManager[None]:
    """Return a context for the forward and the backward pass of the model: what
    they run inside is their own.
    """
    return _set(in_script=False)


@functools.wraps(_torch_backward)
def _backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    if _place.in_script:
        given = args[4] if len(args) > 4 else kwargs.get("inputs")
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # An iterator is read once.
        tensors = tensors if isinstance(tensors, torch.Tensor) else roots
        _check_backward(roots, given)
    _torch_backward(tensors, *args, **kwargs)


def _check_backward(roots: Sequence[Any], given: Any) -> None:
    """Refuse a backward pass whose gradients would be others than those of ``model.backward``."""
    model = wrapped.model
    if model is None or not model.changes_gradients or _in_function():
        return
    if given is None:
        adds = _leads_to(model, roots)
    else:
        named = [given] if isinstance(given, torch.Tensor) else list(given)
        adds = any(model.partition_of(each) is not None for each in named)
    if adds:
        raise StepError(
            "loss.backward() or torch.autograd.backward() was called in a function decorated"
            " with smp.step, and adds to the gradients of the model, which would be too large:"
            " they must be divided by the number of microbatches, and scaled\n"
            "Call model.backward(loss) in its place."
        )


def _leads_to(model: Any, roots: Sequence[Any]) -> bool:
    """Return whether a backward pass adds to a gradient of the model, on this
    rank or on another.
    """
    todo = [
        each if each.grad_fn is None else each.grad_fn
        for each in roots
        if isinstance(each, torch.Tensor)
    ]
    seen = set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = node if isinstance(node, torch.Tensor) else getattr(node, "variable", None)
        if variable is not None and model.partition_of(variable) is not None:
            return True
        if isinstance(node, torch.Tensor):
            continue
        made_by = getattr(type(node), "_forward_cls", None)
        package = getattr(made_by, "__module__", "")
        # A call of another rank, a copy of the model's output, or a block that fully_shard gathers.
        if package.startswith(("smdistributed.modelparallel.", "torch.distributed.fsdp.")):
            return True
        todo += [following for following, _ in node.next_functions]
    return False


def _in_function() -> bool:
    """Return whether a Function of the script runs, in its forward or backward:
    what it returns is divided later.
    """
    own = {
        torch.autograd.Function.apply.__code__,
        torch.autograd.function.BackwardCFunction.apply.__code__,
    }
    frame: Any = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code is not script.__code__:
        if frame.f_code in own:
            return True
        frame = frame.f_back
    return False


def check_optimizer(optimizer: Any, *_: Any) -> None:
    """Refuse a step of an optimizer of the model before the step function has ended.

    Raises:
        StepError: It was called in a step function.
    """
    model = wrapped.model
    if not _place.in_script or model is None or not model.is_spread:
        return
    groups = optimizer.param_groups
    if any(
        model.partition_of(parameter) is not None
        for group in groups
        for parameter in group["params"]
    ):
        raise StepError(
            "optimizer.step() was called in a function decorated with smp.step, which runs once for"
            " each microbatch: the gradients of the others, and of other ranks, are still to"
            " come\nCall it after the step function has returned."
        )


torch.autograd.backward = _backward
register_optimizer_step_pre_hook(check_optimizer)
