"""The serving side of remote calls: modules of this rank, run for others."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport.pytrees import Tree, flatten, tensors_in, unflatten

from . import own_passes, variables
from .messages import Arguments, Backward, Forward, Gradients, Hop, Outputs, Result, attach
from .microbatch_threads import Context
from .module_state import EMPTY_HEADER, StateHeader
from .modules import run_children
from .randomness import place
from .rank_state import TWICE, PipelineRank
from .scheduler import FORWARD
from .threadstate import BACKWARD as BACKWARD_FLAGS
from .threadstate import capture


class NonLeaf(torch.autograd.Function):
    """The identity, whose result is not a leaf: modules that work in place may
    get it, and scripts may write to it.
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
    """Return the identities of the leaves that gradients of tensors go to."""
    found: set[int] = set()
    seen: set[Any] = set()
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        todo += [following for following, _ in node.next_functions]
    return found


def find_unused(
    inputs: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    came: set[int],
    sent: Sequence[torch.Tensor],
) -> tuple[int, ...]:
    """Return the numbers of the tensors that came along with a call and are in
    no graph of what is sent back.

    Args:
        inputs: What came, each a leaf.
        given: The same tensors as the modules saw them.
        came: Identities of those of ``given`` that came along, and that a gradient may go to.
        sent: What is sent back.
    """
    if not came:
        return ()
    reached = find_leaves(sent)
    unused: list[int] = []
    for number, (leaf, seen) in enumerate(zip(inputs, given, strict=True)):
        if id(seen) in came and id(leaf) not in reached:
            unused.append(number)
    return tuple(unused)


def non_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is not a leaf, and whose gradient goes to the given one."""
    result: torch.Tensor = NonLeaf.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class _Saved(NamedTuple):
    """What a served forward leaves for its backward."""

    inputs: list[torch.Tensor]
    results: list[torch.Tensor]
    differentiable: tuple[bool, ...]
    needs: tuple[bool, ...]
    before: tuple[int, int | None]
    place: int


class Server:
    """Runs modules of this rank for others.

    Attributes:
        results: For each microbatch the results that its model outputs may refer to.
    """

    def __init__(self, pipeline: PipelineRank) -> None:
        self.pipeline = pipeline
        self._saved: dict[Hop, _Saved] = {}
        self.results: dict[int, dict[Hop, list[torch.Tensor]]] = {}

    def begin(self) -> None:
        """Forget the step before."""
        self._saved.clear()
        self.results.clear()

    def accept_forward(self, message: Forward, tensors: list[torch.Tensor]) -> None:
        """Make a request for a forward ready to run."""
        self.pipeline.scheduler.make_ready(
            Context(
                ("F", message.call, message.segment),
                message.microbatch,
                lambda: self._alone(self._forward, message, tensors),
                message.flags,
                inline=self.pipeline.modules.is_inline(message.module, message.segment),
                place=message.place,
            ),
            FORWARD,
        )

    def accept_backward(self, message: Backward, grads: list[torch.Tensor | None]) -> None:
        """Make a request for a backward ready to run."""
        self.pipeline.scheduler.make_ready(self.backward_context(message, grads), "B")

    def backward_context(self, message: Backward, grads: list[torch.Tensor | None]) -> Context:
        """Return the context of a backward."""
        saved = self._saved.get((message.call, message.segment))
        return Context(
            ("B", message.call, message.segment),
            message.microbatch,
            lambda: self._alone(self._backward, message, grads),
            BACKWARD_FLAGS,
            inline=self.pipeline.modules.is_inline(message.module, message.segment),
            place=0 if saved is None else place(saved.place, -1),
        )

    def _alone(self, run: Callable[[Any, Any], None], message: Any, tensors: Any) -> None:
        """Run a request.

        The thread may be one on which a step function waits: it is not that one's own pass.
        """
        with own_passes.inside():
            run(message, tensors)

    def has_graph(self, hop: Hop) -> bool:
        """Return whether a backward of a served call is possible, and has not started."""
        return hop in self._saved

    def _forward(self, message: Forward, tensors: list[torch.Tensor]) -> None:
        pipeline, module_state = self.pipeline, self.pipeline.scheduler.module_state
        pipeline.order.append(("F", message.microbatch))
        pipeline.arrived(tensors)
        inputs = [
            t.requires_grad_() if needed else t
            for t, needed in zip(tensors, message.needs, strict=True)
        ]
        given = [
            non_leaf(t) if needed else t for t, needed in zip(inputs, message.needs, strict=True)
        ]
        args, kwargs, along = unflatten(message.arguments, given)
        turn, notes = (message.microbatch, False), message.notes or EMPTY_HEADER
        if along is not None:
            module_state.unpack(turn, notes, along.written, message.before[0])
            module_state.enter(turn)
            variables.put(
                notes.variables,
                along.variables,
                [pipeline.modules.modules[n] for n in notes.hooked],
            )
        before = Arguments(args, kwargs, along, given)
        context = contextvars.copy_context()
        asked = tensors_in((args, kwargs)) if notes.writes else []
        flags = capture()
        result, following = self._run(message, args, kwargs)
        if capture() != flags:
            raise StepError(
                f"module {pipeline.modules.title(message.module)} left another gradient mode,"
                " inference mode or autocast than it was called in,"
                " which its caller on another partition would not see\n"
                "Use `with`, or place the module with its caller with smp.set_partition."
            )
        module_state.leave(turn)
        if message.before[1] is None:
            wrote = before.written(pipeline.modules.title(message.module))
        else:  # what came before in the chain is nobody's argument
            wrote = ([], []) if along is None else (along.tensors, along.cells)
        if following is None:
            # What the caller gave is the caller's own object again, also in the result.
            own = before.known() if message.before[1] is None and message.tail is None else None
            held = notes.held if message.tail is None else frozenset()
            news, written = module_state.pack(message.microbatch, message.call[0], held=held)
            # A chain's earlier segments may have set some, too: then what came here says it.
            names, values = variables.since(
                context if message.segment is None else pipeline.scheduler.caller_thread.variables
            )
            if along is not None and message.segment is None:
                unread = module_state.unread(turn, notes, along.written, asked)
                news = news._replace(idle=tuple(n for n, t in enumerate(given) if id(t) in unread))
            if along is not None and message.before[1] is None:
                came = {id(t) for t in tensors_in(along.written) if t.requires_grad}
                sent = tensors_in((result, written, values, wrote))
                news = news._replace(unused=find_unused(inputs, given, came, sent))
            if own is not None and (lent := module_state.lent(result)):
                news = news._replace(lent=lent)
            if names:
                news = news._replace(variables=names)
            note, back = attach(news, written, values, *wrote)
            value, results = flatten(result if back is None else (result, back), own)
        else:
            owner = pipeline.modules.chains[message.module][following].owner
            news, onward = module_state.pack(message.microbatch, owner)
            names, values = variables.since(pipeline.scheduler.caller_thread.variables)
            if message.notes is not None or names:
                news = news._replace(variables=names, hooked=notes.hooked, held=notes.held)
            note, back = attach(news, onward, values, *wrote)
            value, results = flatten(((result,), {}, back))
        differentiable = tuple(bool(t.requires_grad) for t in results)
        if any(differentiable):
            saved = _Saved(
                inputs, results, differentiable, message.needs, message.before, message.place
            )
            self._saved[message.call, message.segment] = saved
        if following is None:
            self._answer(message, value, results, differentiable, note)
            return
        pipeline.post(
            owner,
            message._replace(
                segment=following,
                place=place(message.place, following),
                arguments=value,
                needs=differentiable,
                before=(pipeline.me, message.segment),
                notes=note,
            ),
            results,
            f"result of module {pipeline.modules.title(message.module)}",
        )

    def _run(
        self, message: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Run a module, or one segment of a chain.

        Return its result, and the segment that has to follow it.
        """
        modules = self.pipeline.modules
        module = modules.modules[message.module]
        if message.segment is None:
            if message.checkpoint is not None and modules.local[message.module]:
                return message.checkpoint.call(module, args, kwargs), None
            return module(*args, **kwargs), None
        segments = modules.chains[message.module]
        children = segments[message.segment].modules
        if message.checkpoint is not None and modules.is_inline(message.module, message.segment):
            result = message.checkpoint.chain(children, args[0])
        else:
            result = run_children(module, children, args[0])
        following = message.segment + 1
        return result, following if following < len(segments) else None

    def _answer(
        self,
        message: Forward,
        value: Tree,
        results: list[torch.Tensor],
        differentiable: tuple[bool, ...],
        notes: StateHeader | None,
    ) -> None:
        """Send a result to the caller; if it is the model's, also to every other rank."""
        pipeline, caller = self.pipeline, message.call[0]
        hop = (message.call, message.segment)
        title = f"result of module {pipeline.modules.title(message.module)}"
        pipeline.post(
            caller,
            Result(pipeline.number, message.call, value, differentiable, notes),
            results,
            title,
        )
        if message.tail is not None:
            outputs = Outputs(
                pipeline.number,
                pipeline.function,
                message.microbatch,
                message.tail,
                value,
                (None,) * len(results),
                differentiable,
                None,
                notes,
            )
            for peer in range(pipeline.n):
                if peer == pipeline.me:
                    pipeline.post(
                        peer, outputs._replace(tail=(hop, message.module)), results, title
                    )
                elif peer != caller:
                    pipeline.post(peer, outputs, results, title)
        elif caller == pipeline.root_rank and pipeline.me != caller:
            self.results.setdefault(message.microbatch, {})[hop] = [t.detach() for t in results]

    def _backward(self, message: Backward, grads: list[torch.Tensor | None]) -> None:
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
        pairs = [
            (result, grad)
            for result, grad, needed in zip(saved.results, grads, saved.differentiable, strict=True)
            if needed and grad is not None
        ]
        wanted = [t for t, needed in zip(saved.inputs, saved.needs, strict=True) if needed]
        found: dict[int, torch.Tensor | None] = {}
        if pairs and (mode.adds or wanted):
            outputs, given = zip(*pairs, strict=True)
            if mode.adds:
                with pipeline.scheduler.module_state.explained():
                    torch.autograd.backward(outputs, given, retain_graph=mode.keeps)
            else:
                gradients = torch.autograd.grad(
                    outputs, wanted, given, retain_graph=mode.keeps, allow_unused=True
                )
                found = dict(zip(map(id, wanted), gradients, strict=True))
        if mode.adds:
            found = {id(t): t.grad for t in wanted}
            for t in wanted:
                t.grad = None
        inputs = [found.get(id(t)) for t in saved.inputs]
        rank, segment = saved.before
        if segment is None:
            pipeline.post(rank, Gradients(pipeline.number, message.call), inputs, "gradients")
        else:
            following = Backward(
                pipeline.number, message.call, message.module, segment, message.microbatch, mode
            )
            pipeline.post(rank, following, inputs, "gradients")
