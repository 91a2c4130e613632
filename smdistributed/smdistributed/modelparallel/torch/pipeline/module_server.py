"""The serving side of remote calls: run modules of this rank for other ranks."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport.pytrees import Tree, flatten, tensors_in, unflatten

from . import own_passes, variables
from .messages import (
    Arguments,
    AttachedState,
    Backward,
    BackwardMode,
    Forward,
    Gradients,
    Hop,
    Outputs,
    Result,
    attach,
)
from .microbatch_threads import Context
from .module_state import EMPTY_HEADER, MicrobatchRun, StateHeader
from .modules import run_children
from .randomness import place
from .rank_state import TWICE, PipelineRank
from .scheduler import FORWARD
from .threadstate import BACKWARD as BACKWARD_FLAGS
from .threadstate import capture


class NonLeaf(torch.autograd.Function):
    """The identity, with a result that is not a leaf of the graph.

    Modules and scripts may write to such a tensor in place; torch refuses writes to a leaf.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Return the values."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Return the gradient."""
        return grad


def find_leaves(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the ``id()`` of each leaf of autograd, a tensor that collects a gradient, in the
    graphs of tensors.
    """
    leaves: set[int] = set()
    visited: set[Any] = set()
    to_visit: list[Any] = [tensor.grad_fn for tensor in tensors]
    while to_visit:
        node = to_visit.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(id(leaf))
        to_visit += [next_node for next_node, _ in node.next_functions]
    return leaves


def find_unused(
    inputs: Sequence[torch.Tensor],
    seen_by_module: Sequence[torch.Tensor],
    attached: set[int],
    sent: Sequence[torch.Tensor],
) -> tuple[int, ...]:
    """Return the numbers of the attached tensors that are in no graph of the tensors sent back.

    The caller then leads no gradient to them.

    Args:
        inputs: The received tensors, each a leaf.
        seen_by_module: The same tensors as the module got them.
        attached: ``id()`` of the tensors of ``seen_by_module`` that are attached state and require
            a gradient.
        sent: The tensors that are sent back.

    Returns:
        Positions in ``inputs``, from 0, in ascending order.
    """
    if not attached:
        return ()
    leaves = find_leaves(sent)
    unused: list[int] = []
    for number, (leaf, tensor) in enumerate(zip(inputs, seen_by_module, strict=True)):
        if id(tensor) in attached and id(leaf) not in leaves:
            unused.append(number)
    return tuple(unused)


def non_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values that is not a leaf of the graph.

    Its gradient is added to the gradient of the given tensor.
    """
    result: torch.Tensor = NonLeaf.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class _SavedForward(NamedTuple):
    """The graph of a served forward, for its backward.

    Attributes:
        inputs: The received tensors, leaves of the graph.
        results: The tensors of the result.
        differentiable: For each result whether it requires a gradient.
        needs: For each input whether the caller needs its gradient.
        before: (rank, segment) that get these gradients; the segment is None for the caller.
        place: The place of the call in the step, for random numbers.
    """

    inputs: list[torch.Tensor]
    results: list[torch.Tensor]
    differentiable: tuple[bool, ...]
    needs: tuple[bool, ...]
    before: tuple[int, int | None]
    place: int


class _Reply(NamedTuple):
    """The result of a served call as it is sent on.

    Attributes:
        value: The result without its tensors, with attached state if there is a header.
        tensors: The tensors of the value.
        header: Describes the attached state, or None.
    """

    value: Tree
    tensors: list[torch.Tensor]
    header: StateHeader | None


@dataclass(frozen=True)
class _ServedCall:
    """A forward that this rank serves.

    Attributes:
        message: The request.
        header: Describes the state that came with it; `EMPTY_HEADER` without such state.
        inputs: The received tensors, leaves of the graph.
        seen_by_module: The same tensors as the module got them, no leaves.
        attached: The values of the state that came along, or None.
        before: The arguments before the module ran.
        context: Context variables before the module ran.
        argument_tensors: The tensors of the arguments, if state came along.
    """

    message: Forward
    header: StateHeader
    inputs: list[torch.Tensor]
    seen_by_module: list[torch.Tensor]
    attached: AttachedState | None
    before: Arguments
    context: contextvars.Context
    argument_tensors: list[torch.Tensor]


class Server:
    """Runs modules of this rank for other ranks.

    Attributes:
        pipeline: This rank's place in its pipeline.
        results: Microbatch -> results of served calls, which the model's outputs may refer to.
    """

    def __init__(self, pipeline: PipelineRank) -> None:
        self.pipeline = pipeline
        self._saved: dict[Hop, _SavedForward] = {}
        self.results: dict[int, dict[Hop, list[torch.Tensor]]] = {}

    def begin(self) -> None:
        """Forget the calls of the last step."""
        self._saved.clear()
        self.results.clear()

    def accept_forward(self, message: Forward, tensors: list[torch.Tensor]) -> None:
        """Make a context for a forward that another rank requests; the scheduler runs it later.

        Args:
            message: The request.
            tensors: The tensors of the arguments.
        """
        context = Context(
            ("F", message.call, message.segment),
            message.microbatch,
            lambda: self._run_request(self._forward, message, tensors),
            message.flags,
            inline=self.pipeline.modules.is_inline(message.module, message.segment),
        )
        context.place = message.place
        self.pipeline.scheduler.make_ready(context, FORWARD)

    def accept_backward(self, message: Backward, grads: list[torch.Tensor | None]) -> None:
        """Make a context for a backward pass that another rank requests; the scheduler runs it
        later.

        Args:
            message: The request.
            grads: For each tensor of the result its gradient, or None.
        """
        self.pipeline.scheduler.make_ready(self.backward_context(message, grads), "B")

    def backward_context(self, message: Backward, grads: list[torch.Tensor | None]) -> Context:
        """Return the context that runs the backward of a served call.

        The context is not made ready, and its saved graph stays until it runs.

        Args:
            message: The request.
            grads: For each tensor of the result its gradient, or None.
        """
        context = Context(
            ("B", message.call, message.segment),
            message.microbatch,
            lambda: self._run_request(self._backward, message, grads),
            BACKWARD_FLAGS,
            inline=self.pipeline.modules.is_inline(message.module, message.segment),
        )
        saved = self._saved.get((message.call, message.segment))
        if saved is not None:
            # Random numbers of its own: other ones than the forward's, and the same in each run.
            context.place = place(saved.place, -1)
        return context

    def _run_request(self, run: Callable[[Any, Any], None], message: Any, tensors: Any) -> None:
        """Run a request of another rank, by `_forward` or `_backward`.

        A step function may wait below on the stack of this thread. So the passes of the request
        are marked as smp's own (own_passes.py), and are not taken for passes of the script.

        Raises:
            Exception: As `_forward` or `_backward`.
        """
        with own_passes.inside():
            run(message, tensors)

    def has_graph(self, hop: Hop) -> bool:
        """Return whether a backward of a served call is possible, and has not started."""
        return hop in self._saved

    def _forward(self, message: Forward, tensors: list[torch.Tensor]) -> None:
        """Run a module or a segment, and send the result to the caller or to the next segment.

        State that came along is written to the modules first. The graph is kept for the backward.

        The module runs under the modes of the present thread. What it wrote in place is noted
        afterwards, and a pass is added to `pipeline.order`. The received tensors with needed
        gradients become leaves: ``requires_grad`` is set on them.

        Args:
            message: The request.
            tensors: The tensors of the arguments.

        Raises:
            StepError: The module left another gradient mode, inference mode or autocast; state or a
                result cannot be sent; or a microbatch saw state in another order than in one
                process.
            PeerError: The connection with the rank that gets the result is lost.
            Exception: An error of the module.
        """
        pipeline, module_state = self.pipeline, self.pipeline.scheduler.module_state
        pipeline.order.append(("F", message.microbatch))
        pipeline.arrived(tensors)
        # The received tensors are leaves, which get the gradients. A module must not write to a
        # leaf in place, so it gets others.
        inputs, seen_by_module = [], []
        for tensor, is_needed in zip(tensors, message.needs, strict=True):
            inputs.append(tensor.requires_grad_() if is_needed else tensor)
            seen_by_module.append(non_leaf(tensor) if is_needed else tensor)
        args, kwargs, attached = unflatten(message.arguments, seen_by_module)
        run, header = MicrobatchRun(message.microbatch), message.header or EMPTY_HEADER
        if attached is not None:
            module_state.unpack(run, header, attached.written, message.before[0])
            module_state.enter(run)
            hooked_models = [pipeline.modules.modules[number] for number in header.hooked]
            variables.put(header.variables, attached.variables, hooked_models)
        call = _ServedCall(
            message=message,
            header=header,
            inputs=inputs,
            seen_by_module=seen_by_module,
            attached=attached,
            before=Arguments(args, kwargs, attached, seen_by_module),
            context=contextvars.copy_context(),
            argument_tensors=tensors_in((args, kwargs)) if header.writes else [],
        )
        flags = capture()
        result, next_segment = self._run_module(message, args, kwargs)
        if capture() != flags:
            raise StepError(
                f"module {pipeline.modules.title(message.module)} left another gradient mode,"
                " inference mode or autocast than it was called in,"
                " which its caller on another partition would not see\n"
                "Use `with`, or place the module with its caller with smp.set_partition."
            )
        module_state.leave(run)
        if next_segment is None:
            reply = self._reply_to_caller(call, result)
        else:
            owner = pipeline.modules.chains[message.module][next_segment].owner
            reply = self._reply_to_next(call, result, owner)

        differentiable = tuple(bool(tensor.requires_grad) for tensor in reply.tensors)
        if any(differentiable):
            self._saved[message.call, message.segment] = _SavedForward(
                inputs,
                reply.tensors,
                differentiable,
                message.needs,
                message.before,
                message.place,
            )
        if next_segment is None:
            self._answer(message, reply, differentiable)
            return
        following = message._replace(
            segment=next_segment,
            place=place(message.place, next_segment),
            arguments=reply.value,
            needs=differentiable,
            before=(pipeline.rank, message.segment),
            header=reply.header,
        )
        title = f"result of module {pipeline.modules.title(message.module)}"
        pipeline.post(owner, following, reply.tensors, title)

    def _written_arguments(self, call: _ServedCall) -> tuple[Any, Any]:
        """Return the tensors and the containers of the arguments that were written.

        Returns:
            As `Arguments.find_written`; two empty lists if nothing was written.

        Raises:
            StepError: The module gave an argument another shape.
        """
        message, attached = call.message, call.attached
        if message.before[1] is None:
            return call.before.find_written(self.pipeline.modules.title(message.module))
        # The argument of a later segment is a result of the chain, and no argument of the caller.
        if attached is None:
            return [], []
        return attached.written_tensors, attached.written_containers

    def _reply_to_caller(self, call: _ServedCall, result: Any) -> _Reply:
        """Return the result of the last or only segment, with the state that was written.

        Own objects of the caller, which came as arguments, are named by number, so that the caller
        takes its own again. The sent writes are remembered as known by the caller. Nothing is sent
        yet.

        Args:
            call: The served call.
            result: What the module returned.

        Returns:
            The reply. It has a header if state was written or variables were set, or if the call
            came with state.

        Raises:
            StepError: The module gave an argument another shape, or another microbatch may have
                read the state.
        """
        message, header, attached = call.message, call.header, call.attached
        scheduler = self.pipeline.scheduler
        module_state = scheduler.module_state
        writes = self._written_arguments(call)
        is_whole_call = message.before[1] is None
        # The caller's own objects stay the same objects in the result.
        own_objects = None
        if is_whole_call and message.tail is None:
            own_objects = call.before.numbers_by_id()
        # A tail call answers all ranks, and not only the caller: they have none of the writes.
        held = header.held if message.tail is None else frozenset()
        new_header, written = module_state.pack(message.microbatch, message.call[0], held=held)
        # Earlier segments of a chain may have set variables, too. So after a chain all variables
        # count that differ from the script's.
        base = call.context if message.segment is None else scheduler.caller_thread.variables
        names, values = variables.split_changed(base)
        if attached is not None and message.segment is None:
            run = MicrobatchRun(message.microbatch)
            unread_ids = module_state.find_unread_tensors(
                run, header, attached.written, call.argument_tensors
            )
            unread = []
            for number, tensor in enumerate(call.seen_by_module):
                if id(tensor) in unread_ids:
                    unread.append(number)
            new_header = new_header._replace(unread=tuple(unread))
        if attached is not None and is_whole_call:
            differentiable = {id(t) for t in tensors_in(attached.written) if t.requires_grad}
            sent = tensors_in((result, written, values, writes))
            unused = find_unused(call.inputs, call.seen_by_module, differentiable, sent)
            new_header = new_header._replace(unused=unused)
        if own_objects is not None:
            lent = module_state.find_lent_items(result)
            if lent:
                new_header = new_header._replace(lent=lent)
        if names:
            new_header = new_header._replace(variables=names)
        sent_header, returned = attach(new_header, written, values, *writes)
        if returned is not None:
            result = (result, returned)
        value, tensors = flatten(result, own_objects)
        return _Reply(value, tensors, sent_header)

    def _reply_to_next(self, call: _ServedCall, result: Any, owner: int) -> _Reply:
        """Return the arguments of the next segment of a chain, with the state that was written.

        The sent writes are remembered as known by that rank. Nothing is sent yet.

        Args:
            call: The served call.
            result: What this segment returned.
            owner: The rank that owns the next segment.

        Raises:
            StepError: Another microbatch may have read the state.
        """
        message, header = call.message, call.header
        scheduler = self.pipeline.scheduler
        writes = self._written_arguments(call)
        new_header, written = scheduler.module_state.pack(message.microbatch, owner)
        names, values = variables.split_changed(scheduler.caller_thread.variables)
        if message.header is not None or names:
            new_header = new_header._replace(
                variables=names, hooked=header.hooked, held=header.held
            )
        sent_header, onward = attach(new_header, written, values, *writes)
        value, tensors = flatten(((result,), {}, onward))
        return _Reply(value, tensors, sent_header)

    def _run_module(
        self, message: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Run a module, or one segment of a chain, with recomputation if the caller asks for it.

        Args:
            message: The request: names the module and the segment.
            args: Positional arguments; a segment gets the first one.
            kwargs: Named arguments of a module.

        Returns:
            The result, and the segment that follows; None after the last or only segment.

        Raises:
            Exception: An error of the module.
        """
        modules = self.pipeline.modules
        module = modules.modules[message.module]
        if message.segment is None:
            # The second run, in the backward pass, must not call another rank.
            if message.checkpoint is not None and modules.local[message.module]:
                return message.checkpoint.call(module, args, kwargs), None
            return module(*args, **kwargs), None
        segments = modules.chains[message.module]
        children = segments[message.segment].modules
        if message.checkpoint is not None and modules.is_inline(message.module, message.segment):
            result = message.checkpoint.chain(children, args[0])
        else:
            result = run_children(module, children, args[0])
        next_segment = message.segment + 1
        if next_segment == len(segments):
            return result, None
        return result, next_segment

    def _answer(self, message: Forward, reply: _Reply, differentiable: tuple[bool, ...]) -> None:
        """Send a result to the caller. The result of a tail call goes to every other rank, too.

        Without a tail call, results for the root's owner are kept in `results`, so that the outputs
        of the model need not be sent back to this rank.

        Args:
            message: The request.
            reply: The result.
            differentiable: For each tensor of the result whether it requires a gradient.

        Raises:
            PeerError: The connection with a rank is lost.
            StepError: The result cannot be pickled.
        """
        pipeline, caller = self.pipeline, message.call[0]
        hop = (message.call, message.segment)
        title = f"result of module {pipeline.modules.title(message.module)}"
        answer = Result(
            pipeline.step_number, message.call, reply.value, differentiable, reply.header
        )
        pipeline.post(caller, answer, reply.tensors, title)
        if message.tail is not None:
            outputs = Outputs(
                pipeline.step_number,
                pipeline.function,
                message.microbatch,
                message.tail,
                reply.value,
                (None,) * len(reply.tensors),
                differentiable,
                None,
                reply.header,
            )
            for peer in range(pipeline.size):
                if peer == pipeline.rank:
                    own_outputs = outputs._replace(tail=(hop, message.module))
                    pipeline.post(peer, own_outputs, reply.tensors, title)
                elif peer != caller:
                    pipeline.post(peer, outputs, reply.tensors, title)
        elif caller == pipeline.root_rank and pipeline.rank != caller:
            # The outputs of the model may contain these tensors: then they are not sent back.
            results = [tensor.detach() for tensor in reply.tensors]
            self.results.setdefault(message.microbatch, {})[hop] = results

    def _backward(self, message: Backward, grads: list[torch.Tensor | None]) -> None:
        """Run the backward pass of a served call, and send the gradients of its inputs on.

        They go to the segment before, or to the caller. The graph is freed, unless it is kept for
        another pass.

        Gradients of this rank's parameters are added to, unless the pass is one of
        ``torch.autograd.grad``. A pass is added to `pipeline.order`.

        Args:
            message: The request.
            grads: For each tensor of the result its gradient, or None.

        Raises:
            StepError: An earlier pass has freed the graph; or as `_run_backward`.
            PeerError: The connection with the rank that gets the gradients is lost.
            RuntimeError: torch refused the pass.
        """
        pipeline = self.pipeline
        pipeline.order.append(("B", message.microbatch))
        pipeline.arrived(grads)
        hop, mode = (message.call, message.segment), message.mode
        saved = self._saved.get(hop) if mode.keeps else self._saved.pop(hop, None)
        if saved is None:
            raise StepError(
                "a second backward pass through one call of module"
                f" {pipeline.modules.title(message.module)}\n{TWICE}"
            )
        input_grads = self._run_backward(saved, grads, mode)
        rank, segment = saved.before
        if segment is None:
            answer: Any = Gradients(pipeline.step_number, message.call)
        else:
            answer = Backward(
                pipeline.step_number,
                message.call,
                message.module,
                segment,
                message.microbatch,
                mode,
            )
        pipeline.post(rank, answer, input_grads, "gradients")

    def _run_backward(
        self, saved: _SavedForward, grads: list[torch.Tensor | None], mode: BackwardMode
    ) -> list[torch.Tensor | None]:
        """Run autograd through the graph of a served forward, and return the gradients of its
        inputs.

        With ``mode.adds`` the pass is one of ``torch.autograd.backward``: gradients of parameters
        are added to, and the gradients of the inputs are taken off the inputs' ``grad``. Else it is
        one of ``torch.autograd.grad``, which changes no ``grad``. The graph is freed unless
        ``mode.keeps``.

        Args:
            saved: The graph.
            grads: For each result its gradient, or None.
            mode: The effects of the pass.

        Returns:
            For each input its gradient. None if the caller needs none, if no gradient leads there,
            or if no result has a gradient.

        Raises:
            StepError: torch refused the pass, and a parameter was written in the step or a
                container keeps a tensor of a freed graph (`explain_backward_errors`).
            RuntimeError: torch refused the pass for another reason.
        """
        roots: list[torch.Tensor] = []
        root_grads: list[torch.Tensor] = []
        for result, grad, is_differentiable in zip(
            saved.results, grads, saved.differentiable, strict=True
        ):
            if is_differentiable and grad is not None:
                roots.append(result)
                root_grads.append(grad)
        needed = []
        for tensor, is_needed in zip(saved.inputs, saved.needs, strict=True):
            if is_needed:
                needed.append(tensor)

        input_grads: dict[int, torch.Tensor | None] = {}  # by id() of the input
        module_state = self.pipeline.scheduler.module_state
        if roots and mode.adds:
            # Adds to the gradients of parameters and inputs.
            with module_state.explain_backward_errors():
                torch.autograd.backward(roots, root_grads, retain_graph=mode.keeps)
        elif roots and needed:
            with module_state.explain_backward_errors():
                gradients = torch.autograd.grad(
                    roots, needed, root_grads, retain_graph=mode.keeps, allow_unused=True
                )
            input_grads = dict(zip(map(id, needed), gradients, strict=True))
        if mode.adds:
            # Taken off the inputs, because a pass that keeps the graph would add to them again.
            for tensor in needed:
                input_grads[id(tensor)] = tensor.grad
                tensor.grad = None
        return [input_grads.get(id(tensor)) for tensor in saved.inputs]
