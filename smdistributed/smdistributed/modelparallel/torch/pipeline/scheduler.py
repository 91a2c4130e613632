"""Which context of this rank runs next, and on which thread.

The thread that has the baton schedules: a context that must wait runs the scheduler where it
stands. It goes on without a change of threads if its own answer comes next, and serves requests for
local modules on its own stack meanwhile. Only what needs a stack of its own goes to another thread.

Priorities ('interleaved'): a forward that got its answer, as it mostly sends the next message; a
backward; a request for a forward; the start of a microbatch. So 1F1B emerges. Under 'simple'
backward passes come last, and none starts before all microbatches of the rank have made their
forward.

Tensor-parallel peers must run contexts in one order, or their collectives cross. The first of them
picks; the others follow its picks. `deterministic_server` does the same for all replicas.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport.inbox import Inbox
from smdistributed.modelparallel.torch.transport.transport import Item

from .microbatch_threads import Context, Key, Runner, Worker
from .module_state import ModuleState, Turn
from .randomness import Streams, place
from .threadstate import ApplyFlags, CallerThread, Flags
from .variables import Kept, title

RETURNED, BACKWARD, FORWARD, START = "R", "B", "F", "S"
"""Why a context is ready: a forward got its answer; a backward; a request; a microbatch."""

INTERLEAVED = {RETURNED: 0, BACKWARD: 1, FORWARD: 2, START: 3}
SIMPLE = {RETURNED: 0, FORWARD: 1, START: 2, BACKWARD: 3}

_PATIENCE = 0.05
"""Seconds after which a rank that waits for outputs starts another microbatch.

Its script may meet others before.
"""

_NEWS_SECONDS = 1.0
"""Seconds that the others' news may come after the end of a peer, which may
have been told of the step's end first.
"""


class Step:
    """The state of one step on this rank.

    Attributes:
        number: Number of the step; the same on all ranks of the pipeline.
        bodies: The user's function on each microbatch.
        results: What it returned.
        flags: Modes of the thread that called the step.
        limit: The most microbatches in flight.
        arrived: Answers that no context has taken yet.
        waiting: Contexts that wait for an answer, and as what they become ready.
        early: Microbatches that have not started, but whose first outputs are here.
        done: The owner of the root module has ended the step.
        error: The first error.
        trace: Its traceback.
    """

    def __init__(
        self,
        number: int,
        bodies: Sequence[Callable[[], Any]],
        flags: Flags,
        caller_thread: CallerThread,
        streams: Streams,
        *,
        simple: bool,
        limit: int,
    ) -> None:
        self.number, self.bodies, self.size = number, bodies, len(bodies)
        self.flags, self.caller_thread, self.simple, self.streams = (
            flags,
            caller_thread,
            simple,
            streams,
        )
        self.limit = self.size if simple else min(self.size, limit)
        self.results: list[Any] = [None] * self.size
        self.started = self.finished = 0
        self.ready: list[tuple[int, int, int, Context]] = []
        self.priorities = SIMPLE if simple else INTERLEAVED
        self.arrivals = itertools.count()
        self.arrived: dict[Key, Any] = {}
        self.waiting: dict[Key, tuple[Context, str]] = {}
        self.early: set[int] = set()
        self.expecting = 0
        self.eager = False
        self.gate: list[Context] = []
        self.at_gate = 0
        self.gate_open = not simple
        self.picks: collections.deque[Key] = collections.deque()
        self.done = False
        self.error: BaseException | None = None
        self.trace = ""


class Scheduler:
    """Runs the contexts of a rank.

    Attributes:
        step: The present step, or None between steps.
        current: The context that runs.
        module_state: What each microbatch sees of what modules keep on themselves.
        variables: What microbatches have set context variables to.
        lost: A peer whose connection has ended. It is an error when something
            of it is still to come.
        switches: Changes of threads over all steps.
    """

    def __init__(
        self,
        inbox: Inbox[Item],
        dispatch: Callable[[Item], None],
        announce: Callable[[Key], None] | None,
        me: int,
        title: Callable[[int], str],
        *,
        leads: bool,
        starts: bool,
    ) -> None:
        """Make the scheduler of a rank.

        Args:
            inbox: Messages of the other ranks.
            dispatch: What to do with one.
            announce: Tells the peers that follow what runs next; None without such peers.
            me: Rank in the pipeline.
            title: Returns words for a module.
            leads: This rank picks by itself.
            starts: This rank owns the root module.
        """
        self.inbox, self.dispatch, self.announce = inbox, dispatch, announce
        self.module_state = ModuleState(
            me, self.turn, lambda: self.current.key if self.current is not None else (), title
        )
        self.leads, self.starts = leads, starts
        self.variables = Kept()
        self.step: Step | None = None
        self.current: Context | None = None
        self.lost: BaseException | None = None
        self.switches = 0
        self._workers: list[Worker] = []
        self._idle: list[Runner] = []
        self._sleeping: dict[Context, Runner] = {}
        self._main = Runner(main=True)

    # --- what contexts call -----------------------------------------------------------------------

    def wait(self, key: Key, kind: str) -> Any:
        """Let other contexts run until an answer is here, and return it.

        Raises:
            StepError: The step failed meanwhile.
        """
        step, context = self._now(), self._context()
        if key in step.arrived:
            # A backward takes its turn, so that gradients add up in the order of the microbatches.
            if kind == FORWARD and self.announce is None and self.leads:
                return step.arrived.pop(key)
            self.make_ready(context, RETURNED if kind == FORWARD else kind)
        else:
            step.waiting[key] = (context, kind)
            step.expecting += key[0] == "O"
        self._wait(context)
        return step.arrived.pop(key)

    def wait_at_gate(self) -> None:
        """Under 'simple', wait until all microbatches of this rank have made their forward."""
        step, context = self._now(), self._context()
        if not step.gate_open:
            step.gate.append(context)
            step.at_gate += 1
            self._wait(context)

    # --- what messages do -------------------------------------------------------------------------

    def answer(self, key: Key, value: Any) -> None:
        """Keep an answer, and make the context that waits for it ready."""
        step = self._now()
        step.arrived[key] = value
        waits = step.waiting.pop(key, None)
        if waits is not None:
            context, kind = waits
            step.expecting -= key[0] == "O"
            self.make_ready(context, RETURNED if kind == FORWARD else kind)
        elif key[0] == "O" and key[1] >= step.started:
            step.early.add(key[1])

    def make_ready(self, context: Context, kind: str) -> None:
        """Let a context run when its turn comes."""
        step = self._now()
        heapq.heappush(
            step.ready, (step.priorities[kind], context.microbatch, next(step.arrivals), context)
        )

    def hold_at_gate(self, context: Context) -> None:
        """Make the backward of a served call ready, under 'simple' when the gate opens."""
        step = self._now()
        if step.gate_open:
            self.make_ready(context, BACKWARD)
        else:
            step.gate.append(context)

    def picked(self, key: Key) -> None:
        """Note what the leading peer runs next."""
        self._now().picks.append(key)

    def done(self, counts: bool) -> None:
        """Note that the owner of the root module has ended the step, if the
        news is for this rank.
        """
        step = self._now()
        step.done = step.done or counts

    def fail(self, error: BaseException) -> None:
        """End the step with an error; the first one counts."""
        step = self._now()
        if step.error is None:
            step.error = error
            step.trace = "".join(traceback.format_exception(error))

    # --- the step ---------------------------------------------------------------------------------

    def run(self, step: Step) -> None:
        """Run a step to its end; the error is left in it."""
        self.step = step
        step.caller_thread.started = self.variables.begin(step.caller_thread.variables)
        self._main.ident = threading.get_ident()
        script = step.streams.stop()
        try:
            self._base(self._main)
        finally:
            self.current = None
            step.streams.resume(script)

    def close(self) -> None:
        """End the pooled threads."""
        for worker in self._workers:
            if worker.runner in self._idle:
                worker.runner.closed = True
                worker.runner.wake()
                worker.join(1)

    @property
    def caller_thread(self) -> CallerThread:
        """What the thread that called the step has."""
        return self._now().caller_thread

    def _now(self) -> Step:
        assert self.step is not None
        return self.step

    def _context(self) -> Context:
        assert self.current is not None
        return self.current

    def _base(self, runner: Runner) -> None:
        """Run contexts on a thread that has none.

        Ends with the step on the main thread, else with the pool.
        """
        while True:
            self.current = None
            task, runner.task = runner.task, None
            context = task or self._next()
            if context is not None and context.runner is None:
                self._execute(runner, context)
                continue
            if context is not None and context.runner is not None:
                target = context.runner
            elif self._sleeping:  # the step failed: each waiting context ends by an exception
                target = next(iter(self._sleeping.values()))
            elif runner.main:
                return
            else:
                target = self._main
                self._idle.remove(target)
            self._idle.append(runner)
            self.switches += 1
            target.wake()
            runner.sleep()
            if runner.closed:
                return

    def _wait(self, mine: Context) -> None:
        """Schedule in the place of a context that waits, until it may go on."""
        step, runner = self._now(), mine.runner
        assert runner is not None
        plain: bool | None = None
        stream: list[Any] | None = None  # of this context, once another has run
        while True:
            context = self._next()
            if context is mine:
                if stream is not None:
                    self._resume(step, mine, stream)
                return
            if context is None:
                raise StepError("the step failed")
            if stream is None:
                stream = step.streams.stop()
                self.module_state.leave(self._turn_of(mine))
            if context.runner is None and context.inline:
                if plain is None:
                    plain = step.caller_thread.plain()
                if plain:
                    self._execute(runner, context)
                    continue
            target = context.runner
            if target is None:
                target = self._idle.pop() if self._idle else self._new_runner()
                target.task = context
            self._sleeping[mine] = runner
            self.switches += 1
            target.wake()
            runner.sleep()
            del self._sleeping[mine]
            self.current = mine
            if step.error is not None:
                raise StepError("the step failed")
            self._resume(step, mine, stream)
            return

    def _resume(self, step: Step, context: Context, stream: list[Any]) -> None:
        step.streams.resume(stream)
        self.module_state.enter(self._turn_of(context))

    def turn(self) -> Turn | None:
        """Return which microbatch this thread runs, if it does."""
        context = self.current
        running = (
            context is not None
            and context.runner is not None
            and context.runner.ident == threading.get_ident()
        )
        return self._turn_of(context) if running and context is not None else None

    def _turn_of(self, context: Context) -> Turn:
        return context.microbatch, context.key[0] == START and not self.starts

    def _new_runner(self) -> Runner:
        worker = Worker(self._base)
        self._workers.append(worker)
        return worker.runner

    def _execute(self, runner: Runner, context: Context) -> None:
        outer = self.current
        if outer is not None:
            outer.is_blocked = True
        foreign = not runner.main and outer is None
        context.runner, self.current = runner, context
        caller_thread = self._now().caller_thread
        self._now().streams.start(context.place)
        if foreign:
            caller_thread.enter()
        turn = self._turn_of(context)
        try:
            self.module_state.enter(turn)
            with ApplyFlags(context.flags):
                self._run(context, turn)
            self.module_state.leave(turn, backward=context.key[0] == BACKWARD)
        except BaseException as error:  # noqa: BLE001  it is raised on all ranks of the pipeline
            self.fail(error)
            with contextlib.suppress(StepError):  # what it wrote until then stays
                self.module_state.leave(turn)
        finally:
            if foreign:
                caller_thread.leave()
            if outer is not None:
                outer.is_blocked = False
            self.current = outer

    def _run(self, context: Context, turn: Turn) -> None:
        """Run what a context runs, with the context variables that a microbatch sees."""
        caller_thread = self._now().caller_thread
        own = caller_thread.started.copy()
        own.run(context.body)
        # A served call has sent what it set to its caller. A copy of the script sets its own.
        if context.key[0] == START and not turn[1]:
            left = self.variables.end(own, caller_thread.started, caller_thread.variables)
            if left:
                self.module_state.variable_left(title(left[0]))

    def _next(self) -> Context | None:
        """Return the context that runs next; None when the step is over or failed."""
        step = self._now()
        inbox = self.inbox
        while True:
            try:
                while not inbox.empty():
                    self.dispatch(inbox.get())
                if step.error is not None:
                    return None
                self._open_gate(step)
                context = self._pick(step) if self.leads else self._follow(step)
                if context is not None or self._over(step):
                    return context
                if self.lost is not None:
                    try:
                        item = inbox.get(timeout=_NEWS_SECONDS)
                    except queue.Empty:
                        raise self.lost from None
                elif self.leads and step.expecting and step.started - step.finished < step.limit:
                    try:
                        item = inbox.get(timeout=_PATIENCE if step.started < step.size else None)
                    except queue.Empty:
                        step.eager = True
                        continue
                else:
                    item = inbox.get()
                self.dispatch(item)
            except Exception as error:  # noqa: BLE001
                self.fail(error)

    def _open_gate(self, step: Step) -> None:
        if not step.gate_open and step.at_gate + step.finished == step.size:
            step.gate_open = True
            for context in step.gate:
                self.make_ready(context, BACKWARD)
            step.gate.clear()

    def _over(self, step: Step) -> bool:
        if step.finished < step.size or step.ready or step.picks:
            return False
        return step.done or (self.leads and self.starts)

    def _pick(self, step: Step) -> Context | None:
        context = None
        first = step.ready[0] if step.ready else None
        if first is not None and first[3].is_blocked:
            first = next((entry for entry in sorted(step.ready) if not entry[3].is_blocked), None)
        kind = self._startable(step)
        if kind is not None and (
            first is None or (step.priorities[kind], step.started) < first[:2]
        ):
            context = self._start(step)
        elif first is not None:
            self._take(step, first)
            context = first[3]
        if context is not None and self.announce is not None:
            self.announce(context.key)
        return context

    def _startable(self, step: Step) -> str | None:
        """Return as what the next microbatch may start, if it may.

        Other ranks than the root's owner have nothing to do before the outputs are there. Started
        one at a time, their microbatches need no threads.
        """
        live = step.started - step.finished
        if step.started == step.size or live >= step.limit:
            return None
        if step.early:
            return RETURNED
        return START if self.starts or not step.expecting or step.eager else None

    def _start(self, step: Step) -> Context:
        microbatch = step.started
        step.started += 1
        step.early.discard(microbatch)
        step.eager = False
        self.module_state.forget(microbatch - step.limit)

        def body() -> None:
            step.results[microbatch] = step.bodies[microbatch]()
            step.finished += 1

        return Context(
            ("S", microbatch), microbatch, body, step.flags, inline=False, place=place(microbatch)
        )

    def _take(self, step: Step, entry: tuple[int, int, int, Context]) -> None:
        if step.ready[0] is entry:
            heapq.heappop(step.ready)
        else:
            step.ready.remove(entry)
            heapq.heapify(step.ready)

    def _follow(self, step: Step) -> Context | None:
        if not step.picks:
            return None
        key = step.picks[0]
        if key == ("S", step.started):
            step.picks.popleft()
            return self._start(step)
        for entry in step.ready:
            if entry[3].key == key and not entry[3].is_blocked:
                step.picks.popleft()
                self._take(step, entry)
                return entry[3]
        return None
