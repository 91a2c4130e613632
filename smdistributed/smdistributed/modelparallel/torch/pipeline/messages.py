"""What ranks send each other within a step.

Each message is sent with tensors beside it, in the order that the message describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.wire.nested import Tree, flatten, mark, unflatten

from .recompute import Again
from .threadstate import Flags

CallId = tuple[int, int]
"""The rank that called a remote module, and the number of the call on that rank."""

Hop = tuple[CallId, "int | None"]
"""One served part of a call: the call, and the segment of a Sequential chain (None: a whole module)."""


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
        arguments: The arguments without tensors.
        needs: For each tensor whether the caller wants its gradient.
        before: The rank and segment that gets these gradients.
        tail: If the result is the model's own: the number of the model call; else None.
        checkpoint: Set where `patches.checkpoint` runs the module: how it runs again in the backward pass.
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
    checkpoint: Again | None


class Result(NamedTuple):
    """What a remote call returned, for the caller. Tensors: those of the result."""

    step: int
    call: CallId
    value: Tree
    differentiable: tuple[bool, ...]


class Mode(NamedTuple):
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
    mode: Mode = Mode()


class Gradients(NamedTuple):
    """The end of a call's backward pass, for the caller. Tensors: the gradients of its arguments, or None."""

    step: int
    call: CallId


class NotStarted(NamedTuple):
    """The last owner of a tail call has not started the backward pass: the caller must ask for it."""

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
        sources: For each tensor None if it is sent along, else hop and position of a result that the receiver served.
        differentiable: For each tensor whether it requires a gradient.
        tail: For the last owner of a tail call its own hop and the number of its module.
    """

    step: int
    function: str
    microbatch: int
    number: int
    value: Tree
    sources: tuple[tuple[Hop, int] | None, ...]
    differentiable: tuple[bool, ...]
    tail: tuple[Hop, int] | None


class Pick(NamedTuple):
    """The next context that the first of several tensor-parallel peers runs. The others do the same."""

    step: int
    key: tuple[Any, ...]


class Done(NamedTuple):
    """The owner of the root module, or the first of tensor-parallel peers, has ended the step, and which one it ran."""

    step: int
    function: str


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


def pack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tree, list[torch.Tensor]]:
    """Take the tensors out of the arguments of a call."""
    one = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and mark(args[0]) is None
    return flatten(args[0] if one else (args, kwargs))


def unpack_arguments(packed: Tree, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put the tensors back into the arguments of a call."""
    if packed.spec is None:
        return (tensors[0],), {}
    args, kwargs = unflatten(packed, tensors)
    return args, kwargs
