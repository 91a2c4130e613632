"""The model call within the user's step function, and its backward: every rank gets the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport.pytrees import flatten, unflatten

from .caches import without_values
from .messages import Backward, Hop, NotStarted, Outputs, attach
from .microbatch_threads import Context
from .module_server import Server, non_leaf
from .module_state import MicrobatchRun
from .rank_state import PipelineRank
from .scheduler import FORWARD


class _TailOutputs(NamedTuple):
    """The outputs of the model that came from a tail call of this rank.

    Attributes:
        hop: The served part of the call.
        module: Number of the module.
        leaves: The outputs as leaves of this rank's graph, where the loss is computed.
    """

    hop: Hop
    module: int
    leaves: list[torch.Tensor]


class Model:
    """The root module, as the user's step function calls it.

    The root's owner runs the module and sends the outputs to all other ranks. A tensor is not sent
    back to the rank that computed it. After a tail call the last owner has sent the outputs
    already.
    """

    def __init__(self, pipeline: PipelineRank, server: Server) -> None:
        self.pipeline, self.server = pipeline, server
        # (microbatch, model call) -> the outputs of a tail call that this rank has served.
        self._tail_outputs: dict[tuple[int, int], _TailOutputs] = {}

    def begin(self) -> None:
        """Forget the calls of the last step."""
        self._tail_outputs.clear()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the root module, and return its result.

        The owner runs the module. On other ranks the result comes from the owner, and other
        contexts run meanwhile.

        The count of the context's model calls is raised. The owner sends the outputs to all other
        ranks, without the values of caches in training (caches.py). State that came with the
        outputs is written to this rank's modules.

        Args:
            args: Positional arguments.
            kwargs: Named arguments.

        Raises:
            StepError: The thread runs no step, the model returned something else than its tail
                call, the outputs cannot be sent, or the step failed.
            PeerError: The connection with a rank is lost.
            Exception: An error of the model.
        """
        pipeline = self.pipeline
        context = pipeline.context()
        number = context.calls
        context.calls += 1
        if pipeline.rank != pipeline.root_rank:
            message, tensors = pipeline.scheduler.wait(("O", context.microbatch, number), FORWARD)
            pipeline.arrived(tensors)
            return self._receive(message, tensors)
        pipeline.order.append(("F", context.microbatch))
        context.in_model = True
        try:
            result = pipeline.modules.root(*args, **kwargs)
        finally:
            context.in_model = False
        outputs = without_values(result)
        if context.tail is not None:
            # The last owner has sent the result of the call to all ranks.
            _, tensors = flatten(outputs)
            sent, context.tail = context.tail, None
            if list(map(id, sent)) != list(map(id, tensors)):
                raise StepError(
                    "the model returned something else than its last remote call did\n"
                    "Set SMP_TAIL_CALLS=0 in the environment of all ranks."
                )
            return result
        pipeline.scheduler.module_state.leave(MicrobatchRun(context.microbatch))
        self._send(context, number, outputs)
        return result

    def _send(self, context: Context, number: int, outputs: Any) -> None:
        """Send the outputs of a model call to all other ranks.

        A tensor that the receiver has computed itself is named by its call, and not sent. The state
        that the microbatch has written goes along, and is remembered as known there.

        Args:
            context: The context that called the model.
            number: Number of the model call within the microbatch.
            outputs: The outputs.

        Raises:
            PeerError: The connection with a rank is lost.
            StepError: The outputs cannot be pickled, or have a nested or sparse tensor.
        """
        pipeline = self.pipeline
        plain_value, output_tensors = flatten(outputs)
        output_ids = {id(tensor) for tensor in output_tensors}
        for peer in range(pipeline.size):
            if peer == pipeline.rank:
                continue
            state = pipeline.scheduler.module_state.pack(context.microbatch, peer, copy=True)
            header, attached = attach(*state)
            value, tensors = plain_value, output_tensors
            if attached is not None:
                value, tensors = flatten((outputs, attached))

            sources: list[tuple[Hop, int] | None] = []
            sent: list[torch.Tensor] = []
            differentiable: list[bool] = []
            for tensor in tensors:
                produced = context.produced.get(id(tensor))
                # An id() may be another tensor's by now: the reference tells.
                is_of_peer = (
                    produced is not None and produced.rank == peer and produced.tensor() is tensor
                )
                if produced is not None and is_of_peer:
                    sources.append((produced.hop, produced.position))
                else:
                    sources.append(None)
                    sent.append(tensor)
                differentiable.append(bool(tensor.requires_grad) and id(tensor) in output_ids)
            message = Outputs(
                pipeline.step_number,
                pipeline.function,
                context.microbatch,
                number,
                value,
                tuple(sources),
                tuple(differentiable),
                None,
                header,
            )
            pipeline.post(peer, message, sent, "outputs of the model")

    def backward(
        self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Run the backward pass of a loss.

        The root's owner runs it, and the other ranks serve it. On these ranks the outputs are
        copies, and this call does nothing; but after a tail call the last owner starts at once.

        Gradients of parameters are added to. On the owner the context waits first, under the
        schedule 'simple', for the forward passes of all microbatches. A pass is added to
        `pipeline.order` there.

        Args:
            tensors: The loss, or several tensors.
            grads: For each tensor its gradient, or None.

        Raises:
            StepError: The thread runs no step, or is within a mode or hooks that would have no
                effect on another rank; the step failed meanwhile, or torch refused the pass for a
                parameter or container that the step has written.
            RuntimeError: torch refused the pass for another reason.
        """
        pipeline = self.pipeline
        context = pipeline.context()
        scope = pipeline.scheduler.caller_thread.find_scope()
        if scope is not None:
            raise StepError(
                f"model.backward was called within {scope.name},"
                " which would have no effect on the other partitions\n"
                f"Call it outside of {scope.name}."
            )
        if pipeline.rank == pipeline.root_rank:
            pipeline.scheduler.wait_for_all_forwards()
            pipeline.order.append(("B", context.microbatch))
            module_state = pipeline.scheduler.module_state
            run = MicrobatchRun(context.microbatch)
            module_state.leave(run)
            with module_state.explain_backward_errors():
                torch.autograd.backward(tensors, grads)
            module_state.leave(run, backward=True)
            return
        own_keys = self._keys_of(context.microbatch)
        if not own_keys:
            return
        torch.autograd.backward(tensors, grads)
        for key in own_keys:
            hop, module, leaves = self._tail_outputs[key]
            leaf_grads = [leaf.grad for leaf in leaves]
            if all(grad is None for grad in leaf_grads) or not self.server.has_graph(hop):
                continue
            del self._tail_outputs[key]
            message = Backward(pipeline.step_number, hop[0], module, hop[1], context.microbatch)
            pipeline.scheduler.make_backward_ready(
                self.server.backward_context(message, leaf_grads)
            )

    def finish(self, microbatch: int) -> None:
        """Free the results of a microbatch, when the step function has returned for it.

        If no backward pass came to a tail call, the root's owner is told to request the pass.

        Args:
            microbatch: Number of the microbatch.

        Raises:
            PeerError: The connection with the root's owner is lost.
        """
        pipeline = self.pipeline
        self.server.results.pop(microbatch, None)
        for key in self._keys_of(microbatch):
            hop, _, _ = self._tail_outputs.pop(key)
            if self.server.has_graph(hop):
                message = NotStarted(pipeline.step_number, hop[0])
                pipeline.post(pipeline.root_rank, message, (), "")

    def _keys_of(self, microbatch: int) -> list[tuple[int, int]]:
        """Return the keys of a microbatch's tail outputs: (microbatch, model call)."""
        return [key for key in self._tail_outputs if key[0] == microbatch]

    def _receive(self, message: Outputs, received: Sequence[torch.Tensor]) -> Any:
        """Return the outputs of the model that another rank has sent.

        Tensors that require a gradient become leaves of this rank's graph. State that came along is
        written to this rank's modules.

        After a tail call of this rank the leaves are kept, for the backward that this rank starts
        itself.

        Args:
            message: The outputs without tensors.
            received: The tensors that were sent along.

        Returns:
            The result of the model. Its tensors that require a gradient are copies which are no
            leaves, so that the script may write to them.

        Raises:
            StepError: State cannot be taken over, see `ModuleState.unpack`.
        """
        next_received = iter(received)
        outputs: list[torch.Tensor] = []
        leaves: list[torch.Tensor] = []
        served_results = self.server.results.get(message.microbatch, {})
        for source, differentiable in zip(message.sources, message.differentiable, strict=True):
            if source is None:
                tensor = next(next_received)
            else:
                hop, position = source
                tensor = served_results[hop][position]
            if differentiable:
                # The loss is computed from these, under modes that the script may have set.
                with torch.inference_mode(False), torch.enable_grad():
                    tensor = tensor.detach().requires_grad_()
                    outputs.append(non_leaf(tensor))
            else:
                outputs.append(tensor)
            leaves.append(tensor)
        if message.tail is not None:
            hop, module = message.tail
            key = (message.microbatch, message.number)
            self._tail_outputs[key] = _TailOutputs(hop, module, leaves)
        result = unflatten(message.value, outputs)
        if message.header is not None:
            result, attached = result
            run = MicrobatchRun(message.microbatch, is_copy=True)
            module_state = self.pipeline.scheduler.module_state
            module_state.unpack(run, message.header, attached.written, self.pipeline.root_rank)
            module_state.enter(run)
        return result
