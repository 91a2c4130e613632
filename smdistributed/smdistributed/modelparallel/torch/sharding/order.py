"""See that all ranks run the same blocks in the same order, and that a block is used as a block.

To run a block its parameters are gathered from all ranks. A rank that runs another block takes part
in that, too: each gets parameters of the other's block, and nothing says so. So ranks compare what
they run: in the first passes before each block, when a difference is still an error and not a wait
without an end; later once at the end of each pass.
"""

from __future__ import annotations

import contextlib
from typing import Any

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
"""GradientReduction in which ranks compare before each block."""

_Note = tuple[int, int]
_Held = list[tuple[dict[str, Any], str, int]]  # where a parameter is, and its number
_FORWARD, _BACKWARD, _END, _USED = range(4)
_WORDS = "runs {} forward", "runs {} backward", "ends the pass", "has a gradient of {}"


class BlockOrder:
    """What this rank runs, compared with the other ranks.

    Attributes:
        sums: The gradients are summed in the next backward pass.
    """

    def __init__(self, root: nn.Module, *, gathered_again: bool, unused: bool) -> None:
        """Watch the blocks of a model whose parameters are shared.

        Args:
            root: The model.
            gathered_again: Blocks are gathered for their backward pass, too.
            unused: Ranks may use different parameters of a block.
        """
        from torch.distributed.fsdp import FSDPModule

        self._gathered_again, self._unused = gathered_again, unused
        self._parameters = [(name, p) for name, p in root.named_parameters() if mesh.is_sharded(p)]
        numbers = {id(p): number for number, (_, p) in enumerate(self._parameters)}
        blocks = [
            (name, module)
            for name, module in root.named_modules()
            if isinstance(module, FSDPModule)
        ]
        self._titles = [
            f"{name or 'the model'} ({type(block).__bases__[-1].__name__})"
            for name, block in blocks
        ]
        self._root = root
        self._noted: list[_Note] = []
        self._used: set[_Note] = set()  # what is in no block and has a gradient
        self._first = FIRST
        self.sums = True
        seen: set[int] = set()
        for number, (_, block) in reversed(list(enumerate(blocks))):
            # The model is the first, and has the rest.
            held = [
                (module._parameters, key, numbers[id(p)])  # noqa: SLF001
                for module in block.modules()
                for key, p in module._parameters.items()  # noqa: SLF001
                if mesh.is_sharded(p) and id(p) not in seen
            ]
            seen.update(id(where[key]) for where, key, _ in held)
            self._watch(number, block, held)

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Return what a forward pass of the model runs in: a check of each
        operation in the first passes.
        """
        compiled = any(module._compiled_call_impl is not None for module in self._root.modules())  # noqa: SLF001
        return (
            ShardedUseGuard(self._root)
            if self._first and not compiled
            else contextlib.nullcontext()
        )

    def end(self) -> None:
        """End a pass.

        Raises:
            StepError: Another rank ran other blocks in it, or has gradients of other parameters.
        """
        self._note(_END, 0)
        noted = [] if self._first else self._noted
        if not self._unused:
            noted = noted + [
                (_USED, n) for n, (_, p) in enumerate(self._parameters) if p.grad is not None
            ]
        self._compare(noted)
        self._noted = []
        self._first = max(self._first - 1, 0)

    def _watch(self, number: int, block: nn.Module, held: _Held) -> None:
        def before(*_: object) -> None:
            for where, key, __ in held:
                if not isinstance(where[key], nn.Parameter):
                    raise StepError(
                        f"parameter {key!r} in {self._titles[number]} was replaced for a call,"
                        " as torch.func.functional_call does it."
                        " With sharded data parallelism a block runs with its own parameters."
                        " Write the computation into its forward"
                    )
            self._note(_FORWARD, number)

        def after(_: object, __: object, outputs: Any) -> None:
            if not torch.is_grad_enabled():
                return
            found = pytrees.tensors_in(outputs)
            closed = [
                each
                for each in pytree.tree_leaves(outputs)
                if self._first and not pytrees.opens(type(each))
            ]
            if hiding := [
                each
                for each in closed
                if not isinstance(each, torch.Tensor) and pytrees.tensors_in(each)
            ]:
                raise StepError(
                    f"{self._titles[number]} returns a tensor in an object of {type(hiding[0])}."
                    " With sharded data parallelism return tensors alone or in lists, tuples,"
                    " dictionaries and dataclasses"
                )
            began = False

            def begin(_: object) -> None:
                nonlocal began
                if not began and number:
                    self._note(_BACKWARD, number)
                elif not began and self._first and not self._unused:
                    # The model's own are summed last.
                    Variable._execution_engine.queue_callback(lambda: self._before_sum(held))  # noqa: SLF001  as FSDP does
                began = True

            for output in found if self._gathered_again or not number else ():
                if output.requires_grad:
                    output.register_hook(begin)  # type: ignore[no-untyped-call]

        # In front of fully_shard's own; torch.compile of a block would trace them.
        untraced: Any = torch.compiler.disable
        block.register_forward_pre_hook(untraced(before), prepend=True)
        block.register_forward_hook(untraced(after), prepend=True)

    def _before_sum(self, held: _Held) -> None:
        """Compare of which parameters there are gradients, before messages of
        several sizes can meet.
        """
        self._used.update(
            (_USED, number) for where, key, number in held if where[key].grad is not None
        )
        if self.sums:
            self._compare(sorted(self._used))
            self._used.clear()

    def _note(self, kind: int, number: int) -> None:
        self._noted.append((kind, number))
        if self._first:
            self._compare(self._noted[-1:])

    def _compare(self, noted: list[_Note]) -> None:
        """Raise an error on all ranks where one has other notes."""
        value = hash(tuple(noted)) >> 2
        both = torch.tensor([value, -value])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=state.groups.objects)
        if not int(both.sum()):
            return
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, noted, group=state.groups.objects)
        first, other = next(
            (step, rank)
            for step in range(max(map(len, ranks)))
            for rank in range(1, len(ranks))
            if ranks[rank][step : step + 1] != ranks[0][step : step + 1]
        )
        notes = (
            [*ranks[0][first : first + 1], (_END, 0)][0],
            [*ranks[other][first : first + 1], (_END, 0)][0],
        )
        advice = (
            "Give smp.DistributedModel find_unused_parameters=True,"
            " so that ranks may use different ones"
        )
        if _USED not in (notes[0][0], notes[1][0]):
            advice = (
                "Let all ranks take the same way through the model, or put what a rank chooses in a"
                " ModuleDict, and give smp.DistributedModel find_unused_parameters=True"
            )
        raise StepError(
            f"ranks take different ways: rank 0 {self._said(notes[0])}, and rank {other}"
            f" {self._said(notes[1])}. With sharded data parallelism each computes with the other's"
            f" parameters then. {advice}"
        )

    def _said(self, note: _Note) -> str:
        kind, number = note
        return _WORDS[kind].format(
            self._parameters[number][0] if kind == _USED else self._titles[number]
        )
