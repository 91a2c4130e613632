"""The serving side of remote calls: modules of this rank, run for others."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport.pytrees import Tree, flatten, tensors_in, unflatten

from . import own_passes, variables
from .messages import Arguments, Backward, Forward, Gradients, Hop, Outputs, Result, beside
from .microbatch_threads import Context
from .module_state import NOTHING, Notes
from .modules import run_children
from .randomness import place
from .rank_state import TWICE, Port
from .scheduler import FORWARD
from .threadstate import BACKWARD as BACKWARD_FLAGS
from .threadstate import capture


class Fresh(torch.autograd.Function):
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


def leaves_of(tensors: Sequence[torch.Tensor]) -> set[int]:
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


def unused_of(
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
    reached = leaves_of(sent)
    unused: list[int] = []
    for number, (leaf, seen) in enumerate(zip(inputs, given, strict=True)):
        if id(seen) in came and id(leaf) not in reached:
            unused.append(number)
    return tuple(unused)


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is not a leaf, and whose gradient goes to the given one."""
    result: torch.Tensor = Fresh.apply(tensor)  # type: ignore[no-untyped-call]
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

    def __init__(self, port: Port) -> None:
        self.port = port
        self._saved: dict[Hop, _Saved] = {}
        self.results: dict[int, dict[Hop, list[torch.Tensor]]] = {}

    def begin(self) -> None:
        """Forget the step before."""
        self._saved.clear()
        self.results.clear()

    def accept_forward(self, message: Forward, tensors: list[torch.Tensor]) -> None:
        """Make a request for a forward ready to run."""
        self.port.scheduler.make_ready(
            Context(
                ("F", message.call, message.segment),
                message.microbatch,
                lambda: self._alone(self._forward, message, tensors),
                message.flags,
                inline=self.port.modules.is_inline(message.module, message.segment),
                place=message.place,
            ),
            FORWARD,
        )

    def accept_backward(self, message: Backward, grads: list[torch.Tensor | None]) -> None:
        """Make a request for a backward ready to run."""
        self.port.scheduler.make_ready(self.backward_context(message, grads), "B")

    def backward_context(self, message: Backward, grads: list[torch.Tensor | None]) -> Context:
        """Return the context of a backward."""
        saved = self._saved.get((message.call, message.segment))
        return Context(
            ("B", message.call, message.segment),
            message.microbatch,
            lambda: self._alone(self._backward, message, grads),
            BACKWARD_FLAGS,
            inline=self.port.modules.is_inline(message.module, message.segment),
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
        port, views = self.port, self.port.scheduler.views
        port.order.append(("F", message.microbatch))
        port.arrived(tensors)
        inputs = [
            t.requires_grad_() if needed else t
            for t, needed in zip(tensors, message.needs, strict=True)
        ]
        given = [fresh(t) if needed else t for t, needed in zip(inputs, message.needs, strict=True)]
        args, kwargs, along = unflatten(message.arguments, given)
        turn, notes = (message.microbatch, False), message.notes or NOTHING
        if along is not None:
            views.unpack(turn, notes, along.written, message.before[0])
            views.enter(turn)
            variables.put(
                notes.variables, along.variables, [port.modules.modules[n] for n in notes.hooked]
            )
        before = Arguments(args, kwargs, along, given)
        context = contextvars.copy_context()
        asked = tensors_in((args, kwargs)) if notes.writes else []
        flags = capture()
        result, following = self._run(message, args, kwargs)
        if capture() != flags:
            raise StepError(
                f"module {port.modules.title(message.module)} left another gradient mode,"
                " inference mode or autocast than it was called in,"
                " which its caller on another partition would not see\n"
                "Use `with`, or place the module with its caller with smp.set_partition."
            )
        views.leave(turn)
        if message.before[1] is None:
            wrote = before.written(port.modules.title(message.module))
        else:  # what came before in the chain is nobody's argument
            wrote = ([], []) if along is None else (along.tensors, along.cells)
        if following is None:
            # What the caller gave is the caller's own object again, also in the result.
            own = before.known() if message.before[1] is None and message.tail is None else None
            held = notes.held if message.tail is None else frozenset()
            news, written = views.pack(message.microbatch, message.call[0], held=held)
            # A chain's earlier segments may have set some, too: then what came here says it.
            names, values = variables.since(
                context if message.segment is None else port.scheduler.home.variables
            )
            if along is not None and message.segment is None:
                unread = views.unread(turn, notes, along.written, asked)
                news = news._replace(idle=tuple(n for n, t in enumerate(given) if id(t) in unread))
            if along is not None and message.before[1] is None:
                came = {id(t) for t in tensors_in(along.written) if t.requires_grad}
                sent = tensors_in((result, written, values, wrote))
                news = news._replace(unused=unused_of(inputs, given, came, sent))
            if own is not None and (lent := views.lent(result)):
                news = news._replace(lent=lent)
            if names:
                news = news._replace(variables=names)
            note, back = beside(news, written, values, *wrote)
            value, results = flatten(result if back is None else (result, back), own)
        else:
            owner = port.modules.chains[message.module][following].owner
            news, onward = views.pack(message.microbatch, owner)
            names, values = variables.since(port.scheduler.home.variables)
            if message.notes is not None or names:
                news = news._replace(variables=names, hooked=notes.hooked, held=notes.held)
            note, back = beside(news, onward, values, *wrote)
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
        port.post(
            owner,
            message._replace(
                segment=following,
                place=place(message.place, following),
                arguments=value,
                needs=differentiable,
                before=(port.me, message.segment),
                notes=note,
            ),
            results,
            f"result of module {port.modules.title(message.module)}",
        )

    def _run(
        self, message: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, int | None]:
        """Run a module, or one segment of a chain.

        Return its result, and the segment that has to follow it.
        """
        modules = self.port.modules
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
        notes: Notes | None,
    ) -> None:
        """Send a result to the caller; if it is the model's, also to every other rank."""
        port, caller = self.port, message.call[0]
        hop = (message.call, message.segment)
        title = f"result of module {port.modules.title(message.module)}"
        port.post(
            caller, Result(port.number, message.call, value, differentiable, notes), results, title
        )
        if message.tail is not None:
            outputs = Outputs(
                port.number,
                port.function,
                message.microbatch,
                message.tail,
                value,
                (None,) * len(results),
                differentiable,
                None,
                notes,
            )
            for peer in range(port.n):
                if peer == port.me:
                    port.post(peer, outputs._replace(tail=(hop, message.module)), results, title)
                elif peer != caller:
                    port.post(peer, outputs, results, title)
        elif caller == port.root_rank and port.me != caller:
            self.results.setdefault(message.microbatch, {})[hop] = [t.detach() for t in results]

    def _backward(self, message: Backward, grads: list[torch.Tensor | None]) -> None:
        port = self.port
        port.order.append(("B", message.microbatch))
        port.arrived(grads)
        hop, mode = (message.call, message.segment), message.mode
        saved = self._saved.get(hop) if mode.keeps else self._saved.pop(hop, None)
        if saved is None:
            raise StepError(
                "a second backward pass through one call of module"
                f" {port.modules.title(message.module)}\n{TWICE}"
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
                with port.scheduler.views.explained():
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
            port.post(rank, Gradients(port.number, message.call), inputs, "gradients")
        else:
            following = Backward(
                port.number, message.call, message.module, segment, message.microbatch, mode
            )
            port.post(rank, following, inputs, "gradients")
