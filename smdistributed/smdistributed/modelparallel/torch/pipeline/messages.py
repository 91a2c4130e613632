"""What ranks send each other within a step.

Each message is sent with tensors beside it, in the order that the message describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport import containers
from smdistributed.modelparallel.torch.transport.pytrees import Tree

from .caches import is_cache
from .module_state import EMPTY_HEADER, StateHeader
from .recompute import Recomputation
from .threadstate import Flags

CallId = tuple[int, int]
"""The rank that called a remote module, and the number of the call on that rank."""

Hop = tuple[CallId, "int | None"]
"""One served part of a call: the call, and the segment of a Sequential chain
(None: a whole module).
"""


class Forward(NamedTuple):
    """Run a module, or a segment of a Sequential chain. Tensors: its tensor arguments.

    Attributes:
        step: Number of the step.
        function: Name of the step function that the sender runs.
        call: The remote call.
        module: Number of the module.
        segment: Segment of the chain; None for a whole module.
        microbatch: The microbatch that the call belongs to.
        place: The place of the call in the step, for random numbers.
        flags: Modes of the caller's thread.
        arguments: Positional and keyword arguments, and `AttachedState` or None, without tensors.
        needs: For each tensor whether the caller wants its gradient.
        before: The rank and segment that gets these gradients.
        tail: If the result is the model's own: the number of the model call; else None.
        checkpoint: Set where `patches.checkpoint` runs the module: how it runs
            again in the backward pass.
        notes: What the microbatch has written; the values are beside the arguments.
    """

    step: int
    function: str
    call: CallId
    module: int
    segment: int | None
    microbatch: int
    place: int
    flags: Flags
    arguments: Tree
    needs: tuple[bool, ...]
    before: tuple[int, int | None]
    tail: int | None
    checkpoint: Recomputation | None
    notes: StateHeader | None = None


class Result(NamedTuple):
    """What a remote call returned, for the caller, with `AttachedState`. Tensors: those of both."""

    step: int
    call: CallId
    value: Tree
    differentiable: tuple[bool, ...]
    notes: StateHeader | None = None


class AttachedState(NamedTuple):
    """What goes along with arguments or a result.

    Attributes:
        written: Values of what the microbatch has written (module_state.py).
        variables: Values of context variables (variables.py).
        tensors: Arguments of the call that were written in place: number, and the values.
        cells: Containers among the arguments that were written: number, and the content.
    """

    written: list[Any]
    variables: list[Any]
    tensors: list[tuple[int, Any]]
    cells: list[tuple[int, Any]]


class BackwardMode(NamedTuple):
    """What a backward pass leaves.

    Attributes:
        adds: It adds to the gradients of parameters; `torch.autograd.grad` does not.
        keeps: The graph stays, for another pass.
    """

    adds: bool = True
    keeps: bool = False


class Backward(NamedTuple):
    """Run the backward pass of a served call. Tensors: the gradients of its results, or None."""

    step: int
    call: CallId
    module: int
    segment: int | None
    microbatch: int
    mode: BackwardMode = BackwardMode()


class Gradients(NamedTuple):
    """The end of a call's backward pass, for the caller.

    Tensors: the gradients of its arguments, or None.
    """

    step: int
    call: CallId


class NotStarted(NamedTuple):
    """The last owner of a tail call has not started the backward pass: the
    caller must ask for it.
    """

    step: int
    call: CallId


class Outputs(NamedTuple):
    """What the model returned, for the other ranks.

    Attributes:
        step: Number of the step.
        function: Name of the step function that the sender runs.
        microbatch: The microbatch.
        number: Number of the model call within the microbatch.
        value: The value without tensors.
        sources: For each tensor None if it is sent along, else hop and position of a result that
            the receiver served.
        differentiable: For each tensor whether it requires a gradient.
        tail: For the last owner of a tail call its own hop and the number of its module.
        notes: What the microbatch has written; the values are beside the value.
    """

    step: int
    function: str
    microbatch: int
    number: int
    value: Tree
    sources: tuple[tuple[Hop, int] | None, ...]
    differentiable: tuple[bool, ...]
    tail: tuple[Hop, int] | None
    notes: StateHeader | None = None


class Pick(NamedTuple):
    """The next context that the first of several tensor-parallel peers runs.

    The others do the same.
    """

    step: int
    key: tuple[Any, ...]


class Done(NamedTuple):
    """The owner of the root module, or the first of tensor-parallel peers, has ended the step.

    Attributes:
        step: Number of the step.
        function: Name of the step function that the sender ran.
        late: The microbatches of the next step of this function run one after another.
    """

    step: int
    function: str
    late: bool


class Abort(NamedTuple):
    """A rank failed in the step.

    Attributes:
        step: Number of the step.
        rank: Its global rank.
        name: Words for the rank.
        summary: The error in one line.
        trace: Its traceback.
    """

    step: int
    rank: int
    name: str
    summary: str
    trace: str


def attach(
    notes: StateHeader,
    written: list[Any],
    variables: list[Any] | None = None,
    tensors: Any = (),
    cells: Any = (),
) -> tuple[StateHeader, AttachedState] | tuple[None, None]:
    """Return what goes along; None and None if nothing does."""
    if notes is EMPTY_HEADER and not (variables or tensors or cells):
        return None, None
    return notes, AttachedState(written, variables or [], list(tensors), list(cells))


class Arguments:
    """The arguments of a call as they were before it: the owner sees what it
    writes, and the caller repeats that.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        along: AttachedState | None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        inside = (*args, *kwargs.values(), *(() if along is None else along.variables))
        if torch.is_grad_enabled():  # what a layer adds to a cache stays with it (caches.py)
            inside = tuple(each for each in inside if not is_cache(each))
        plain = all(isinstance(each, torch.Tensor) for each in inside)
        self.cells = (
            [] if plain else [(cell, containers.content(cell)) for cell in containers.cells(inside)]
        )
        leaves = () if plain else containers.leaves(list(inside), "")
        self.leaves = [
            (each, containers.state(each)) for each in leaves if containers.writable(each)
        ]
        self.tensors = [(t, None if t.is_inference() else t._version, t.shape) for t in tensors]  # noqa: SLF001

    def known(self) -> dict[int, tuple[str, int]]:
        """Return, by the identity of each tensor and container, its kind and
        number: the caller has them, too.
        """
        found = {
            id(tensor): ("tensor", number) for number, (tensor, _, _) in enumerate(self.tensors)
        }
        return found | {id(cell): ("cell", number) for number, (cell, _) in enumerate(self.cells)}

    def written(self, where: str) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        """Return the tensors and the containers that were written since, each with its number.

        Args:
            where: Words for the module.

        Raises:
            StepError: A tensor got another shape.
        """
        tensors: list[tuple[int, Any]] = []
        for number, (tensor, version, shape) in enumerate(self.tensors):
            if version is not None and tensor._version != version:  # noqa: SLF001
                if tensor.shape != shape:
                    raise StepError(
                        f"module {where} gave one of its arguments another shape\n{_ARGUMENTS}"
                    )
                # Not the caller's own object: its values.
                tensors.append((number, tensor.view_as(tensor)))
        cells = []
        for number, (cell, before) in enumerate(self.cells):
            now = containers.content(cell)
            if not containers.same(now, before):
                cells.append((number, now))
        for number, (leaf, state) in enumerate(self.leaves, len(self.cells)):
            if containers.state(leaf, state) is not state:
                cells.append((number, containers.value(leaf)))
        return tensors, cells

    def take(self, tensors: Sequence[torch.Tensor], back: AttachedState, where: str) -> None:
        """Write what the owner wrote.

        Args:
            tensors: Those of the arguments.
            back: What came with the result.
            where: Words for the module.

        Raises:
            StepError: Another argument has the same memory: on the owner it kept its values.
        """
        for number, value in back.tensors:
            memory = tensors[number].untyped_storage().data_ptr()
            if [t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided].count(
                memory
            ) > 1:
                raise StepError(
                    f"module {where} writes to memory that two of its arguments share\n{_ARGUMENTS}"
                )
            tensors[number].copy_(value)
        for number, content in back.cells:
            containers.assign([*self.cells, *self.leaves][number][0], content)


_ARGUMENTS = (
    "Return the new value instead, or place the module with its caller with smp.set_partition."
)
