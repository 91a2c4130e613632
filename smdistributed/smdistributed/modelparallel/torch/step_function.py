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

_COMPARED_CALLS = 2
"""The first calls of a step function, whose batches are compared over ranks. A mistake in a
script shows in the first call already.
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
        return torch.cat([output if output.dim() else output[None] for output in self.outputs])

    def stack(self) -> torch.Tensor:
        """Return the tensors as one, with a new first dimension for the microbatches."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """Return the tensors without their history."""
        return StepOutput(output.detach() for output in self.outputs)


class StepFunction(Generic[P]):
    """A step function: a call splits the arguments, runs the script's function once for each
    microbatch, and gathers the results.

    Attributes:
        function: The script's function.
        unsplit: Names of the arguments that every microbatch gets whole.
        axes: Name of an argument -> the axis along which the argument is split.
        detach_outputs: Whether returned tensors lose their history.
        completed_calls: Number of calls that have returned.
        signature: Signature of the script's function.
    """

    def __init__(
        self,
        function: Callable[P, Any],
        non_split_inputs: Iterable[str] | None = None,
        input_split_axes: Mapping[str, int] | None = None,
        detach_outputs: bool = True,
    ) -> None:
        """Keep the function and the options, and take the function's name and docstring."""
        functools.update_wrapper(self, function)
        self.function = function
        self.unsplit = frozenset(non_split_inputs or ())
        self.axes = dict(input_split_axes or {})
        self.detach_outputs = detach_outputs
        self.completed_calls = 0
        self.signature = inspect.signature(function)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind the step function to an object, as a method."""
        if instance is None:
            return self
        return types.MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run all microbatches.

        The model is divided in the first call. Gradients, attributes and buffers of the model
        change as the script's function changes them. On each rank of the pipeline the call must be
        made.

        Returns:
            The script's return value: a ``StepOutput`` for each tensor, a list with an item for
            each microbatch for every other object, None for None. For example a function that
            returns ``loss, {"step": 3}`` gives ``StepOutput([...]), {"step": [3, 3]}`` with two
            microbatches.

        Raises:
            ValueError: The number of microbatches does not divide a batch, or an argument is a
                source of batches, such as a DataLoader.
            SMPRuntimeError: ``smp.init`` has not been called.
            StepError: A rank of the pipeline failed.
            TypeError: The arguments do not fit the script's function.
            SMPConfigError: The model cannot be divided.
            Exception: An error of the script's function or of the model on this rank.
        """
        count = num_microbatches()
        bound = self.signature.bind(*args, **kwargs)
        microbatches = self._make_microbatches(bound, count)
        name = self.function.__qualname__
        title = f"step function {name} (call {self.completed_calls + 1})"
        with calls.inside(title, CommGroup.MP_GROUP) as call:
            if call is not None and self._compares_batches():
                store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001  there is no public name
                agree_on_batch(store, name, call, bound.arguments)
            results = _run(microbatches, name)
        self.completed_calls += 1
        return _gather(results, detach=self.detach_outputs)

    def _compares_batches(self) -> bool:
        """Return whether the batch of this call is compared over the ranks of the model."""
        if self.completed_calls < _COMPARED_CALLS:
            return True
        return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")

    def _make_microbatches(
        self, bound: inspect.BoundArguments, count: int
    ) -> list[Callable[[], Any]]:
        """Return the calls of the script's function, each with its part of the arguments.

        Tensors are split into views of their memory.

        Args:
            bound: The arguments of the step function.
            count: Number of microbatches.

        Raises:
            ValueError: An argument cannot be split.
        """
        microbatches = [
            inspect.BoundArguments(self.signature, type(bound.arguments)()) for _ in range(count)
        ]
        for position, (name, value) in enumerate(bound.arguments.items()):
            if position == 0 and name in ("self", "cls"):
                # The object of a method: each microbatch gets the same one.
                parts: Sequence[Any] = [value] * count
            elif self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                parts = self._split_keywords(value, count)
            else:
                parts = self._split_argument(name, value, count)
            for microbatch, part in zip(microbatches, parts, strict=True):
                microbatch.arguments[name] = part
        return [
            functools.partial(script, self.function, *microbatch.args, **microbatch.kwargs)
            for microbatch in microbatches
        ]

    def _split_keywords(self, keywords: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """Return the parts of ``**kwargs``, one dictionary for each microbatch.

        Each value is split by its own name.

        Raises:
            ValueError: An argument cannot be split.
        """
        parts: list[dict[str, Any]] = [{} for _ in range(count)]
        for key, value in keywords.items():
            values = self._split_argument(key, value, count)
            for part, part_value in zip(parts, values, strict=True):
                part[key] = part_value
        return parts

    def _split_argument(self, name: str, value: Any, count: int) -> Sequence[Any]:
        """Return the parts of an argument, one for each microbatch.

        Args:
            name: Name of the argument: tells the axis, and whether it is passed whole.
            value: The argument.
            count: Number of microbatches.

        Raises:
            ValueError: The argument cannot be split.
            Exception: An error of a method ``smp_slice``.
        """
        if name in self.unsplit:
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

    Returns:
        The step function; with arguments a decorator that returns it.
    """

    def decorate(function: Callable[..., Any]) -> StepFunction[Any]:
        return StepFunction(function, non_split_inputs, input_split_axes, detach_outputs)

    if function is None:
        return decorate
    return decorate(function)


def num_microbatches() -> int:
    """Return the number of parts that a batch is split into.

    Raises:
        SMPRuntimeError: ``smp.init`` has not been called.
    """
    if not state.initialized:
        raise SMPRuntimeError("the number of microbatches is not known yet: call smp.init() first")
    return state.cfg.microbatches


def _run(microbatches: Sequence[Callable[[], Any]], name: str) -> list[Any]:
    """Run the microbatches of a step, and return the result of each in their order.

    The wrapped model, if there is one, is told when the step begins and ends.

    Args:
        microbatches: The script's function on each microbatch.
        name: Name of the step function.

    Raises:
        StepError: A rank of the pipeline failed.
        SMPConfigError: The model cannot be divided.
        Exception: An error of the script's function, of the model or of a hook.
    """
    model, runtime = wrapped.model, present()
    if model is not None:
        model.begin_step(microbatches[0])
    if runtime is None:
        results = _run_in_turn(microbatches, model)
    else:
        results = runtime.run_step(microbatches, name)
    if model is not None:
        model.end_step()
    return results


def _run_in_turn(microbatches: Sequence[Callable[[], Any]], model: Any) -> list[Any]:
    """Run the microbatches one after another, and return the result of each.

    The model is told which one is the last: only then gradients are summed over replicas.

    Raises:
        Exception: An error of the script's function.
    """
    results = []
    for number, microbatch in enumerate(microbatches, 1):
        if model is not None:
            model.begin_microbatch(last=number == len(microbatches))
        results.append(microbatch())
    return results


class _CannotSplitError(Exception):
    """An argument cannot be split. The text says which one, and why."""


def _split(value: Any, count: int, axis: int, path: str) -> Sequence[Any]:
    """Return the parts of a value, one for each microbatch.

    A container without a tensor is not copied: every microbatch gets the same object.

    Args:
        value: A tensor, a container of tensors, or any other object.
        count: Number of microbatches.
        axis: Axis along which tensors are split.
        path: Place of the value in the call, for errors: ``batch['labels'][0]``.

    Raises:
        _CannotSplitError: A tensor does not divide, or the value is a source of batches.
        Exception: An error of a method ``smp_slice``.
    """
    if isinstance(value, torch.Tensor):
        return _split_tensor(value, count, axis, path)
    slice_of = getattr(value, "smp_slice", None)
    if callable(slice_of):
        return [slice_of(count, index, axis) for index in range(count)]
    children = _children(value)
    if children is None:
        if count > 1 and _is_source_of_batches(value):
            raise _CannotSplitError(
                f"{path}: a {type(value).__name__} is not split, so each of {count} microbatches"
                " would draw from it. Draw a batch outside of the function, and pass its tensors;"
                " or name the argument in non_split_inputs"
            )
        return [value] * count

    rows: list[list[Any]] = [[] for _ in range(count)]  # the children of each microbatch
    is_split = False
    for key, child in children:
        parts = _split(child, count, axis, f"{path}[{key!r}]")
        for row, part in zip(rows, parts, strict=True):
            row.append(part)
            is_split |= part is not child
    if not is_split:
        return [value] * count
    try:
        return [_with_children(value, row) for row in rows]
    except _NotCopiedError as error:
        raise _CannotSplitError(
            f"{path}: {error}. Pass a dict, or name the argument in non_split_inputs"
        ) from error


def _is_source_of_batches(value: Any) -> bool:
    """Return whether a value is a data set, a DataLoader, or an iterator over batches.

    A file and a counter are iterators, too, but have no batches.

    Nothing is drawn from it.
    """
    if isinstance(value, torch.utils.data.DataLoader | torch.utils.data.Dataset):
        return True
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase | itertools.count)


def _split_tensor(tensor: torch.Tensor, count: int, axis: int, path: str) -> Sequence[torch.Tensor]:
    """Return equal parts of a tensor along an axis: views of its memory.

    A tensor without dimensions is in each part.

    Args:
        tensor: The tensor.
        count: Number of microbatches.
        axis: The axis, which may be negative.
        path: Place of the tensor in the call, for errors.

    Raises:
        _CannotSplitError: The tensor has no such axis, or its size does not divide.
    """
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
    part = length // count
    return [tensor.narrow(axis, index * part, part) for index in range(count)]


def _gather(results: Sequence[Any], *, detach: bool) -> Any:
    """Join the results of the microbatches in one structure.

    The results are not changed.

    Args:
        results: The results, in the order of the microbatches.
        detach: Whether tensors lose their history.

    Returns:
        A ``StepOutput`` for tensors, None for None, a container of the same class where all
        results are containers with equal keys, else a list of the results.
    """
    if all(isinstance(result, torch.Tensor) for result in results):
        output = StepOutput(results)
        return output.detach() if detach else output
    if all(result is None for result in results):
        return None

    first = results[0]
    keys: list[Any] | None = None
    rows: list[list[Any]] = []  # the children of each microbatch's result
    for result in results:
        children = None
        # Items of sets have no order by which those of two microbatches could be paired.
        if type(result) is type(first) and not isinstance(result, set | frozenset):
            children = _children(result)
        if children is None:
            return list(results)
        result_keys = [key for key, _ in children]
        if keys is not None and result_keys != keys:
            return list(results)
        keys = result_keys
        rows.append([child for _, child in children])
    columns = zip(*rows, strict=True)
    try:
        return _with_children(first, [_gather(column, detach=detach) for column in columns])
    except _NotCopiedError:
        return list(results)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and items of a container; None for any other object.

    ``["a", "b"]`` gives ``[(0, "a"), (1, "b")]``.
    """
    if isinstance(value, torch.Size):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(value))
    return None


class _NotCopiedError(TypeError):
    """A mapping cannot be copied with other items."""


def _with_children(value: Any, children: Sequence[Any]) -> Any:
    """Return a container of the same class and keys as another one, with other items.

    The other container is not changed.

    Args:
        value: The other container: a mapping, list, tuple, named tuple or set.
        children: The items, in the order of `_children`.

    Raises:
        _NotCopiedError: The container is a mapping without a copy of its own.
    """
    if type(value) is dict:
        return dict(zip(value, children, strict=True))
    if isinstance(value, Mapping):
        return _copy_with_items(value, dict(zip(value, children, strict=True)))
    if hasattr(value, "_fields"):  # a NamedTuple
        return type(value)(*children)
    return type(value)(children)


def _copy_with_items(value: Mapping[Any, Any], items: Mapping[Any, Any]) -> Any:
    """Return a copy of a mapping with other items; the mapping itself keeps its own.

    transformers returns and takes mappings that have attributes of their own.

    Raises:
        _NotCopiedError: The mapping takes no items, or its copy shares the items.
    """
    before = dict(value.items())
    try:
        copied: Any = copy.copy(value)
        if not isinstance(value, dict) and not hasattr(value, "__copy__"):
            # A plain copy shares the dictionary in which such a class keeps its items.
            for name, attribute in list(getattr(copied, "__dict__", {}).items()):
                if isinstance(attribute, dict):
                    copied.__dict__[name] = copy.copy(attribute)
        for key, item in items.items():
            copied[key] = item
    except TypeError as error:
        raise _NotCopiedError(f"a {type(value).__name__} takes no items") from error
    changes = {key: item for key, item in items.items() if item is not before[key]}
    # The mapping itself has a new item: it shares its items with the copy. Put the old ones back.
    if any(value[key] is item for key, item in changes.items()):
        for key, item in before.items():
            copied[key] = item
        raise _NotCopiedError(f"a copy of a {type(value).__name__} shares its items")
    return copied
