"""``smp.step``: a function that runs once for each microbatch, on every rank of a pipeline."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import itertools
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
import torch.distributed
import torch.utils.data

from .exceptions import SMPRuntimeError
from .job.agreement import agree_on_batch
from .job.collective_calls import calls
from .job.state import state
from .job.topology import CommGroup
from .job.wrapped import wrapped
from .pipeline.own_passes import script
from .pipeline.runtime import present

__all__ = ["StepFunction", "StepOutput", "num_microbatches", "step"]

DEBUG_VARIABLE = "SMP_DEBUG"
"""With this variable the batches of every step are compared over ranks, not
only those of the first two.
"""

_COMPARED = 2
"""How many calls of a step function have their batches compared: a script's
mistake is in the first one already.
"""

P = ParamSpec("P")
T = TypeVar("T")


class StepOutput:
    """A tensor that a step function returned, once for each microbatch.

    Attributes:
        outputs: The tensors, in the order of the microbatches.
    """

    outputs: list[torch.Tensor]

    def __init__(self, outputs: Iterable[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def __len__(self) -> int:
        """Return the number of microbatches."""
        return len(self.outputs)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Return the tensors one after another."""
        return iter(self.outputs)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the tensor of one microbatch."""
        return self.outputs[index]

    def __repr__(self) -> str:
        """Return the tensors as text."""
        return f"StepOutput({self.outputs!r})"

    def reduce_sum(self) -> torch.Tensor:
        """Return the sum over the microbatches."""
        return self.stack().sum(0)

    def reduce_mean(self) -> torch.Tensor:
        """Return the mean over the microbatches."""
        return self.reduce_sum() / len(self.outputs)

    def concat(self) -> torch.Tensor:
        """Return the tensors joined along their first dimension; scalars become a vector."""
        return torch.cat([each if each.dim() else each[None] for each in self.outputs])

    def stack(self) -> torch.Tensor:
        """Return the tensors as one, with a new first dimension for the microbatches."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """Return the tensors without their history."""
        return StepOutput(each.detach() for each in self.outputs)


class StepFunction(Generic[P]):
    """A function that splits its arguments, runs once for each microbatch, and
    gathers what it returned.
    """

    def __init__(
        self,
        function: Callable[P, Any],
        non_split_inputs: Iterable[str] | None = None,
        input_split_axes: Mapping[str, int] | None = None,
        detach_outputs: bool = True,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.whole = frozenset(non_split_inputs or ())
        self.axes = dict(input_split_axes or {})
        self.detach_outputs = detach_outputs
        self.called = 0  # how often it has returned
        self.signature = inspect.signature(function)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return the method of an object."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run all microbatches.

        Returns:
            What the function returns, with a ``StepOutput`` for each tensor, and a list with an
            item for each microbatch for everything else. None stays None.

        Raises:
            ValueError: A batch does not divide by the number of microbatches, or an argument is not
                a batch but where batches come from.
            SMPRuntimeError: ``smp.init`` has not been called.
            StepError: A rank of the pipeline failed.
        """
        count = num_microbatches()
        bound = self.signature.bind(*args, **kwargs)
        microbatches = self._microbatches(bound, count)
        name = self.function.__qualname__
        with calls.inside(
            f"step function {name} (call {self.called + 1})", CommGroup.MP_GROUP
        ) as call:
            if call is not None and self._compares_batches():
                store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001  there is no public name
                agree_on_batch(store, name, call, bound.arguments)
            results = _run(microbatches, name)
        self.called += 1
        return _gathered(results, detach=self.detach_outputs)

    def _compares_batches(self) -> bool:
        """Return whether the batch of this call is compared over the ranks of the model."""
        return self.called < _COMPARED or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")

    def _microbatches(self, bound: inspect.BoundArguments, count: int) -> list[Callable[[], Any]]:
        """Return the calls of the function, each with its part of the arguments."""
        parts = [
            inspect.BoundArguments(self.signature, type(bound.arguments)()) for _ in range(count)
        ]
        for position, (name, value) in enumerate(bound.arguments.items()):
            if position == 0 and name in ("self", "cls"):
                values: Sequence[Any] = [value] * count
            elif self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                split = {key: self._split(key, each, count) for key, each in value.items()}
                values = [
                    {key: each[index] for key, each in split.items()} for index in range(count)
                ]
            else:
                values = self._split(name, value, count)
            for part, each in zip(parts, values, strict=True):
                part.arguments[name] = each
        return [
            functools.partial(script, self.function, *part.args, **part.kwargs) for part in parts
        ]

    def _split(self, name: str, value: Any, count: int) -> Sequence[Any]:
        if name in self.whole:
            return [value] * count
        try:
            return _split(value, count, self.axes.get(name, 0), name)
        except _CannotSplitError as error:
            raise ValueError(
                f"smp.step: function {self.function.__qualname__}, argument {error}"
            ) from None


@overload
def step(function: Callable[P, Any], /) -> StepFunction[P]: ...


@overload
def step(
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[Callable[P, Any]], StepFunction[P]]: ...


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Decorate a function or a method that runs the model and its backward pass for one microbatch.

    Every tensor in its arguments, also inside lists, tuples, dictionaries and sets, is split into
    as many equal parts as there are microbatches. Tensors without dimensions are passed whole, and
    so is every other object, unless it has a method ``smp_slice(num_mb, mb, axis)``, which returns
    its part.

    Args:
        function: The function, where the decorator has no arguments.
        non_split_inputs: Names of arguments that are passed whole.
        input_split_axes: The axis along which an argument is split, by its name; 0 for the others.
        detach_outputs: Whether the tensors that are returned lose their history.
    """

    def decorate(function: Callable[..., Any]) -> StepFunction[Any]:
        return StepFunction(function, non_split_inputs, input_split_axes, detach_outputs)

    return decorate if function is None else decorate(function)


def num_microbatches() -> int:
    """Return the number of parts that a batch is split into."""
    if not state.initialized:
        raise SMPRuntimeError("the number of microbatches is not known yet: call smp.init() first")
    return state.cfg.microbatches


def _run(microbatches: Sequence[Callable[[], Any]], name: str) -> list[Any]:
    """Run the microbatches of a step, and return what each returned."""
    model, runtime = wrapped.model, present()
    if model is not None:
        model.begin_step(microbatches[0])
    results = (
        _in_turn(microbatches, model) if runtime is None else runtime.run_step(microbatches, name)
    )
    if model is not None:
        model.end_step()
    return results


def _in_turn(microbatches: Sequence[Callable[[], Any]], model: Any) -> list[Any]:
    """Run the microbatches one after another, and tell the model which is the last."""
    results = []
    for number, microbatch in enumerate(microbatches, 1):
        if model is not None:
            model.begin_microbatch(last=number == len(microbatches))
        results.append(microbatch())
    return results


class _CannotSplitError(Exception):
    """The argument that cannot be split, and why."""


def _split(value: Any, count: int, axis: int, path: str) -> Sequence[Any]:
    """Return the parts of a value, one for each microbatch.

    What has no tensor in it is the same object in all.
    """
    if isinstance(value, torch.Tensor):
        return _split_tensor(value, count, axis, path)
    if callable(part := getattr(value, "smp_slice", None)):
        return [part(count, index, axis) for index in range(count)]
    children = _children(value)
    if children is None:
        if count > 1 and _has_batches(value):
            raise _CannotSplitError(
                f"{path}: a {type(value).__name__} is not split, so each of {count} microbatches"
                " would draw from it. Draw a batch outside of the function, and pass its tensors;"
                " or name the argument in non_split_inputs"
            )
        return [value] * count
    parts = [_split(child, count, axis, f"{path}[{key!r}]") for key, child in children]
    if all(
        each is child for part, (_, child) in zip(parts, children, strict=True) for each in part
    ):
        return [value] * count
    return [_with_children(value, [part[index] for part in parts]) for index in range(count)]


def _has_batches(value: Any) -> bool:
    """Return whether a value is where batches come from.

    A file and a counter are iterators, too.
    """
    if isinstance(value, torch.utils.data.DataLoader | torch.utils.data.Dataset):
        return True
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase | itertools.count)


def _split_tensor(tensor: torch.Tensor, count: int, axis: int, path: str) -> Sequence[torch.Tensor]:
    if not tensor.dim() or count == 1:
        return [tensor] * count
    if not -tensor.dim() <= axis < tensor.dim():
        raise _CannotSplitError(
            f"{path}: a tensor of shape {tuple(tensor.shape)} has no axis {axis} to split along"
        )
    length = tensor.size(axis)
    if length % count:
        raise _CannotSplitError(
            f"{path}: axis {axis} has size {length}, which {count} microbatches do not divide; give"
            " a batch that they divide (a DataLoader with drop_last=True), or name the argument in"
            " non_split_inputs"
        )
    return [
        tensor.narrow(axis, index * (length // count), length // count) for index in range(count)
    ]


def _gathered(results: Sequence[Any], *, detach: bool) -> Any:
    """Return what the microbatches returned as one structure."""
    first = results[0]
    if all(isinstance(each, torch.Tensor) for each in results):
        return StepOutput(each.detach() if detach else each for each in results)
    if all(each is None for each in results):
        return None
    # The items of a set have no order in which those of two microbatches belong together.
    children = [
        (
            _children(each)
            if type(each) is type(first) and not isinstance(each, set | frozenset)
            else None
        )
        for each in results
    ]
    if children[0] is None or any(
        each is None or [key for key, _ in each] != [key for key, _ in children[0]]
        for each in children
    ):
        return list(results)
    values = [[value for _, value in each or ()] for each in children]
    return _with_children(
        first, [_gathered(each, detach=detach) for each in zip(*values, strict=True)]
    )


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what is in a container, with the keys, or None if it is not one."""
    if isinstance(value, torch.Size):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple | set | frozenset) else None


def _with_children(value: Any, children: Sequence[Any]) -> Any:
    """Return a container like another, with other things in it, in the same order."""
    if type(value) is dict:
        return dict(zip(value, children, strict=True))
    if isinstance(value, Mapping):
        # What transformers returns and takes: a mapping with attributes of its own.
        like: Any = copy.copy(value)
        for key, child in zip(value, children, strict=True):
            like[key] = child
        return like
    return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
