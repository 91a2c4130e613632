"""The messages that ranks send each other within a step.

The tensors of a message are sent after the message, in the order that the message describes.
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
    """Run a module, or a segment of a Sequential chain. Tensors: the tensors of the arguments.

    Attributes:
        step: Number of the step.
        function: Name of the step function that the sender runs.
        call: The remote call.
        module: Number of the module.
        segment: Segment of the chain; None for a whole module.
        microbatch: The microbatch that the call belongs to.
        place: The place of the call in the step, for random numbers.
        flags: Modes of the caller's thread.
        arguments: Positional arguments, keyword arguments, and `AttachedState` or None, without
            tensors.
        needs: For each tensor whether the caller needs its gradient.
        before: The rank and the segment that get these gradients.
        tail: Number of the model call, if the result is the result of the model; else None.
        checkpoint: Where `patches.checkpoint` runs the module: how the module runs again in the
            backward pass; else None.
        header: Describes the state that the microbatch has written; None without such state. The
            values are in `AttachedState`.
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
    header: StateHeader | None = None


class Result(NamedTuple):
    """The result of a remote call, for the caller. Tensors: the tensors of `value`.

    Attributes:
        step: Number of the step.
        call: The remote call.
        value: The result without tensors; with a header (result, `AttachedState`).
        differentiable: For each tensor whether it requires a gradient.
        header: Describes the state that the microbatch has written, or None.
    """

    step: int
    call: CallId
    value: Tree
    differentiable: tuple[bool, ...]
    header: StateHeader | None = None


class AttachedState(NamedTuple):
    """Values of state that go along with arguments or a result.

    Attributes:
        written: State that the microbatch has written, in the order of the header's writes
            (module_state.py).
        variables: Values of context variables (variables.py).
        written_tensors: Arguments of the call that were written in place: (number, value).
        written_containers: Containers among the arguments that were written: (number, content).
            Other objects that were written are numbered after the containers.
    """

    written: list[Any]
    variables: list[Any]
    written_tensors: list[tuple[int, Any]]
    written_containers: list[tuple[int, Any]]


class BackwardMode(NamedTuple):
    """The effects of a backward pass.

    Attributes:
        adds: Whether the pass adds to the gradients of parameters; `torch.autograd.grad` does not.
        keeps: Whether the graph is kept for another pass.
    """

    adds: bool = True
    keeps: bool = False


class Backward(NamedTuple):
    """Run the backward pass of a served call. Tensors: for each result its gradient, or None."""

    step: int
    call: CallId
    module: int
    segment: int | None
    microbatch: int
    mode: BackwardMode = BackwardMode()


class Gradients(NamedTuple):
    """The end of a call's backward pass, for the caller.

    Tensors: for each tensor of the arguments its gradient, or None.
    """

    step: int
    call: CallId


class NotStarted(NamedTuple):
    """The last owner of a tail call has not started the backward pass: the caller must request
    the pass.
    """

    step: int
    call: CallId


class Outputs(NamedTuple):
    """The result of the model, for the other ranks.

    Attributes:
        step: Number of the step.
        function: Name of the step function that the sender runs.
        microbatch: The microbatch.
        number: Number of the model call within the microbatch.
        value: The result without tensors; with a header (result, `AttachedState`).
        sources: For each tensor None if it is sent along, else the hop and the position of a
            result that the receiver has served.
        differentiable: For each tensor whether it requires a gradient.
        tail: For the last owner of a tail call its own hop and the number of the module.
        header: Describes the state that the microbatch has written, or None.
    """

    step: int
    function: str
    microbatch: int
    number: int
    value: Tree
    sources: tuple[tuple[Hop, int] | None, ...]
    differentiable: tuple[bool, ...]
    tail: tuple[Hop, int] | None
    header: StateHeader | None = None


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
        in_turn: Whether the microbatches of the next step of this function run one after another.
    """

    step: int
    function: str
    in_turn: bool


class Abort(NamedTuple):
    """A rank failed in the step.

    Attributes:
        step: Number of the step.
        rank: Global rank that failed.
        name: Words for the rank, such as "rank 1 (pp_rank 1)".
        summary: The error in one line.
        trace: The traceback of the error.
    """

    step: int
    rank: int
    name: str
    summary: str
    trace: str


def attach(
    header: StateHeader,
    written: list[Any],
    variables: list[Any] | None = None,
    written_tensors: Any = (),
    written_containers: Any = (),
) -> tuple[StateHeader, AttachedState] | tuple[None, None]:
    """Return a header with the values of the state that goes along.

    Nothing is sent; the lists of written arguments are copied.

    Args:
        header: Describes the state that the microbatch has written.
        written: The values of this state.
        variables: Values of context variables.
        written_tensors: As in `AttachedState`.
        written_containers: As in `AttachedState`.

    Returns:
        (header, values); (None, None) if no state goes along.
    """
    if header is EMPTY_HEADER and not (variables or written_tensors or written_containers):
        return None, None
    attached = AttachedState(
        written, variables or [], list(written_tensors), list(written_containers)
    )
    return header, attached


class Arguments:
    """The arguments of a call as they were before the call.

    The owner finds the arguments that its module has written, and the caller writes the same. Both
    number the arguments in the same order.

    Attributes:
        containers_before: Containers in the arguments, each with its content.
        leaves_before: Other objects that can be written in place, each with its state.
        tensors_before: Tensors, each with its version and shape.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        attached: AttachedState | None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Record the arguments.

        The containers among the arguments are searched, also nested ones, and their contents are
        kept for a comparison. Caches are left out while gradients are recorded.

        Args:
            args: Positional arguments.
            kwargs: Named arguments.
            attached: State that goes along with them, or None.
            tensors: The tensors of the arguments; on the caller none, because it compares none.
        """
        values = [*args, *kwargs.values()]
        if attached is not None:
            values += attached.variables
        if torch.is_grad_enabled():
            # The entries that a layer adds to a cache stay on its rank (caches.py).
            values = [value for value in values if not is_cache(value)]
        self.containers_before: list[tuple[Any, Any]] = []
        self.leaves_before: list[tuple[Any, Any]] = []
        # Arguments are mostly tensors alone: then there is nothing to look through.
        if not all(isinstance(value, torch.Tensor) for value in values):
            for cell in containers.find_containers(tuple(values)):
                self.containers_before.append((cell, containers.read_content(cell)))
            for leaf in containers.find_leaves(values, ""):
                if containers.is_assignable(leaf):
                    self.leaves_before.append((leaf, containers.read_state(leaf)))
        self.tensors_before: list[tuple[torch.Tensor, int | None, torch.Size]] = []
        for tensor in tensors:
            # torch counts no versions of a tensor that was made in inference mode.
            version = None if tensor.is_inference() else tensor._version  # noqa: SLF001
            self.tensors_before.append((tensor, version, tensor.shape))

    def numbers_by_id(self) -> dict[int, tuple[str, int]]:
        """Return the numbers of the tensors and containers, which the caller has, too.

        ``id()`` holds as long as this object lives.

        Returns:
            ``id()`` of the object -> ("tensor" or "cell", its number): a cell is a container.
        """
        numbers: dict[int, tuple[str, int]] = {}
        for number, (tensor, _, _) in enumerate(self.tensors_before):
            numbers[id(tensor)] = ("tensor", number)
        for number, (cell, _) in enumerate(self.containers_before):
            numbers[id(cell)] = ("cell", number)
        return numbers

    def find_written(self, title: str) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        """Return the tensors and the containers that were written since, each with its number.

        The arguments are not changed. Writes to tensors of inference mode are not found, because
        torch counts none.

        Args:
            title: Words for the module.

        Returns:
            (number, value) of each written tensor; (number, content or value) of each written
            container, and of each other object that was written.

        Raises:
            StepError: A tensor got another shape.
        """
        written_tensors: list[tuple[int, Any]] = []
        for number, (tensor, version, shape) in enumerate(self.tensors_before):
            if version is not None and tensor._version != version:  # noqa: SLF001
                if tensor.shape != shape:
                    raise StepError(
                        f"module {title} gave one of its arguments another shape\n{_ARGUMENTS}"
                    )
                # A view, because the tensor itself would stand for the caller's own object.
                written_tensors.append((number, tensor.view_as(tensor)))
        written_containers: list[tuple[int, Any]] = []
        for number, (container, before) in enumerate(self.containers_before):
            now = containers.read_content(container)
            if not containers.has_same_items(now, before):
                written_containers.append((number, now))
        first_leaf = len(self.containers_before)
        for number, (leaf, state) in enumerate(self.leaves_before, first_leaf):
            if containers.read_state(leaf, state) is not state:
                written_containers.append((number, containers.read_value(leaf)))
        return written_tensors, written_containers

    def repeat_writes(
        self, tensors: Sequence[torch.Tensor], attached: AttachedState, title: str
    ) -> None:
        """Write to the caller's arguments as the owner has written to its copies.

        Tensors are written in place by ``copy_``, and containers get the new content. Arguments
        that come before one that is refused have their new values.

        Args:
            tensors: The tensors of the arguments.
            attached: The state that came with the result.
            title: Words for the module.

        Raises:
            StepError: Another argument shares the memory. On the owner that argument kept its
                values.
            RuntimeError: torch refuses the write in place, as to a leaf that requires a gradient.
        """
        for number, value in attached.written_tensors:
            # One write to shared memory changes two arguments on the caller, and one on the owner,
            # which has a copy of each.
            memory = tensors[number].untyped_storage().data_ptr()
            sharers = 0
            for tensor in tensors:
                if tensor.layout is torch.strided:
                    sharers += tensor.untyped_storage().data_ptr() == memory
            if sharers > 1:
                raise StepError(
                    f"module {title} writes to memory that two of its arguments share\n{_ARGUMENTS}"
                )
            tensors[number].copy_(value)
        for number, content in attached.written_containers:
            holder, _ = [*self.containers_before, *self.leaves_before][number]
            containers.assign(holder, content)


_ARGUMENTS = (
    "Return the new value instead, or place the module with its caller with smp.set_partition."
)
