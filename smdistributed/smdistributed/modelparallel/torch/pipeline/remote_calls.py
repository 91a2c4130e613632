"""Calls of remote modules: one autograd function for each, whose forward and
backward run on the owner.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport.pytrees import Tree, flatten, tensors_in, unflatten

from . import variables
from .caches import trim_caches
from .messages import Arguments, Backward, BackwardMode, CallId, Forward, attach
from .microbatch_threads import Context
from .module_state import StateHeader
from .modules import run_children
from .randomness import draw
from .rank_state import TWICE, PipelineRank
from .scheduler import BACKWARD, FORWARD
from .threadstate import Flags, capture


class RemoteCall:
    """One call of a remote module, or of the rest of a Sequential chain.

    Attributes:
        id: Unique in the step, and equal on tensor-parallel peers.
        first: The rank that gets the arguments.
        last: The rank that returns the result, and starts the backward.
        hop: The last served part.
    """

    def __init__(
        self,
        caller: Caller,
        id: CallId,  # noqa: A002
        number: int,
        segment: int | None,
        tail: int | None,
    ) -> None:
        modules = caller.pipeline.modules
        self.caller, self.id, self.number, self.segment, self.tail = (
            caller,
            id,
            number,
            segment,
            tail,
        )
        if segment is None:
            self.first = self.last = modules.owner[number]
            self.last_segment = None
        else:
            segments = modules.chains[number]
            self.first, self.last, self.last_segment = (
                segments[segment].owner,
                segments[-1].owner,
                len(segments) - 1,
            )
        self.value: Tree | None = None
        self.notes: StateHeader | None = None
        self.differentiable: tuple[bool, ...] = ()
        self.count = 0
        self.asked = False

    @property
    def title(self) -> str:
        """Words for the module."""
        return self.caller.pipeline.modules.title(self.number)

    def forward(
        self, arguments: Tree, notes: StateHeader | None, tensors: list[torch.Tensor], flags: Flags
    ) -> list[torch.Tensor]:
        """Send the arguments, and wait for the result."""
        pipeline = self.caller.pipeline
        context = pipeline.context()
        needs = tuple(bool(flags.grad and tensor.requires_grad) for tensor in tensors)
        self.count = len(tensors)
        message = Forward(
            pipeline.number,
            pipeline.function,
            self.id,
            self.number,
            self.segment,
            context.microbatch,
            draw(),
            flags,
            arguments,
            needs,
            (pipeline.me, None),
            self.tail,
            pipeline.modules.modules[self.number].__dict__.get("_smp_checkpoint"),
            notes,
        )
        pipeline.post(self.first, message, tensors, f"arguments of module {self.title}")
        self.value, self.differentiable, self.notes, results = pipeline.scheduler.wait(
            ("R", self.id), FORWARD
        )
        pipeline.arrived(results)
        return list(results)

    def backward(
        self, grads: list[torch.Tensor | None], mode: BackwardMode
    ) -> list[torch.Tensor | None]:
        """Send the gradients of the result, and wait for those of the arguments.

        After a tail call the last owner has the loss too, and starts by itself.
        """
        if self.asked:
            raise StepError(
                f"a second backward pass through one call of module {self.title}\n{TWICE}"
            )
        self.asked = not mode.keeps
        if self.tail is None or not mode.adds:
            self.ask(grads, mode)
        else:
            self.caller.expect(self, grads)
        gradients: list[torch.Tensor | None] = self.caller.pipeline.scheduler.wait(
            ("B", self.id), BACKWARD
        )
        self.caller.pipeline.arrived(gradients)
        return gradients

    def ask(self, grads: list[torch.Tensor | None], mode: BackwardMode = BackwardMode()) -> None:  # noqa: B008  it never changes
        """Send the gradients of the result to the last owner."""
        pipeline = self.caller.pipeline
        microbatch = pipeline.context().microbatch if pipeline.scheduler.current else 0
        message = Backward(
            pipeline.number, self.id, self.number, self.last_segment, microbatch, mode
        )
        pipeline.post(self.last, message, grads, "gradients")


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", bool)  # noqa: SLF001
"""Whether a running pass leaves its graph.

PyTorch 2.4 does not say; a second pass over a call is an error there.
"""


def _check_transforms(title: str) -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        raise StepError(
            f"torch.func, vmap and is_grads_batched do not go through module {title}, which is on"
            " another partition\nPlace it with smp.set_partition where they are used."
        )


class _Remote(torch.autograd.Function):
    """Records a remote call in the graph.

    `tie` is a tensor that requires a gradient: the parameters are remote, so the result may need a
    gradient although no argument does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: RemoteCall,
        results: list[torch.Tensor],
        tie: torch.Tensor,  # noqa: ARG004
        *tensors: torch.Tensor,  # noqa: ARG004
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.mark_non_differentiable(
            *[r for r, needed in zip(results, call.differentiable, strict=True) if not needed]
        )
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: RemoteCall = ctx.call
        if torch.is_grad_enabled():
            raise StepError(
                f"create_graph=True: gradients of gradients do not go through module {call.title},"
                " which is on another partition\n"
                "Place it with smp.set_partition where the gradient is taken."
            )
        _check_transforms(call.title)
        wanted = [
            g if needed else None for g, needed in zip(grads, call.differentiable, strict=True)
        ]
        if all(g is None for g in wanted):
            return (None,) * (3 + call.count)
        # torch.autograd.grad runs what leads to its inputs, and no parameter: so not the tie, the
        # first of the inputs.
        mode = BackwardMode(
            bool(torch._C._will_engine_execute_node(ctx.next_functions[0][0])),  # noqa: SLF001
            bool(_keeps_graph()),
        )
        return (None, None, None, *call.backward(wanted, mode))


class Caller:
    """The calling side of remote calls."""

    def __init__(self, pipeline: PipelineRank) -> None:
        self.pipeline = pipeline
        self.tail_calls = os.environ.get("SMP_TAIL_CALLS", "1") != "0"
        self._ids = itertools.count()
        self._expected: dict[CallId, tuple[RemoteCall, list[torch.Tensor | None]]] = {}
        self._not_started: set[CallId] = set()

    def begin(self) -> None:
        """Forget the step before."""
        self._ids = itertools.count()
        self._expected.clear()
        self._not_started.clear()

    def module(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a remote module."""
        return self._call(number, args, kwargs, None)

    def chain(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a Sequential of this rank that spans ranks: the result of each
        segment goes to the next owner.
        """
        if kwargs or len(args) != 1:
            raise TypeError(f"{self.pipeline.modules.title(number)} takes one argument")
        value = args[0]
        pipeline = self.pipeline
        for n, segment in enumerate(pipeline.modules.chains[number]):
            if segment.owner != pipeline.me:
                return self._call(number, (value,), {}, n)
            value = run_children(pipeline.modules.modules[number], segment.modules, value)
        return value

    def _call(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], segment: int | None
    ) -> Any:
        pipeline = self.pipeline
        if not pipeline.in_step:
            raise StepError(
                f"module {pipeline.modules.title(number)} is on pp_rank"
                f" {pipeline.modules.owner[number]},"
                " and can only be called in the thread of a function decorated with smp.step"
            )
        context = pipeline.context()
        _check_transforms(pipeline.modules.title(number))
        scope = pipeline.scheduler.caller_thread.scope(
            [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        )
        if scope is not None:
            raise StepError(
                f"module {pipeline.modules.title(number)} was called within {scope},"
                " and is on another partition, where that would have no effect\n"
                "Enter it around the whole step function,"
                " or place the module with its caller with smp.set_partition."
            )
        if context.tail is not None:
            raise StepError(_NOT_LAST)
        tail = self._tail(context, number)
        call = RemoteCall(self, (pipeline.me, next(self._ids)), number, segment, tail)
        module_state, microbatch = pipeline.scheduler.module_state, context.microbatch
        turn = (microbatch, False)
        module_state.leave(turn)
        if segment is None:
            module_state.check_hooks(number)
        notes, written = module_state.pack(microbatch, call.first)
        named = variables.changed(pipeline.scheduler.caller_thread.variables)
        if named:
            names = tuple(name for name, _ in named)
            hooked = variables.hooked(pipeline.modules.modules) if variables.collects(names) else ()
            notes = notes._replace(variables=names, hooked=hooked)
        kept = module_state.written(microbatch)
        note, along = attach(notes, written, [value for _, value in named])
        args, kwargs = trim_caches(pipeline.modules.modules[number], args, kwargs)
        before = Arguments(args, kwargs, along)
        arguments, tensors = flatten((args, kwargs, along))
        flags = capture()
        results = call.forward(arguments, note, tensors, flags)
        module_state.returned(turn)
        if results and flags.grad and not flags.inference:
            tie = torch.empty(0, requires_grad=True)
            # What came along and was not read leads nowhere: its graph may be gone.
            idle = () if call.notes is None else call.notes.idle
            if call.notes is not None and call.notes.unused:
                old = module_state.old(microbatch)
                idle = (*idle, *(n for n in call.notes.unused if id(tensors[n]) in old))
            used = (
                [tensor.detach() if n in idle else tensor for n, tensor in enumerate(tensors)]
                if idle
                else tensors
            )
            results = list(_Remote.apply(call, results, tie, *used))  # type: ignore[no-untyped-call]
        assert call.value is not None
        if kept:
            module_state.restore(turn, kept)
        result = unflatten(
            call.value,
            results,
            lambda own: tensors[own[1]] if own[0] == "tensor" else before.cells[own[1]][0],
        )
        if call.notes is not None:
            result, back = result
            module_state.unpack(turn, call.notes, back.written, call.last)
            variables.put(call.notes.variables, back.variables, ())
            if note is not None and along is not None:
                module_state.forward(
                    turn, note, along.written, {id(tensors[n]) for n in call.notes.idle}
                )
            before.take(tensors, back, call.title)
            module_state.borrow(result, call.notes.lent, call.title)
        if tail is not None:
            context.tail = results if call.notes is None else tensors_in(result)
        elif context.key[0] == "S" and pipeline.me == pipeline.root_rank:
            hop = (call.id, call.last_segment)
            for n, tensor in enumerate(results):
                context.produced[id(tensor)] = (weakref.ref(tensor), call.last, hop, n)
        return result

    def _tail(self, context: Context, number: int) -> int | None:
        """Return the number of the model call whose result this call's will be,
        if that is certain.
        """
        pipeline = self.pipeline
        path = pipeline.modules.tails.get(number)
        if path is None or not self.tail_calls or context.key[0] != "S" or not context.in_model:
            return None
        if torch_module._global_forward_hooks or any(  # noqa: SLF001
            module._forward_hooks or module._backward_hooks or module._backward_pre_hooks  # noqa: SLF001
            for module in path
        ):
            return None
        return context.calls - 1

    def expect(self, call: RemoteCall, grads: list[torch.Tensor | None]) -> None:
        """Keep the gradients of a tail call, in case its last owner does not start by itself."""
        if call.id in self._not_started:
            call.ask(grads)
        else:
            self._expected[call.id] = (call, grads)

    def ended(self, id: CallId) -> None:  # noqa: A002
        """Forget the gradients of a tail call whose backward has ended."""
        self._expected.pop(id, None)

    def not_started(self, id: CallId) -> None:  # noqa: A002
        """Ask for the backward of a tail call that its last owner has not started."""
        expected = self._expected.pop(id, None)
        if expected is None:
            self._not_started.add(id)
        else:
            expected[0].ask(expected[1])


_NOT_LAST = (
    "the model called a module after the one whose result it returns\n"
    "Set SMP_TAIL_CALLS=0 in the environment of all ranks."
)
