"""Calls of remote modules. Each call is an autograd function; its forward and backward run on the
rank that owns the module.
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
from .microbatch_threads import Context, Produced
from .module_state import MicrobatchRun, StateHeader
from .modules import run_children
from .randomness import draw
from .rank_state import TWICE, PipelineRank
from .scheduler import BACKWARD, FORWARD
from .threadstate import Flags, capture


class RemoteCall:
    """One call of a remote module, or of the rest of a Sequential chain.

    Attributes:
        id: Unique in the step, and equal on tensor-parallel peers.
        number: Number of the module.
        segment: First segment of the chain; None for a whole module.
        tail: Number of the model call with the same result; None if there is none.
        first: The rank that gets the arguments.
        last: The rank that returns the result, and starts the backward.
        last_segment: Last segment of the chain; None for a whole module.
        value: The result without its tensors, once it is here.
        header: Describes the state that came with the result, or None.
        differentiable: For each tensor of the result whether it requires a gradient.
        count: Number of tensors in the arguments.
        has_requested_backward: Whether a backward pass was requested that frees the graph.
    """

    def __init__(
        self,
        caller: Caller,
        id: CallId,  # noqa: A002
        number: int,
        segment: int | None,
        tail: int | None,
    ) -> None:
        """
        Nothing is sent.
        """
        modules = caller.pipeline.modules
        self.caller, self.id = caller, id
        self.number, self.segment, self.tail = number, segment, tail
        self.last_segment: int | None = None
        if segment is None:
            self.first = self.last = modules.owner[number]
        else:
            segments = modules.chains[number]
            self.first, self.last = segments[segment].owner, segments[-1].owner
            self.last_segment = len(segments) - 1
        self.value: Tree | None = None
        self.header: StateHeader | None = None
        self.differentiable: tuple[bool, ...] = ()
        self.count = 0
        self.has_requested_backward = False

    @property
    def title(self) -> str:
        """Words for the module."""
        return self.caller.pipeline.modules.title(self.number)

    def forward(
        self, arguments: Tree, header: StateHeader | None, tensors: list[torch.Tensor], flags: Flags
    ) -> list[torch.Tensor]:
        """Send the arguments, wait for the result, and return the tensors of the result.

        The other parts of the result are stored in this object. Other contexts of this rank run
        meanwhile.

        A number is drawn from torch's CPU generator: it starts the random numbers of the call on
        its rank.

        Args:
            arguments: The arguments without tensors.
            header: Describes the state that goes along, or None.
            tensors: The tensors of the arguments.
            flags: Modes that the module runs with.

        Raises:
            StepError: The step failed meanwhile, or the arguments cannot be sent: an object that
                cannot be pickled, or a tensor that is nested, sparse or on the device meta.
            PeerError: The connection with the rank of the module is lost.
        """
        pipeline = self.caller.pipeline
        context = pipeline.context()
        needs = tuple(bool(flags.grad and tensor.requires_grad) for tensor in tensors)
        self.count = len(tensors)
        message = Forward(
            pipeline.step_number,
            pipeline.function,
            self.id,
            self.number,
            self.segment,
            context.microbatch,
            draw(),
            flags,
            arguments,
            needs,
            (pipeline.rank, None),
            self.tail,
            pipeline.modules.modules[self.number].__dict__.get("_smp_checkpoint"),
            header,
        )
        pipeline.post(self.first, message, tensors, f"arguments of module {self.title}")
        result, tensors = pipeline.scheduler.wait(("R", self.id), FORWARD)
        self.value, self.differentiable, self.header = (
            result.value,
            result.differentiable,
            result.header,
        )
        pipeline.arrived(tensors)
        return list(tensors)

    def backward(
        self, grads: list[torch.Tensor | None], mode: BackwardMode
    ) -> list[torch.Tensor | None]:
        """Send the gradients of the result, and wait for the gradients of the arguments.

        After a tail call the last owner has the loss, too, and starts by itself.

        Other contexts of this rank run meanwhile. With ``mode.keeps`` unset the call takes no
        further pass. The gradients of a tail call are kept until its last owner has started, see
        `Caller.keep_gradients`.

        Args:
            grads: For each tensor of the result its gradient, or None.
            mode: The effects of the pass.

        Returns:
            For each tensor of the arguments its gradient, or None.

        Raises:
            StepError: An earlier pass through this call has freed the graph, the gradients cannot
                be sent, or the step failed meanwhile.
            PeerError: The connection with the last owner is lost.
        """
        if self.has_requested_backward:
            raise StepError(
                f"a second backward pass through one call of module {self.title}\n{TWICE}"
            )
        self.has_requested_backward = not mode.keeps
        # Only a plain backward pass is started by the last owner itself.
        if self.tail is None or not mode.adds:
            self.request_backward(grads, mode)
        else:
            self.caller.keep_gradients(self, grads)
        gradients: list[torch.Tensor | None] = self.caller.pipeline.scheduler.wait(
            ("B", self.id), BACKWARD
        )
        self.caller.pipeline.arrived(gradients)
        return gradients

    def request_backward(
        self, grads: list[torch.Tensor | None], mode: BackwardMode | None = None
    ) -> None:
        """Send the gradients of the result to the last owner, and do not wait.

        Args:
            grads: For each tensor of the result its gradient, or None.
            mode: The effects of the pass; None: a plain backward pass.

        Raises:
            StepError: A gradient is nested, sparse or on the device meta.
            PeerError: The connection with the last owner is lost.
        """
        pipeline = self.caller.pipeline
        microbatch = 0
        # A message of another rank may ask for the pass while no context runs.
        if pipeline.scheduler.current is not None:
            microbatch = pipeline.context().microbatch
        mode = mode or BackwardMode()
        message = Backward(
            pipeline.step_number, self.id, self.number, self.last_segment, microbatch, mode
        )
        pipeline.post(self.last, message, grads, "gradients")


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", bool)  # noqa: SLF001
"""Returns whether the running backward pass keeps its graph.

PyTorch 2.4 cannot tell; a second pass over a call is an error there.
"""


def _check_transforms(title: str) -> None:
    """Refuse a remote call within a transform of torch.func, such as vmap or grad.

    Args:
        title: Words for the module.

    Raises:
        StepError: A transform is active on this thread.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        raise StepError(
            f"torch.func, vmap and is_grads_batched do not go through module {title}, which is on"
            " another partition\nPlace it with smp.set_partition where they are used."
        )


class _RemoteFunction(torch.autograd.Function):
    """Record a remote call in the graph.

    `tie` is a tensor that requires a gradient. It is needed because the parameters are remote: the
    result may require a gradient although no argument does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: RemoteCall,
        results: list[torch.Tensor],
        tie: torch.Tensor,  # noqa: ARG004
        *tensors: torch.Tensor,  # noqa: ARG004
    ) -> tuple[torch.Tensor, ...]:
        """Return the results, which have come from the other rank already.

        The results that need no gradient are marked so for autograd. Gradients that are missing
        stay None in the backward, and are not filled with zeros.

        Args:
            ctx: Keeps the call for the backward.
            call: The remote call.
            results: The tensors of its result.
            tie: A tensor that requires a gradient.
            tensors: The tensors of the arguments, to which the backward leads.
        """
        ctx.call = call
        constants = []
        for result, is_differentiable in zip(results, call.differentiable, strict=True):
            if not is_differentiable:
                constants.append(result)
        ctx.mark_non_differentiable(*constants)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Run the backward on the other ranks, and return a gradient for each argument of the
        forward.

        The first three are None: they belong to no tensor of the arguments.

        If no result has a gradient, nothing is sent, and all are None. A pass of
        torch.autograd.grad adds to no parameter's gradient on the other ranks.

        Raises:
            StepError: The gradients themselves need a graph, a transform of torch.func runs, an
                earlier pass has freed the graph, or the step failed meanwhile.
            PeerError: The connection with the last owner is lost.
        """
        call: RemoteCall = ctx.call
        if torch.is_grad_enabled():
            raise StepError(
                f"create_graph=True: gradients of gradients do not go through module {call.title},"
                " which is on another partition\n"
                "Place it with smp.set_partition where the gradient is taken."
            )
        _check_transforms(call.title)
        result_grads: list[torch.Tensor | None] = []
        for grad, is_differentiable in zip(grads, call.differentiable, strict=True):
            result_grads.append(grad if is_differentiable else None)
        if all(grad is None for grad in result_grads):
            # Nothing leads to the loss: the other ranks need not run a pass.
            return (None,) * (3 + call.count)
        # The tie is a leaf, as a parameter is. torch.autograd.grad runs only the nodes that lead
        # to its inputs, and so no leaf; torch.autograd.backward runs the tie's node, too.
        tie_node = ctx.next_functions[0][0]
        adds = bool(torch._C._will_engine_execute_node(tie_node))  # noqa: SLF001
        mode = BackwardMode(adds, bool(_keeps_graph()))
        return (None, None, None, *call.backward(result_grads, mode))


class Caller:
    """The calling side of remote calls.

    Attributes:
        pipeline: This rank's place in its pipeline.
        tail_calls: Whether the last owner may hand the model's outputs out itself.
    """

    def __init__(self, pipeline: PipelineRank) -> None:
        self.pipeline = pipeline
        self.tail_calls = os.environ.get("SMP_TAIL_CALLS", "1") != "0"
        self._call_numbers = itertools.count()
        self._kept_gradients: dict[CallId, tuple[RemoteCall, list[torch.Tensor | None]]] = {}
        self._not_started_calls: set[CallId] = set()

    def begin(self) -> None:
        """Forget the calls of the last step."""
        self._call_numbers = itertools.count()
        self._kept_gradients.clear()
        self._not_started_calls.clear()

    def call_module(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a remote module, and return its result.

        As `_call_module`, which has the effects and errors.

        Args:
            number: Number of the module.
            args: Positional arguments.
            kwargs: Named arguments.

        Raises:
            StepError: The call could not work as a local one, or the step failed meanwhile.
            PeerError: The connection with the rank of the module is lost.
        """
        return self._call_module(number, args, kwargs, None)

    def call_chain(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a Sequential of this rank that spans ranks, and return its result.

        The result of each segment goes straight to the owner of the next one.

        Args:
            number: Number of the Sequential.
            args: A single positional argument.
            kwargs: Must be empty.

        Raises:
            TypeError: Other arguments than a single positional one.
            StepError: The call could not work as a local one, or the step failed meanwhile.
            PeerError: The connection with the rank of a segment is lost.
            Exception: An error of a module of this rank.
        """
        if kwargs or len(args) != 1:
            raise TypeError(f"{self.pipeline.modules.title(number)} takes one argument")
        value = args[0]
        pipeline = self.pipeline
        for index, segment in enumerate(pipeline.modules.chains[number]):
            if segment.owner != pipeline.rank:
                return self._call_module(number, (value,), {}, index)
            value = run_children(pipeline.modules.modules[number], segment.modules, value)
        return value

    def _call_module(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], segment: int | None
    ) -> Any:
        """Call a remote module, or the rest of a chain from a segment on, and return the result.

        Writes of the module to its arguments, to attributes and to context variables are repeated
        on this rank.

        The result is a node of this rank's autograd graph, if gradients are recorded. Caches among
        the arguments are marked (`trim_caches`). What the module returned and keeps is watched, so
        that a write to it is refused. The context keeps the result of a tail call, and of the
        root's own calls weak references to the tensors.

        Args:
            number: Number of the module.
            args: Positional arguments.
            kwargs: Named arguments.
            segment: First segment of the chain that runs; None for a whole module.

        Raises:
            StepError: The call could not work as a local one: a scope, a changed hook, an argument
                or a state that the other rank cannot have. Or the step failed meanwhile.
            PeerError: The connection with the rank of the module is lost.
        """
        pipeline = self.pipeline
        self._check_call(number)
        context = pipeline.context()
        tail = self._find_tail_call(context, number)
        call = RemoteCall(self, (pipeline.rank, next(self._call_numbers)), number, segment, tail)
        module_state, microbatch = pipeline.scheduler.module_state, context.microbatch
        run = MicrobatchRun(microbatch)
        module_state.leave(run)
        module_state.check_hooks(number)

        # The arguments, with the state that the microbatch has written so far.
        state_header, written = module_state.pack(microbatch, call.first)
        changed = variables.find_changed(pipeline.scheduler.caller_thread.variables)
        if changed:
            names = tuple(name for name, _ in changed)
            hooked: tuple[int, ...] = ()
            if variables.collects(names):
                hooked = variables.hooked(pipeline.modules.modules)
            state_header = state_header._replace(variables=names, hooked=hooked)
        own_writes = module_state.writes_so_far(microbatch)
        header, attached = attach(state_header, written, [value for _, value in changed])
        args, kwargs = trim_caches(pipeline.modules.modules[number], args, kwargs)
        before = Arguments(args, kwargs, attached)
        arguments, tensors = flatten((args, kwargs, attached))
        flags = capture()
        results = call.forward(arguments, header, tensors, flags)
        module_state.count_return(run)

        # The call becomes a node of this rank's graph, so that a backward pass comes here.
        if results and flags.grad and not flags.inference:
            tie = torch.empty(0, requires_grad=True)
            inputs = self._graph_inputs(call, tensors, microbatch)
            results = list(_RemoteFunction.apply(call, results, tie, *inputs))  # type: ignore[no-untyped-call]
        assert call.value is not None
        if own_writes:
            module_state.restore_own_objects(run, own_writes)

        def own_object(place: tuple[str, int]) -> Any:
            """Return the argument that the owner has named in its result."""
            kind, index = place
            return tensors[index] if kind == "tensor" else before.containers_before[index][0]

        result = unflatten(call.value, results, own_object)
        if call.header is not None:
            result, returned = result
            module_state.unpack(run, call.header, returned.written, call.last)
            variables.put(call.header.variables, returned.variables, ())
            if header is not None and attached is not None:
                unread = {id(tensors[index]) for index in call.header.unread}
                module_state.record_remote_reads(run, header, attached.written, unread)
            before.repeat_writes(tensors, returned, call.title)
            module_state.watch_lent_items(result, call.header.lent, call.title)
        if tail is not None:
            context.tail = results if call.header is None else tensors_in(result)
        elif context.key[0] == "S" and pipeline.rank == pipeline.root_rank:
            hop = (call.id, call.last_segment)
            for position, tensor in enumerate(results):
                produced = Produced(weakref.ref(tensor), call.last, hop, position)
                context.produced[id(tensor)] = produced
        return result

    def _check_call(self, number: int) -> None:
        """Refuse a call of a remote module that could not work as a local one.

        Args:
            number: Number of the module.

        Raises:
            StepError: No step runs in this thread, or a transform, a mode or a hook of this thread
                would have no effect on another rank, or another tail call was made before in this
                call of the model.
        """
        pipeline = self.pipeline
        title = pipeline.modules.title(number)
        if not pipeline.in_step:
            raise StepError(
                f"module {title} is on pp_rank {pipeline.modules.owner[number]},"
                " and can only be called in the thread of a function decorated with smp.step"
            )
        context = pipeline.context()
        _check_transforms(title)
        scope = pipeline.scheduler.caller_thread.find_scope()
        if scope is not None:
            hint = "Place the module with its caller with smp.set_partition"
            if scope.may_surround_step:
                hint += f", or enter {scope.name} around the whole step function"
            raise StepError(
                f"module {title} was called within {scope.name},"
                f" and is on another partition, where that would have no effect\n{hint}."
            )
        if context.tail is not None:
            raise StepError(_NOT_THE_LAST_CALL)

    def _graph_inputs(
        self, call: RemoteCall, tensors: list[torch.Tensor], microbatch: int
    ) -> list[torch.Tensor]:
        """Return the tensors of the arguments as inputs of the graph.

        State that went along and was not read is detached: no gradient leads to it, and its graph
        may be freed already. So is state from before this step that is in no graph of the result.

        Args:
            call: The remote call, which has ended.
            tensors: The tensors of the arguments, with the state that went along.
            microbatch: The microbatch that called.

        Returns:
            The same list if all tensors stay, else a new one with detached tensors.
        """
        header = call.header
        if header is None:
            return tensors
        outside_graph = set(header.unread)
        if header.unused:
            old_ids = self.pipeline.scheduler.module_state.find_old_tensors(microbatch)
            for number in header.unused:
                if id(tensors[number]) in old_ids:
                    outside_graph.add(number)
        if not outside_graph:
            return tensors
        inputs = []
        for number, tensor in enumerate(tensors):
            inputs.append(tensor.detach() if number in outside_graph else tensor)
        return inputs

    def _find_tail_call(self, context: Context, number: int) -> int | None:
        """Return the number of the model call that returns the result of this call unchanged.

        None if that is not certain. A hook on the way may change the result, for example.

        Such a call is a tail call: its last owner sends the outputs of the model to all ranks by
        itself.

        Args:
            context: The context that calls.
            number: Number of the called module.
        """
        pipeline = self.pipeline
        path = pipeline.modules.tails.get(number)
        if path is None or not self.tail_calls or context.key[0] != "S" or not context.in_model:
            return None
        if torch_module._global_forward_hooks:  # noqa: SLF001
            return None
        for module in path:
            if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001
                return None
        return context.calls - 1

    def keep_gradients(self, call: RemoteCall, grads: list[torch.Tensor | None]) -> None:
        """Keep the gradients of a tail call, in case its last owner does not start by itself.

        If the owner has said so already, the backward is requested at once.

        Raises:
            PeerError: The connection with the last owner is lost.
            StepError: A gradient cannot be sent.
        """
        if call.id in self._not_started_calls:
            call.request_backward(grads)
        else:
            self._kept_gradients[call.id] = (call, grads)

    def forget_gradients(self, id: CallId) -> None:  # noqa: A002
        """Forget the gradients of a tail call whose backward has ended."""
        self._kept_gradients.pop(id, None)

    def request_kept_backward(self, id: CallId) -> None:  # noqa: A002
        """Request the backward of a tail call that its last owner has not started.

        If this rank's own pass has not come to the call yet, the request follows then.

        Raises:
            PeerError: The connection with the last owner is lost.
            StepError: A gradient cannot be sent.
        """
        expected = self._kept_gradients.pop(id, None)
        if expected is None:
            self._not_started_calls.add(id)
        else:
            call, grads = expected
            call.request_backward(grads)


_NOT_THE_LAST_CALL = (
    "the model called a module after the one whose result it returns\n"
    "Set SMP_TAIL_CALLS=0 in the environment of all ranks."
)
