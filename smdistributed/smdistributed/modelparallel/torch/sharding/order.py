"""Check that all ranks run the same blocks in the same order, and that a block is used as a block.

Before a block runs, its parameters are gathered from all ranks. If another rank runs another block
at this time, each rank gets parameters of the other's block, without an error. So the ranks compare
the blocks that they run. In the first passes they compare before each block, because a difference
could also make them wait for ever. Later they compare once at the end of each pass.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.transport import pytrees

from . import mesh
from .misuse import ShardedUseGuard

__all__ = ["BlockOrder"]

FIRST = 3
"""The first passes, in which ranks compare before each block."""

_FORWARD, _BACKWARD, _END, _USED = range(4)
"""Kinds of events."""
_WORDS = "runs {} forward", "runs {} backward", "ends the pass", "has a gradient of {}"
"""Words for the kinds."""


class _Event(NamedTuple):
    """An event of a pass, as the ranks compare it.

    Attributes:
        kind: `_FORWARD`, `_BACKWARD`, `_END` or `_USED`.
        number: Number of the block; for `_USED` number of the parameter.
    """

    kind: int
    number: int


class _BlockParameter(NamedTuple):
    """A parameter of a block.

    Attributes:
        holder: The dictionary of a module's parameters.
        key: Name in this dictionary.
        number: Number of the parameter in the model.
    """

    holder: dict[str, Any]
    key: str
    number: int

    @property
    def value(self) -> Any:
        """The present parameter."""
        return self.holder[self.key]


class BlockOrder:
    """The blocks that this rank runs, compared with the other ranks.

    Attributes:
        sums: Whether the gradients are summed in the next backward pass.
    """

    def __init__(self, root: nn.Module, *, gathered_again: bool, unused: bool) -> None:
        """Watch the blocks of a model whose parameters are shared.

        The blocks get forward hooks. A block is a module that FSDP gathers alone.

        Args:
            root: The model.
            gathered_again: Whether blocks are gathered for their backward pass, too.
            unused: Whether ranks may use different parameters of a block.
        """
        from torch.distributed.fsdp import FSDPModule

        self._gathered_again, self._unused = gathered_again, unused
        self._parameters = [(name, p) for name, p in root.named_parameters() if mesh.is_sharded(p)]
        numbers = {id(p): number for number, (_, p) in enumerate(self._parameters)}
        blocks: list[nn.Module] = []
        self._titles: list[str] = []
        for name, module in root.named_modules():
            if isinstance(module, FSDPModule):
                blocks.append(module)  # type: ignore[arg-type]  # a Module, too
                kind = type(module).__bases__[-1]  # fully_shard puts a class in front of this one
                self._titles.append(f"{name or 'the model'} ({kind.__name__})")
        self._root = root
        self._events: list[_Event] = []  # of the present pass
        self._used: set[_Event] = set()  # gradients of parameters that are in no inner block
        self._first_passes_left = FIRST
        self.sums = True
        # From the inside out: the model is the first block, and has the remaining parameters.
        assigned: set[int] = set()
        for number, block in reversed(list(enumerate(blocks))):
            parameters: list[_BlockParameter] = []
            for module in block.modules():
                for key, parameter in module._parameters.items():  # noqa: SLF001
                    if mesh.is_sharded(parameter) and id(parameter) not in assigned:
                        place = _BlockParameter(module._parameters, key, numbers[id(parameter)])  # noqa: SLF001
                        parameters.append(place)
            assigned.update(id(parameter.value) for parameter in parameters)
            self._watch(number, block, parameters)

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass: in the first passes each operation is checked.

        With a compiled module nothing is checked.
        """
        for module in self._root.modules():
            if module._compiled_call_impl is not None:  # noqa: SLF001
                return contextlib.nullcontext()
        if not self._first_passes_left:
            return contextlib.nullcontext()
        return ShardedUseGuard(self._root)

    def end(self) -> None:
        """End a pass.

        The recorded events are dropped, and one of the first passes is counted.

        Raises:
            StepError: Another rank ran other blocks in the pass, or has gradients of other
                parameters.
            RuntimeError: The collective broke, because a rank is gone.
        """
        self._note(_END, 0)
        # In the first passes the blocks are compared already.
        events = [] if self._first_passes_left else list(self._events)
        if not self._unused:
            for number, (_, parameter) in enumerate(self._parameters):
                if parameter.grad is not None:
                    events.append(_Event(_USED, number))
        self._compare(events)
        self._events = []
        self._first_passes_left = max(self._first_passes_left - 1, 0)

    def _watch(self, number: int, block: nn.Module, parameters: list[_BlockParameter]) -> None:
        """Register hooks that note the forward and the backward pass of a block.

        The hooks stay for the life of the block. They raise StepError if ranks differ.

        Args:
            number: Number of the block; 0 is the model.
            block: The block.
            parameters: Its parameters without those of inner blocks.
        """

        def before(*_: object) -> None:
            """Note the forward of the block. Runs before it.

            Raises:
                StepError: A parameter of the block was replaced for this call.
            """
            for parameter in parameters:
                if not isinstance(parameter.value, nn.Parameter):
                    raise StepError(
                        f"parameter {parameter.key!r} in {self._titles[number]} was replaced for"
                        " a call,"
                        " as torch.func.functional_call does it."
                        " With sharded data parallelism a block runs with its own parameters."
                        " Write the computation into its forward"
                    )
            self._note(_FORWARD, number)

        def after(_: object, __: object, outputs: Any) -> None:
            """Register hooks on the outputs, which note the backward of the block."""
            if not torch.is_grad_enabled():
                return
            tensors = pytrees.tensors_in(outputs)
            if self._first_passes_left:
                self._check_outputs(number, outputs)
            began = False

            def begin(_: object) -> None:
                """Note the backward of the block, when the first output gets its gradient."""
                nonlocal began
                if not began and number:
                    self._note(_BACKWARD, number)
                elif not began and self._first_passes_left and not self._unused:
                    # The gradients of the model's own parameters are summed last.
                    Variable._execution_engine.queue_callback(lambda: self._before_sum(parameters))  # noqa: SLF001  as FSDP does
                began = True

            if not self._gathered_again and number:
                return  # such a block has no message in its backward pass
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(begin)  # type: ignore[no-untyped-call]

        # In front of fully_shard's own hooks. torch.compile of a block must not trace them.
        untraced: Any = torch.compiler.disable
        block.register_forward_pre_hook(untraced(before), prepend=True)
        block.register_forward_hook(untraced(after), prepend=True)

    def _check_outputs(self, number: int, outputs: Any) -> None:
        """Refuse outputs with a tensor in an object that fully_shard does not open.

        FSDP would not see such a tensor.

        Raises:
            StepError: There is such an object.
        """
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) or pytrees.is_only_a_container(type(leaf)):
                continue
            if pytrees.tensors_in(leaf):
                raise StepError(
                    f"{self._titles[number]} returns a tensor in an object of {type(leaf)}."
                    " With sharded data parallelism return tensors alone or in lists, tuples,"
                    " dictionaries and dataclasses"
                )

    def _before_sum(self, parameters: list[_BlockParameter]) -> None:
        """Note the parameters with a gradient; in the pass that sums, compare them with all ranks.

        Gradients are summed in one message for many parameters: ranks with different parameters
        would send messages of different sizes, which hangs or corrupts them.

        Raises:
            StepError: A rank has gradients of other parameters.
            RuntimeError: The collective broke, because a rank is gone.
        """
        for parameter in parameters:
            if parameter.value.grad is not None:
                self._used.add(_Event(_USED, parameter.number))
        if self.sums:
            self._compare(sorted(self._used))
            self._used.clear()

    def _note(self, kind: int, number: int) -> None:
        """Note an event, and compare it with the other ranks in the first passes.

        Raises:
            StepError: Another rank has another event.
            RuntimeError: The collective broke, because a rank is gone.
        """
        event = _Event(kind, number)
        self._events.append(event)
        if self._first_passes_left:
            self._compare([event])

    def _compare(self, events: list[_Event]) -> None:
        """Compare events with the other ranks. Collective over the job.

        Raises:
            StepError: A rank has other events. It is raised on all ranks.
            RuntimeError: The collective broke, because a rank is gone.
        """
        # Hot: one small message. The maxima of a number and its negative differ only if ranks do.
        value = hash(tuple(events)) >> 2
        maxima = torch.tensor([value, -value])
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=state.groups.objects)
        if not int(maxima.sum()):
            return
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, events, group=state.groups.objects)
        raise StepError(self._difference(of_ranks))

    def _difference(self, of_ranks: list[list[_Event]]) -> str:
        """Return the text of an error about the first event that differs from rank 0.

        Args:
            of_ranks: For each rank its events.

        Raises:
            AssertionError: All events are equal.
        """
        longest = max(map(len, of_ranks))
        end = _Event(_END, 0)  # in the place of missing events
        rows = [[*events, *[None] * (longest - len(events))] for events in of_ranks]
        for column in zip(*rows, strict=True):
            differing = [rank for rank, event in enumerate(column) if event != column[0]]
            if differing:
                other = differing[0]
                first_event, other_event = column[0] or end, column[other] or end
                break
        else:
            raise AssertionError("the events of all ranks are equal")
        advice = (
            "Give smp.DistributedModel find_unused_parameters=True,"
            " so that ranks may use different ones"
        )
        if _USED not in (first_event.kind, other_event.kind):
            advice = (
                "Let all ranks take the same way through the model, or put what a rank chooses in a"
                " ModuleDict, and give smp.DistributedModel find_unused_parameters=True"
            )
        return (
            f"ranks take different ways: rank 0 {self._describe(first_event)}, and rank {other}"
            f" {self._describe(other_event)}. With sharded data parallelism each computes with the"
            f" other's parameters then. {advice}"
        )

    def _describe(self, event: _Event) -> str:
        """Return words for an event, such as "runs blocks.0 (Block) forward"."""
        if event.kind == _USED:
            name, _ = self._parameters[event.number]
        else:
            name = self._titles[event.number]
        return _WORDS[event.kind].format(name)
