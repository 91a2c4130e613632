"""The pipeline of one rank: a server of modules, with the microbatches of the user's step function
as clients.

Every rank runs the user's step function on each microbatch. If the function calls a module of
another rank, the arguments go to this rank, and the context waits (remote_calls.py). The owner runs
the module and sends the result back, and later the gradients (module_server.py). The result of the
root module goes to all ranks (outputs.py). scheduler.py chooses the context that runs next.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.exceptions import PeerError, StepError, summary
from smdistributed.modelparallel.torch.job.config import Config
from smdistributed.modelparallel.torch.transport.transport import Item, PeerLost, Transport

from .messages import Abort, Backward, Done, Forward, Gradients, NotStarted, Outputs, Pick, Result
from .microbatch_threads import Key
from .module_server import Server
from .modules import Modules
from .outputs import Model
from .randomness import Streams
from .rank_state import GONE, PipelineRank
from .remote_calls import Caller
from .scheduler import Role, Scheduler, Step
from .threadstate import CallerThread, find_thread_scope

__all__ = ["Runtime", "present", "use"]


class Runtime:
    """The pipeline of one rank.

    Attributes:
        cfg: The configuration.
        transport: The link with the other ranks of the pipeline.
        peers: The link with ranks of this stage that must run contexts in the same order, or None.
        scheduler: Chooses the context that runs next.
        pipeline: The state that the parts below share.
        calls: The calling side of remote calls.
        server: The serving side of remote calls.
        model: The calls of the root module.
    """

    def __init__(self, cfg: Config, transport: Transport, peers: Transport | None = None) -> None:
        """Make the runtime of a rank.

        No message is sent and no thread started.

        Args:
            cfg: The configuration.
            transport: The link with the other ranks of the pipeline.
            peers: The link with ranks of this stage that must run contexts in
                the same order, with the same inbox.
        """
        self.cfg, self.transport, self.peers = cfg, transport, peers
        self._early_messages: list[Item] = []  # of steps that this rank has not begun
        leads = peers is None or peers.rank == 0
        announce = self._announce if peers is not None and leads else None
        self._role = Role(leads, transport.rank == 0, announce)
        self.scheduler = Scheduler(
            transport.inbox,
            self._dispatch,
            transport.rank,
            lambda number: self.pipeline.modules.title(number),
            self._role,
        )
        self.pipeline = PipelineRank(transport, self.scheduler)
        self.calls, self.server = Caller(self.pipeline), Server(self.pipeline)
        self.model = Model(self.pipeline, self.server)
        self._drawn: set[str] = set()

    @property
    def in_step(self) -> bool:
        """Whether this thread runs a context."""
        return self.pipeline.in_step

    def install(self, root: nn.Module, owner: Mapping[str, int]) -> None:
        """Place the modules: replace the forward of each module at which work leaves this rank.

        The code of the modules is read, to find state and random generators that it names. Modules
        on this rank alone are not changed.

        Args:
            root: The wrapped module.
            owner: Name of a module -> the rank in the pipeline that owns the module.

        Raises:
            KeyError: A module of the root has no owner.
        """
        self.pipeline.modules = Modules(root, owner, self.pipeline.rank)
        self.pipeline.modules.bind(self.calls.call_module, self.calls.call_chain)
        self.pipeline.root_rank = self.pipeline.modules.owner[0]
        self.scheduler.module_state.install(
            self.pipeline.modules.modules, self.pipeline.modules.owner
        )
        self._role.owns_root = self.pipeline.rank == self.pipeline.root_rank
        self._drawn = self.scheduler.module_state.find_random_packages()

    def run_step(self, callables: Sequence[Callable[[], Any]], function: str) -> list[Any]:
        """Run a step: the step function on each microbatch, and the requests of other ranks.

        Each call raises the step's number; the other ranks must call as often. Gradients,
        attributes of modules and running statistics are written as the step function does. After an
        error the other ranks are told, so that they end the step, too.

        Args:
            callables: The step function on each microbatch.
            function: Name of the step function; the other ranks must run the same one.

        Returns:
            The results of the callables, in their order.

        Raises:
            StepError: Another step runs, the model cannot be run, a microbatch saw another state
                than in one process, or a connection was lost.
            PeerError: Another rank failed, or its connection was lost.
            Exception: An error of the user's code on this rank.
        """
        if self.scheduler.step is not None:
            raise StepError("a function decorated with smp.step was called within another")
        self.pipeline.step_number += 1
        self.pipeline.function = function
        self.pipeline.order = []
        for part in (self.calls, self.server, self.model):
            part.begin()
        try:
            step = self._begin(callables)
            self._run(step)
            if step.error is not None:
                self._abort(step.error, step.trace)
                raise step.error
            self._end()
        finally:
            try:
                # This writes to containers of the user, whose own methods may raise an error.
                self.scheduler.module_state.end()
            finally:
                self.scheduler.step = None
                for part in (self.calls, self.server, self.model):
                    part.begin()
        return step.results

    def _begin(self, callables: Sequence[Callable[[], Any]]) -> Step:
        """Record the state of the modules, and return the step that begins.

        If that fails, the other ranks are told.

        Args:
            callables: The step function on each microbatch.

        Raises:
            StepError: The step was called within a dispatch mode or hooks of saved tensors.
            Exception: An error of the user's code, for example of a property of a container.
        """
        try:
            scope = find_thread_scope()
            if scope is not None:
                raise StepError(
                    f"step function {self.pipeline.function} was called within {scope.name},"
                    " which would have no effect on the other threads and ranks of the step\n"
                    f"Call it outside of {scope.name}."
                )
            in_turn = self.scheduler.module_state.begin(self.pipeline.function)
        except BaseException as error:
            self._abort(error, traceback.format_exc())
            raise
        bodies = [self._body(number, body) for number, body in enumerate(callables)]
        return Step(
            bodies,
            CallerThread(),
            Streams(self._drawn),
            simple=self.cfg.pipeline == "simple" and not in_turn,
            limit=1 if in_turn else self.cfg.active_microbatches,
        )

    def _run(self, step: Step) -> None:
        """Run the microbatches of a step, and requests of other ranks, until the step ends.

        An error of a microbatch is recorded in the step, and so is a microbatch that saw another
        state than in one process.

        Raises:
            StepError: A connection was lost.
            PeerError: The connection with a rank that gets a message in turn is lost.
        """
        self.scheduler.step = step
        try:
            messages, self._early_messages = self._early_messages, []
            for item in messages:
                self._dispatch(item)
            self.scheduler.run(step)
        except OSError as error:
            raise StepError(f"a connection of the pipeline was lost: {error}") from error
        self._drawn |= step.streams.moved()
        # A conflict may be the cause of an error of torch: a graph that was freed, a tensor
        # that was written.
        if step.error is None or type(step.error) is RuntimeError:
            conflict = self.scheduler.module_state.find_conflict()
            if conflict is not None:
                conflict.__cause__ = step.error
                step.error = conflict
                step.trace = "".join(traceback.format_exception(conflict))

    def model_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the root module in a step function, and return its result."""
        return self.model.call(args, kwargs)

    def backward(
        self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Run the backward pass of a loss in a step function."""
        self.model.backward(tensors, grads)

    def close(self) -> None:
        """End threads and connections."""
        self.scheduler.close()
        for link in (self.transport, self.peers):
            if link is not None:
                link.close()

    def _body(self, microbatch: int, body: Callable[[], Any]) -> Callable[[], Any]:
        """Return the step function on a microbatch, with an explained error and the clean-up.

        Args:
            microbatch: Number of the microbatch.
            body: The step function on this microbatch.

        Returns:
            A function without arguments that returns the result. It raises StepError for a gradient
            that the step function takes on a rank with copies of the outputs alone, and other
            errors of the step function unchanged.
        """

        def run() -> Any:
            """Run the step function, and return its result.

            Raises:
                StepError: It took a gradient on a rank that has only copies of the outputs.
            """
            try:
                result = body()
            except RuntimeError as error:
                if self.pipeline.rank == self.pipeline.root_rank or _UNUSED not in str(error):
                    raise
                raise StepError(
                    "torch.autograd.grad was called in the step function:"
                    " on other ranks than the root module's the outputs of the model are copies,"
                    f" and lead to no input: {error}\n"
                    "Take this gradient in the forward of the model,"
                    " where it goes through all partitions."
                ) from error
            self.model.finish(microbatch)
            return result

        return run

    def _announce(self, key: Key) -> None:
        """Tell the tensor-parallel peers that follow the key of the context that runs next."""
        assert self.peers is not None
        for peer in range(self.peers.size):
            if peer != self.peers.rank:
                self.peers.send(peer, Pick(self.pipeline.step_number, key))

    def _dispatch(self, item: Item) -> None:
        """Handle a message of another rank.

        Messages of earlier steps are dropped, messages of later steps are stored. A lost peer, a
        failed peer, and a peer with another step function are recorded as errors, and not raised.

        Args:
            item: The link, the rank of the sender in it, the message, its tensors.

        Raises:
            PeerError: The connection with a rank that gets a message in turn is lost.
        """
        link, peer, message, tensors = item
        if isinstance(message, PeerLost):
            reason = f"{GONE} ({message.reason})"
            self.scheduler.lost = PeerError(link.members[peer], link.name(peer), reason)
            return
        if message.step != self.pipeline.step_number:
            if message.step > self.pipeline.step_number:
                self._early_messages.append(item)
            return
        if (
            isinstance(message, Forward | Outputs | Done)
            and message.function != self.pipeline.function
        ):
            self.scheduler.fail(
                StepError(
                    f"{link.name(peer)} runs the step function {message.function},"
                    f" and {link.name(link.rank)} runs {self.pipeline.function}\n"
                    "All ranks of a pipeline must call the same step functions in the same order."
                )
            )
            return
        received: Any = tensors
        match message:
            case Forward():
                self.server.accept_forward(message, received)
            case Backward():
                self.server.accept_backward(message, received)
            case Result():
                self.scheduler.answer(("R", message.call), (message, received))
            case Gradients():
                self.calls.forget_gradients(message.call)
                self.scheduler.answer(("B", message.call), received)
            case Outputs():
                key = ("O", message.microbatch, message.number)
                self.scheduler.answer(key, (message, received))
            case NotStarted():
                self.calls.request_kept_backward(message.call)
            case Pick():
                self.scheduler.record_pick(message.key)
            case Done():
                self.scheduler.module_state.agreed[message.function] = message.in_turn
                if self._role.leads or link is self.peers:
                    self.scheduler.end_by_peer()
            case Abort():
                self.scheduler.fail(
                    PeerError(message.rank, message.name, message.summary, message.trace)
                )

    def _links(self) -> list[Transport]:
        """Return the links of this rank: one or two."""
        if self.peers is None:
            return [self.transport]
        return [self.transport, self.peers]

    def _end(self) -> None:
        """Tell the ranks that wait for the end of the step that it has ended.

        They also learn whether the microbatches of the function's next step must run one after
        another. Only the root's owner, and the leader of tensor-parallel peers, send a message.

        A peer with a lost connection is skipped. The decision is stored in `ModuleState.agreed`.
        """
        if not self._role.leads:
            return
        is_root = self.pipeline.rank == self.pipeline.root_rank
        in_turn = self.scheduler.module_state.decide_next_order(
            self.pipeline.function, owns_root=is_root
        )
        message = Done(self.pipeline.step_number, self.pipeline.function, in_turn)
        for link in self._links():
            if link is self.transport and not is_root:
                continue
            for peer in range(link.size):
                if peer != link.rank:
                    with contextlib.suppress(OSError):  # this rank needs the others no more
                        link.send(peer, message)

    def _abort(self, error: BaseException, trace: str) -> None:
        """Tell the other ranks that the step failed.

        The failure of another rank is passed on to the ranks of the other link.

        A peer with a lost connection is skipped.

        Args:
            error: The error.
            trace: Its traceback, for the other ranks' output.
        """
        number = self.pipeline.step_number
        if isinstance(error, PeerError):
            # The rank that failed has told its own links. Without a trace its connection is lost:
            # each rank notices that by itself.
            if self.peers is None or not error.trace:
                return
            message = Abort(number, error.rank, error.name, error.reason, error.trace)
        else:
            link = self.transport
            rank, name = link.members[link.rank], link.name(link.rank)
            message = Abort(number, rank, name, summary(error), trace)
        for link in self._links():
            for peer in range(link.size):
                if peer != link.rank:
                    with contextlib.suppress(OSError):  # a peer that is gone needs no message
                        link.send(peer, message)


_UNUSED = "not have been used in the graph"
"""Part of torch's error for an input that is not in the graph of the outputs."""

_present: Runtime | None = None


def present() -> Runtime | None:
    """Return the runtime of this process; None with one partition."""
    return _present


def use(runtime: Runtime | None) -> None:
    """Set the runtime that `present` returns; None: the runtime has ended."""
    global _present
    _present = runtime
