"""The pipeline of one rank: a server of modules, and the microbatches of the
user's step function as its clients.

Every rank runs the user's step function on each microbatch. Where that calls a module of another
rank, the arguments go there, and the context waits (remote_calls.py). The owner runs the module and
sends the result back, later the gradients (module_server.py). What the root module returns goes to
all ranks (outputs.py). scheduler.py decides what runs when.
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
from .scheduler import Scheduler, Step
from .threadstate import CallerThread, capture

__all__ = ["Runtime", "present", "use"]


class Runtime:
    """The pipeline of one rank.

    Attributes:
        pipeline: What its parts have in common.
    """

    def __init__(self, cfg: Config, transport: Transport, peers: Transport | None = None) -> None:
        """Make the runtime of a rank.

        Args:
            cfg: The configuration.
            transport: The link with the other ranks of the pipeline.
            peers: The link with ranks of this stage that must run contexts in
                the same order, with the same inbox.
        """
        self.cfg, self.transport, self.peers = cfg, transport, peers
        self._leads = peers is None or peers.me == 0
        self._later: list[Item] = []
        self.scheduler = Scheduler(
            transport.inbox,
            self._dispatch,
            self._announce if peers is not None and self._leads else None,
            transport.me,
            lambda number: self.pipeline.modules.title(number),
            leads=self._leads,
            starts=transport.me == 0,
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
        """Place the modules: replace the forward of each at which work leaves this rank.

        Args:
            root: The wrapped module.
            owner: Rank in the pipeline for the name of each module.
        """
        self.pipeline.modules = Modules(root, owner, self.pipeline.me)
        self.pipeline.modules.bind(self.calls.module, self.calls.chain)
        self.pipeline.root_rank = self.pipeline.modules.owner[0]
        self.scheduler.module_state.install(
            self.pipeline.modules.modules, self.pipeline.modules.owner
        )
        self.scheduler.starts = self.pipeline.me == self.pipeline.root_rank
        self._drawn = self.scheduler.module_state.draws()

    def run_step(self, callables: Sequence[Callable[[], Any]], function: str) -> list[Any]:
        """Run a step.

        Args:
            callables: One for each microbatch.
            function: Name of the step function; the other ranks must run the same one.

        Returns:
            What the callables returned, in their order.

        Raises:
            StepError: Another rank failed, or the model cannot be run.
            Exception: What the user's code raised on this rank.
        """
        if self.scheduler.step is not None:
            raise StepError("a function decorated with smp.step was called within another")
        self.pipeline.number, self.pipeline.function = self.pipeline.number + 1, function
        self.pipeline.order = []
        for part in (self.calls, self.server, self.model):
            part.begin()
        simple = self.cfg.pipeline == "simple"
        in_turn = self.scheduler.module_state.begin(function)
        limit = 1 if in_turn else self.cfg.active_microbatches
        bodies = [self._body(n, body) for n, body in enumerate(callables)]
        streams = Streams(self._drawn)
        step = Step(
            self.pipeline.number,
            bodies,
            capture(),
            CallerThread(),
            streams,
            simple=simple and not in_turn,
            limit=limit,
        )
        self.scheduler.step = step
        try:
            later, self._later = self._later, []
            for item in later:
                self._dispatch(item)
            self.scheduler.run(step)
            self._drawn |= streams.moved()
            # torch's own errors may follow from it: a graph that was freed, a
            # tensor that was written.
            may = step.error is None or type(step.error) is RuntimeError
            if may and (wrong := self.scheduler.module_state.conflict()) is not None:
                wrong.__cause__ = step.error
                step.error, step.trace = wrong, "".join(traceback.format_exception(wrong))
            if step.error is not None:
                self._abort(step.error, step.trace)
                raise step.error
            self._end()
        except OSError as error:
            raise StepError(f"a connection of the pipeline was lost: {error}") from error
        finally:
            self.scheduler.module_state.end()
            self.scheduler.step = None
            for part in (self.calls, self.server, self.model):
                part.begin()
        return step.results

    def model_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model in a step function."""
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
        def run() -> Any:
            try:
                result = body()
            except RuntimeError as error:
                if self.pipeline.me == self.pipeline.root_rank or _UNUSED not in str(error):
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
        assert self.peers is not None
        for peer in range(self.peers.n):
            if peer != self.peers.me:
                self.peers.send(peer, Pick(self.pipeline.number, key))

    def _dispatch(self, item: Item) -> None:
        link, peer, message, tensors = item
        if isinstance(message, PeerLost):
            reason = f"{GONE} ({message.reason})"
            self.scheduler.lost = PeerError(link.members[peer], link.name(peer), reason)
            return
        if message.step != self.pipeline.number:
            if message.step > self.pipeline.number:
                self._later.append(item)
            return
        if (
            isinstance(message, Forward | Outputs | Done)
            and message.function != self.pipeline.function
        ):
            self.scheduler.fail(
                StepError(
                    f"{link.name(peer)} runs the step function {message.function},"
                    f" and {link.name(link.me)} runs {self.pipeline.function}\n"
                    "All ranks of a pipeline must call the same step functions in the same order."
                )
            )
            return
        given: Any = tensors
        match message:
            case Forward():
                self.server.accept_forward(message, given)
            case Backward():
                self.server.accept_backward(message, given)
            case Result():
                value = (message.value, message.differentiable, message.notes, given)
                self.scheduler.answer(("R", message.call), value)
            case Gradients():
                self.calls.ended(message.call)
                self.scheduler.answer(("B", message.call), given)
            case Outputs():
                self.scheduler.answer(("O", message.microbatch, message.number), (message, given))
            case NotStarted():
                self.calls.not_started(message.call)
            case Pick():
                self.scheduler.picked(message.key)
            case Done():
                self.scheduler.module_state.agreed[message.function] = message.late
                self.scheduler.done(self._leads or link is self.peers)
            case Abort():
                self.scheduler.fail(
                    PeerError(message.rank, message.name, message.summary, message.trace)
                )

    def _links(self) -> list[Transport]:
        return [self.transport] if self.peers is None else [self.transport, self.peers]

    def _end(self) -> None:
        """Tell those who wait for it that the step has ended."""
        if not self._leads:
            return
        late = self.scheduler.module_state.agree(
            self.pipeline.function, root=self.pipeline.me == self.pipeline.root_rank
        )
        for link in self._links():
            if link is self.transport and self.pipeline.me != self.pipeline.root_rank:
                continue
            for peer in range(link.n):
                if peer != link.me:
                    with contextlib.suppress(OSError):  # this rank needs nothing more of the others
                        link.send(peer, Done(self.pipeline.number, self.pipeline.function, late))

    def _abort(self, error: BaseException, trace: str) -> None:
        """Tell the others that the step failed. News from another rank go on to the other link."""
        if isinstance(error, PeerError):
            if self.peers is None or not error.trace:
                return
            news = Abort(self.pipeline.number, error.rank, error.name, error.reason, error.trace)
        else:
            link = self.transport
            news = Abort(
                self.pipeline.number,
                link.members[link.me],
                link.name(link.me),
                summary(error),
                trace,
            )
        for link in self._links():
            for peer in range(link.n):
                if peer != link.me:
                    try:
                        link.send(peer, news)
                    except OSError:
                        continue


_UNUSED = "not have been used in the graph"
"""torch's words for a tensor that a gradient does not lead to."""

_present: Runtime | None = None


def present() -> Runtime | None:
    """Return the runtime of this process; None with one partition."""
    return _present


def use(runtime: Runtime | None) -> None:
    """Make a runtime the one of this process; None: it has ended."""
    global _present
    _present = runtime
