"""What ranks send each other within a step, and how nested values with tensors are packed for it.

Each message is sent with tensors beside it, in the order that the message describes.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from smdistributed.modelparallel.torch.recompute import Again

from .threadstate import Flags

CallId = tuple[int, int]
"""The rank that called a remote module, and the number of the call on that rank."""

Hop = tuple[CallId, "int | None"]
"""One served part of a call: the call, and the segment of a Sequential chain (None: a whole module)."""


class Packed(NamedTuple):
    """A nested value without its tensors.

    Attributes:
        spec: The pickled structure; None if the value is one tensor.
        leaves: The other leaves; None in the place of a tensor.
        places: Positions of the tensors among the leaves.
    """

    spec: bytes | None
    leaves: tuple[Any, ...]
    places: tuple[int, ...]


class Forward(NamedTuple):
    """Run a module, or a segment of a Sequential chain. Tensors: its tensor arguments.

    Attributes:
        step: Number of the step.
        call: The remote call.
        module: Number of the module.
        segment: Segment of the chain; None for a whole module.
        microbatch: The microbatch that the call belongs to.
        flags: Modes of the caller's thread.
        arguments: The arguments without tensors.
        needs: For each tensor whether the caller wants its gradient.
        before: The rank and segment that gets these gradients.
        tail: If the result is the model's own: the number of the model call; else None.
        checkpoint: Set where `patches.checkpoint` runs the module: how it runs again in the backward pass.
    """

    step: int
    call: CallId
    module: int
    segment: int | None
    microbatch: int
    flags: Flags
    arguments: Packed
    needs: tuple[bool, ...]
    before: tuple[int, int | None]
    tail: int | None
    checkpoint: Again | None


class Result(NamedTuple):
    """What a remote call returned, for the caller. Tensors: those of the result."""

    step: int
    call: CallId
    value: Packed
    differentiable: tuple[bool, ...]


class Backward(NamedTuple):
    """Run the backward pass of a served call. Tensors: the gradients of its results, or None."""

    step: int
    call: CallId
    module: int
    segment: int | None
    microbatch: int


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
        microbatch: The microbatch.
        number: Number of the model call within the microbatch.
        value: The value without tensors.
        sources: For each tensor None if it is sent along, else hop and position of a result that the receiver served.
        differentiable: For each tensor whether it requires a gradient.
        tail: For the last owner of a tail call its own hop and the number of its module.
    """

    step: int
    microbatch: int
    number: int
    value: Packed
    sources: tuple[tuple[Hop, int] | None, ...]
    differentiable: tuple[bool, ...]
    tail: tuple[Hop, int] | None


class Pick(NamedTuple):
    """The next context that the first of several tensor-parallel peers runs. The others do the same."""

    step: int
    key: tuple[Any, ...]


class Done(NamedTuple):
    """The owner of the root module, or the first of tensor-parallel peers, has ended the step."""

    step: int


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


_ONE = Packed(None, (None,), (0,))
_pickled: dict[pytree.TreeSpec, bytes] = {}
_specs: dict[bytes, pytree.TreeSpec] = {}
_MOST = 4096


def pack(value: Any) -> tuple[Packed, list[torch.Tensor]]:
    """Take the tensors out of a nested value."""
    if isinstance(value, torch.Tensor):
        return _ONE, [value]
    leaves, spec = pytree.tree_flatten(value)
    places = tuple(n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    others = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return Packed(_dump(spec), others, places), [leaves[n] for n in places]


def unpack(packed: Packed, tensors: Sequence[Any]) -> Any:
    """Put the tensors back into a nested value."""
    if packed.spec is None:
        return tensors[0]
    leaves = list(packed.leaves)
    for place, tensor in zip(packed.places, tensors, strict=True):
        leaves[place] = tensor
    return pytree.tree_unflatten(leaves, _load(packed.spec))


def pack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Packed, list[torch.Tensor]]:
    """Take the tensors out of the arguments of a call."""
    return (
        pack(args[0]) if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) else pack((args, kwargs))
    )


def unpack_arguments(packed: Packed, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put the tensors back into the arguments of a call."""
    if packed.spec is None:
        return (tensors[0],), {}
    args, kwargs = unpack(packed, tensors)
    return args, kwargs


def _dump(spec: pytree.TreeSpec) -> bytes:
    """Return a structure as bytes. The same few travel all the time."""
    try:
        known = _pickled.get(spec)
    except TypeError:  # a context without a hash
        return pickle.dumps(spec, protocol=5)
    if known is None:
        if len(_pickled) >= _MOST:
            _pickled.clear()
        known = _pickled[spec] = pickle.dumps(spec, protocol=5)
    return known


def _load(data: bytes) -> pytree.TreeSpec:
    spec = _specs.get(data)
    if spec is None:
        if len(_specs) >= _MOST:
            _specs.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own class for leaves
            spec = pickle.loads(data)  # noqa: S301  from a rank of this job
        assert isinstance(spec, pytree.TreeSpec)
        _specs[data] = spec
    return spec
