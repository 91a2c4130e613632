"""The model call and its backward within the user's step function: every rank gets the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport.pytrees import flatten, unflatten

from .caches import without_values
from .messages import Backward, Hop, NotStarted, Outputs, attach
from .module_server import Server, non_leaf
from .rank_state import PipelineRank
from .scheduler import FORWARD


class Model:
    """The root module, as the user's step function calls it.

    The root's owner runs it and sends what it returns to all others. A tensor that another rank
    computed is not sent back to it. After a tail call the last owner has sent the outputs already.
    """

    def __init__(self, pipeline: PipelineRank, server: Server) -> None:
        self.pipeline, self.server = pipeline, server
        self._leaves: dict[tuple[int, int], tuple[Hop, int, list[torch.Tensor]]] = {}

    def begin(self) -> None:
        """Forget the step before."""
        self._leaves.clear()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the root module returns."""
        pipeline = self.pipeline
        context = pipeline.context()
        number = context.calls
        context.calls += 1
        if pipeline.me != pipeline.root_rank:
            message, tensors = pipeline.scheduler.wait(("O", context.microbatch, number), FORWARD)
            pipeline.arrived(tensors)
            return self._take(message, tensors)
        pipeline.order.append(("F", context.microbatch))
        context.in_model = True
        try:
            result = pipeline.modules.root(*args, **kwargs)
        finally:
            context.in_model = False
        given = without_values(result)
        value, tensors = flatten(given)
        if context.tail is not None:
            sent, context.tail = context.tail, None
            if len(sent) != len(tensors) or any(
                a is not b for a, b in zip(sent, tensors, strict=True)
            ):
                raise StepError(
                    "the model returned something else than its last remote call did\n"
                    "Set SMP_TAIL_CALLS=0 in the environment of all ranks."
                )
            return result
        module_state, own = pipeline.scheduler.module_state, {id(tensor) for tensor in tensors}
        module_state.leave((context.microbatch, False))
        for peer in range(pipeline.n):
            if peer == pipeline.me:
                continue
            notes, along = attach(*module_state.pack(context.microbatch, peer, copy=True))
            whole, parts = (value, tensors) if along is None else flatten((given, along))
            made = [context.produced.get(id(tensor)) for tensor in parts]
            sources = tuple(
                (entry[2], entry[3])
                if entry is not None and entry[0]() is t and entry[1] == peer
                else None
                for entry, t in zip(made, parts, strict=True)
            )
            outputs = Outputs(
                pipeline.number,
                pipeline.function,
                context.microbatch,
                number,
                whole,
                sources,
                tuple(bool(t.requires_grad) and id(t) in own for t in parts),
                None,
                notes,
            )
            sent = [tensor for tensor, source in zip(parts, sources, strict=True) if source is None]
            pipeline.post(peer, outputs, sent, "outputs of the model")
        return result

    def backward(
        self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Run the backward pass of a loss.

        The root's owner drives it. Elsewhere the outputs are copies, and nothing happens; but after
        a tail call the last owner starts at once.
        """
        pipeline = self.pipeline
        context = pipeline.context()
        if pipeline.me == pipeline.root_rank:
            pipeline.scheduler.wait_at_gate()
            pipeline.order.append(("B", context.microbatch))
            module_state = pipeline.scheduler.module_state
            module_state.leave((context.microbatch, False))
            with module_state.explained():
                torch.autograd.backward(tensors, grads)
            module_state.leave((context.microbatch, False), backward=True)
            return
        own = [(key, value) for key, value in self._leaves.items() if key[0] == context.microbatch]
        if not own:
            return
        torch.autograd.backward(tensors, grads)
        for key, (hop, module, leaves) in own:
            found = [leaf.grad for leaf in leaves]
            if all(grad is None for grad in found) or not self.server.has_graph(hop):
                continue
            del self._leaves[key]
            message = Backward(pipeline.number, hop[0], module, hop[1], context.microbatch)
            pipeline.scheduler.hold_at_gate(self.server.backward_context(message, found))

    def finish(self, microbatch: int) -> None:
        """Clear up when the step function has returned for a microbatch."""
        pipeline = self.pipeline
        self.server.results.pop(microbatch, None)
        for key in [key for key in self._leaves if key[0] == microbatch]:
            hop, _, _ = self._leaves.pop(key)
            if self.server.has_graph(hop):
                pipeline.post(pipeline.root_rank, NotStarted(pipeline.number, hop[0]), (), "")

    def _take(self, message: Outputs, received: Sequence[torch.Tensor]) -> Any:
        given, outputs, leaves = iter(received), [], []
        kept = self.server.results.get(message.microbatch, {})
        for source, differentiable in zip(message.sources, message.differentiable, strict=True):
            tensor = next(given) if source is None else kept[source[0]][source[1]]
            if differentiable:
                with torch.inference_mode(False), torch.enable_grad():
                    tensor = tensor.detach().requires_grad_()
                    outputs.append(non_leaf(tensor))
            else:
                outputs.append(tensor)
            leaves.append(tensor)
        if message.tail is not None:
            hop, module = message.tail
            self._leaves[message.microbatch, message.number] = (hop, module, leaves)
        result = unflatten(message.value, outputs)
        if message.notes is not None:
            result, along = result
            turn = (message.microbatch, True)
            module_state = self.pipeline.scheduler.module_state
            module_state.unpack(turn, message.notes, along.written, self.pipeline.root_rank)
            module_state.enter(turn)
        return result
