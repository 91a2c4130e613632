"""Choose which context of this rank runs next, and on which thread.

Exactly one thread runs at a time, and this thread schedules. A context that must wait calls the
scheduler on its own stack. If its answer comes next, the context goes on without a change of
threads. Meanwhile the scheduler serves requests for local modules on the same stack. Another thread
is used only for a context that may wait itself, and so needs a stack of its own.

Priorities under 'interleaved', the first one runs first:

1. A forward that got its answer, because it mostly sends the next message.
2. A backward.
3. A request for a forward.
4. The start of a microbatch.

The schedule 1F1B follows from these priorities. Under 'simple' backward passes come last, and none
starts before all microbatches of the rank have made their forward.

Tensor-parallel peers must run contexts in the same order, or their collectives would not match. The
first peer picks; the others follow its picks. `deterministic_server` does the same for all
replicas.
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
from dataclasses import dataclass
from typing import Any, NamedTuple

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport.inbox import Inbox
from smdistributed.modelparallel.torch.transport.transport import Item

from .microbatch_threads import Context, Key, Runner, Worker
from .module_state import MicrobatchRun, ModuleState
from .randomness import Streams, place
from .threadstate import ApplyFlags, CallerThread, capture
from .variables import LeftVariables, title

RETURNED, BACKWARD, FORWARD, START = "R", "B", "F", "S"
"""Why a context is ready: a forward got its answer; a backward is requested; a forward is
requested; a microbatch starts.
"""

INTERLEAVED = {RETURNED: 0, BACKWARD: 1, FORWARD: 2, START: 3}
SIMPLE = {RETURNED: 0, FORWARD: 1, START: 2, BACKWARD: 3}

_OUTPUT_SECONDS = 0.05
"""Seconds that a rank waits for outputs before it starts another microbatch.

The script may run a collective before it calls the model, and then wait for another microbatch.
"""

_LAST_MESSAGE_SECONDS = 1.0
"""Seconds that the last messages may come after the connection of a peer has ended. The peer may
have heard of the step's end before this rank.
"""


class ReadyContext(NamedTuple):
    """A context that may run, as an entry of a heap: the smallest one runs next.

    Attributes:
        priority: From the kind of the context, by `INTERLEAVED` or `SIMPLE`.
        microbatch: The microbatch of the context.
        arrival: Number of the entry, so that contexts themselves are never compared.
        context: The context.
    """

    priority: int
    microbatch: int
    arrival: int
    context: Context


@dataclass
class Role:
    """The part of this rank in the choice of contexts.

    Attributes:
        leads: Whether this rank picks contexts by itself; else it follows the picks of another
            rank.
        owns_root: Whether this rank owns the root module.
        announce: Sends the key of the next context to the peers that follow; None without such
            peers.
    """

    leads: bool
    owns_root: bool
    announce: Callable[[Key], None] | None


class Step:
    """The state of one step on this rank.

    Attributes:
        bodies: The user's function on each microbatch.
        size: Number of microbatches.
        results: The results of the bodies.
        flags: Modes of the thread that called the step.
        caller_thread: Other state of this thread.
        streams: Streams of random numbers.
        limit: Largest number of microbatches in flight.
        started: Number of microbatches that have started.
        finished: Number of microbatches that have returned.
        ready: Heap of the contexts that may run.
        priorities: Kind of a context -> its priority; the lowest number runs first.
        arrivals: Numbers the entries of the heap.
        answers: Key -> an answer that no context has taken yet.
        waiting_contexts: Key of an answer -> the context that waits for it, and its kind when it
            is ready.
        early_outputs: Microbatches that have not started, while their first outputs are here.
        expected_outputs: Number of contexts that wait for outputs of the model.
        is_eager: Whether the next microbatch may start although outputs are expected.
        may_run_backwards: Whether backward passes may run; under 'simple' only when all
            microbatches have made their forward.
        held_backwards: Under 'simple' the contexts that wait for that.
        held_forwards: Number of microbatches of this rank among them.
        picks: Keys of contexts that the leading peer has picked.
        done: Whether the owner of the root module has ended the step.
        error: The first error, or None.
        trace: The traceback of the error.
    """

    def __init__(
        self,
        bodies: Sequence[Callable[[], Any]],
        caller_thread: CallerThread,
        streams: Streams,
        *,
        simple: bool,
        limit: int,
    ) -> None:
        self.bodies, self.size = bodies, len(bodies)
        self.flags, self.caller_thread = capture(), caller_thread
        self.streams = streams
        self.limit = self.size if simple else min(self.size, limit)
        self.results: list[Any] = [None] * self.size
        self.started = self.finished = 0
        self.ready: list[ReadyContext] = []
        self.priorities = SIMPLE if simple else INTERLEAVED
        self.arrivals = itertools.count()
        self.answers: dict[Key, Any] = {}
        self.waiting_contexts: dict[Key, tuple[Context, str]] = {}
        self.early_outputs: set[int] = set()
        self.expected_outputs = 0
        self.is_eager = False
        self.held_backwards: list[Context] = []
        self.held_forwards = 0
        self.may_run_backwards = not simple
        self.picks: collections.deque[Key] = collections.deque()
        self.done = False
        self.error: BaseException | None = None
        self.trace = ""


class Scheduler:
    """Runs the contexts of a rank.

    Attributes:
        step: The present step, or None between steps.
        current: The context that runs.
        module_state: The state that modules keep on themselves, as each microbatch sees it.
        variables: Context variables that microbatches have changed.
        lost: The error of a peer with an ended connection. It is raised when a message of the
            peer is still needed.
        switches: Changes of threads over all steps.
    """

    def __init__(
        self,
        inbox: Inbox[Item],
        dispatch: Callable[[Item], None],
        rank: int,
        module_title: Callable[[int], str],
        role: Role,
    ) -> None:
        """Make the scheduler of a rank.

        No thread is started yet.

        Args:
            inbox: Messages of the other ranks.
            dispatch: Handles a message.
            rank: Rank in the pipeline.
            module_title: Returns words for a module, by its number.
            role: The part of this rank in the choice of contexts.
        """
        self.inbox, self.dispatch, self.role = inbox, dispatch, role
        self.module_state = ModuleState(rank, self.current_run, self._current_key, module_title)
        self.variables = LeftVariables()
        self.step: Step | None = None
        self.current: Context | None = None
        self.lost: BaseException | None = None
        self.switches = 0
        self._workers: list[Worker] = []
        self._idle: list[Runner] = []
        self._sleeping: dict[Context, Runner] = {}
        self._main = Runner(main=True)

    # --- called by contexts -----------------------------------------------------------------------

    def wait(self, key: Key, kind: str) -> Any:
        """Wait for an answer of another rank, and run other contexts meanwhile.

        This thread's random numbers and the modules' state are those of the context again when the
        call returns. A message that arrives meanwhile is handled here.

        Args:
            key: Names the answer: ("R", call) for a result, ("B", call) for gradients, ("O",
                microbatch, model call) for outputs of the model.
            kind: `FORWARD` or `BACKWARD`: the pass that waits.

        Returns:
            The answer.

        Raises:
            StepError: The step failed meanwhile, or a write of the microbatch comes too late for
                another one (`ModuleState.leave`).
        """
        step, context = self._present_step(), self._present_context()
        if key in step.answers:
            # A backward waits until it is picked, so that gradients add up in the order of the
            # microbatches. With tensor-parallel peers each pick must be announced.
            if kind == FORWARD and self.role.announce is None and self.role.leads:
                return step.answers.pop(key)
            self._make_returned_ready(context, kind)
        else:
            step.waiting_contexts[key] = (context, kind)
            step.expected_outputs += key[0] == "O"
        self._run_others_until_ready(context)
        return step.answers.pop(key)

    def wait_for_all_forwards(self) -> None:
        """Wait, under 'simple', until all microbatches of this rank have made their forward.

        Under 'interleaved' the context goes on at once.

        Other contexts of this rank run meanwhile.

        Raises:
            StepError: The step failed meanwhile, or a write of the microbatch comes too late for
                another one.
        """
        step, context = self._present_step(), self._present_context()
        if not step.may_run_backwards:
            step.held_backwards.append(context)
            step.held_forwards += 1
            self._run_others_until_ready(context)

    # --- called for messages ----------------------------------------------------------------------

    def answer(self, key: Key, value: Any) -> None:
        """Store an answer, and make the context that waits for this answer ready.

        An answer that no context waits for yet stays in `step.answers` until `wait` takes it.

        Args:
            key: Names the answer, as for `wait`.
            value: The answer.
        """
        step = self._present_step()
        step.answers[key] = value
        entry = step.waiting_contexts.pop(key, None)
        if entry is not None:
            context, kind = entry
            step.expected_outputs -= key[0] == "O"
            self._make_returned_ready(context, kind)
        elif key[0] == "O" and key[1] >= step.started:
            # Outputs for a microbatch that has not started: it need not wait when it does.
            step.early_outputs.add(key[1])

    def make_ready(self, context: Context, kind: str) -> None:
        """Let a context run when its priority is the highest.

        Args:
            context: The context.
            kind: `RETURNED`, `BACKWARD` or `FORWARD`.
        """
        step = self._present_step()
        entry = ReadyContext(
            step.priorities[kind], context.microbatch, next(step.arrivals), context
        )
        heapq.heappush(step.ready, entry)

    def _make_returned_ready(self, context: Context, kind: str) -> None:
        """Make a context ready that has got its answer.

        Args:
            context: The context.
            kind: The pass that waited: `FORWARD`, which runs as `RETURNED`, or `BACKWARD`.
        """
        if kind == FORWARD:
            kind = RETURNED
        self.make_ready(context, kind)

    def make_backward_ready(self, context: Context) -> None:
        """Make the backward of a served call ready; under 'simple' only after all forwards."""
        step = self._present_step()
        if step.may_run_backwards:
            self.make_ready(context, BACKWARD)
        else:
            step.held_backwards.append(context)

    def record_pick(self, key: Key) -> None:
        """Record the key of the context that the leading peer runs next."""
        self._present_step().picks.append(key)

    def end_by_peer(self) -> None:
        """Record that the owner of the root module, or the leading peer, has ended the step."""
        self._present_step().done = True

    def fail(self, error: BaseException) -> None:
        """Store an error with its traceback, which ends the step. Later errors are ignored."""
        step = self._present_step()
        if step.error is None:
            step.error = error
            step.trace = "".join(traceback.format_exception(error))

    # --- the step ---------------------------------------------------------------------------------

    def run(self, step: Step) -> None:
        """Run a step to its end. An error is stored in `step.error`, and not raised.

        The present thread is the main one of the step, and runs contexts; threads of the pool run
        those that need a stack of their own. The results are in `step.results`. The generators of
        random numbers have the script's own state again afterwards.
        """
        self.step = step
        step.caller_thread.started = self.variables.begin(step.caller_thread.variables)
        self._main.ident = threading.get_ident()
        script = step.streams.stop()
        try:
            self._run_contexts(self._main)
        finally:
            self.current = None
            step.streams.resume(script)

    def close(self) -> None:
        """End the pooled threads that run no context, and wait a second at most for each."""
        for worker in self._workers:
            if worker.runner in self._idle:
                worker.runner.closed = True
                worker.runner.wake()
                worker.join(1)

    @property
    def caller_thread(self) -> CallerThread:
        """The state of the thread that called the step."""
        return self._present_step().caller_thread

    def _present_step(self) -> Step:
        assert self.step is not None
        return self.step

    def _present_context(self) -> Context:
        assert self.current is not None
        return self.current

    def _current_key(self) -> Key:
        """Return the key of the context that runs on any thread; () if none runs."""
        if self.current is None:
            return ()
        return self.current.key

    def _run_contexts(self, runner: Runner) -> None:
        """Run contexts, one after another, on a thread that runs none yet.

        Returns on the main thread when the step ends, on a pooled thread when the pool is closed.

        Before this thread sleeps, the one that goes on is woken.

        Args:
            runner: The present thread. Its `task`, if any, runs first.
        """
        while True:
            self.current = None
            task, runner.task = runner.task, None
            context = task or self._next_context()
            if context is not None and context.runner is None:
                self._execute(runner, context)
                continue
            # Another thread must go on: the one of the context, or the main one.
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

    def _run_others_until_ready(self, mine: Context) -> None:
        """Run other work while a context is blocked; return when the context may go on.

        If the work is on another thread, this thread sleeps. The random numbers and the modules'
        state of the context are put back before the return.

        Args:
            mine: The context of this thread.

        Raises:
            StepError: The step failed meanwhile, or a write of the microbatch comes too late for
                another one.
        """
        step, runner = self._present_step(), mine.runner
        assert runner is not None
        is_plain: bool | None = None
        stream: list[Any] | None = None  # random numbers of `mine`, once another context has run
        while True:
            context = self._next_context()
            if context is mine:
                if stream is not None:
                    self._resume_context(step, mine, stream)
                return
            if context is None:
                raise StepError("the step failed")
            if stream is None:
                stream = step.streams.stop()
                self.module_state.leave(self._run_of(mine))
            # A call that cannot wait runs on this stack: a change of threads costs more.
            if context.runner is None and context.inline:
                if is_plain is None:
                    is_plain = step.caller_thread.has_only_caller_modes()
                if is_plain:
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
            self._resume_context(step, mine, stream)
            return

    def _resume_context(self, step: Step, context: Context, stream: list[Any]) -> None:
        """Restore the random numbers and the modules' state of a context that goes on.

        Containers of modules get the contents that the microbatch sees.

        Args:
            step: The present step.
            context: The context.
            stream: States of the generators, as `Streams.stop` returned them.
        """
        step.streams.resume(stream)
        self.module_state.enter(self._run_of(context))

    def current_run(self) -> MicrobatchRun | None:
        """Return the microbatch that this thread runs; None for a thread without a context."""
        context = self.current
        if context is None or context.runner is None:
            return None
        if context.runner.ident != threading.get_ident():
            return None
        return self._run_of(context)

    def _run_of(self, context: Context) -> MicrobatchRun:
        """Return the microbatch of a context, and whether the context is a copy of the script.

        Each rank runs the step function. On a rank without the root module it is a copy, which
        gets the outputs of the model from another rank.
        """
        return MicrobatchRun(
            context.microbatch, context.key[0] == START and not self.role.owns_root
        )

    def _new_runner(self) -> Runner:
        """Start a pooled thread, which sleeps until it is woken with a task."""
        worker = Worker(self._run_contexts)
        self._workers.append(worker)
        return worker.runner

    def _execute(self, runner: Runner, context: Context) -> None:
        """Run a context from its start to its end on the present thread.

        An error of the context ends the step, and is not raised.

        The generators of random numbers start at the context's own seed. The modules get the
        contents that its microbatch sees, and writes are noted at the end, also after an error.
        `current` is the context while it runs.

        Args:
            runner: The present thread.
            context: The context. It may run above another one on the stack of this thread.
        """
        outer = self.current
        if outer is not None:
            outer.is_blocked = True
        # A pooled thread has no modes of the caller's thread, until a context begins on it.
        needs_modes = not runner.main and outer is None
        context.runner, self.current = runner, context
        caller_thread = self._present_step().caller_thread
        self._present_step().streams.start(context.place)
        if needs_modes:
            caller_thread.enter()
        run = self._run_of(context)
        try:
            self.module_state.enter(run)
            with ApplyFlags(context.flags):
                self._run_body(context, run)
            self.module_state.leave(run, backward=context.key[0] == BACKWARD)
        except BaseException as error:  # noqa: BLE001  it is raised on all ranks of the pipeline
            self.fail(error)
            with contextlib.suppress(StepError):  # record the writes before the error
                self.module_state.leave(run)
        finally:
            if needs_modes:
                caller_thread.leave()
            if outer is not None:
                outer.is_blocked = False
            self.current = outer

    def _run_body(self, context: Context, run: MicrobatchRun) -> None:
        """Run the body of a context with the context variables that a microbatch sees.

        Variables that the microbatch has not reset are stored for the next one.

        Args:
            context: The context.
            run: Its microbatch.

        Raises:
            StepError: A variable was not reset, and a later microbatch may have begun without the
                value.
            Exception: An error of the body: of the step function, or of a served request.
        """
        caller_thread = self._present_step().caller_thread
        own_variables = caller_thread.started.copy()
        own_variables.run(context.body)
        # A served call has sent its changes to the caller. A copy of the script makes its own.
        if context.key[0] == START and not run.is_copy:
            changed = self.variables.end(
                own_variables, caller_thread.started, caller_thread.variables
            )
            if changed:
                self.module_state.record_variable_left(title(changed[0]))

    def _next_context(self) -> Context | None:
        """Return the context that runs next, after waiting for messages if none is ready.

        All messages that are here are handled first. An error in that is stored, and not raised.
        None when the step is over or has failed.

        The returned context is no longer among the ready ones. A microbatch that it starts is
        counted, and the peers that follow are told.
        """
        step = self._present_step()
        inbox = self.inbox
        while True:
            try:
                while not inbox.empty():
                    self.dispatch(inbox.get())
                if step.error is not None:
                    return None
                self._release_backwards(step)
                context = (
                    self._pick_context(step) if self.role.leads else self._take_picked_context(step)
                )
                if context is not None or self._is_over(step):
                    return context
                item = self._wait_for_message(step)
                if item is not None:
                    self.dispatch(item)
            except Exception as error:  # noqa: BLE001, PERF203  it ends the step on all ranks
                self.fail(error)

    def _wait_for_message(self, step: Step) -> Item | None:
        """Wait for the next message, and return it; None if another microbatch may start instead.

        None comes after 50 ms without a message; then `step.is_eager` is set.

        Raises:
            PeerError: The connection of a peer has ended, and no message has come for a second.
        """
        if self.lost is not None:
            # Its last messages may be on the way.
            try:
                return self.inbox.get(timeout=_LAST_MESSAGE_SECONDS)
            except queue.Empty:
                raise self.lost from None
        has_room = step.started - step.finished < step.limit
        can_start = step.started < step.size
        if not (self.role.leads and step.expected_outputs and has_room and can_start):
            # Only a message can bring this rank on.
            return self.inbox.get()
        try:
            return self.inbox.get(timeout=_OUTPUT_SECONDS)
        except queue.Empty:
            step.is_eager = True
            return None

    def _release_backwards(self, step: Step) -> None:
        """Make the held backward passes ready, once all forwards of the rank are made.

        Only under 'simple': under 'interleaved' none is held.

        They are no longer held.
        """
        if not step.may_run_backwards and step.held_forwards + step.finished == step.size:
            step.may_run_backwards = True
            for context in step.held_backwards:
                self.make_ready(context, BACKWARD)
            step.held_backwards.clear()

    def _is_over(self, step: Step) -> bool:
        """Return whether the step is over: all microbatches have ended, and no request comes.

        The owner of the root module knows that by itself, and tells the other ranks.

        Nothing is changed.
        """
        if step.finished < step.size or step.ready or step.picks:
            return False
        return step.done or (self.role.leads and self.role.owns_root)

    def _pick_context(self, step: Step) -> Context | None:
        """Take the context with the highest priority, or start a microbatch, and return it.

        The peers that follow are told the key. None if no context may run.

        Raises:
            OSError: The connection with a peer that follows is lost.
        """
        first = step.ready[0] if step.ready else None
        if first is not None and first.context.is_blocked:
            # Another context runs above it on its stack, and must end before.
            first = None
            for entry in sorted(step.ready):
                if not entry.context.is_blocked:
                    first = entry
                    break

        context = None
        kind = self._kind_of_start(step)
        if kind is not None and (
            first is None
            or (step.priorities[kind], step.started) < (first.priority, first.microbatch)
        ):
            context = self._start_microbatch(step)
        elif first is not None:
            self._remove_ready(step, first)
            context = first.context
        if context is not None and self.role.announce is not None:
            self.role.announce(context.key)
        return context

    def _kind_of_start(self, step: Step) -> str | None:
        """Return the kind with which the next microbatch may start; None if none may start.

        A rank without the root module has nothing to do before the outputs are here. If such a
        rank starts its microbatches one at a time, they need no threads.

        Returns:
            `RETURNED` if outputs of the model are here, `START` if not; None.
        """
        in_flight = step.started - step.finished
        if step.started == step.size or in_flight >= step.limit:
            return None
        if step.early_outputs:
            return RETURNED
        if self.role.owns_root or not step.expected_outputs or step.is_eager:
            return START
        return None

    def _start_microbatch(self, step: Step) -> Context:
        """Count the next microbatch as started, and return a context that runs it.

        Tensors of earlier microbatches that no other one can read any more are freed.

        The context stores the result, and counts the microbatch as finished.
        """
        microbatch = step.started
        step.started += 1
        step.early_outputs.discard(microbatch)
        step.is_eager = False
        self.module_state.free_ended(microbatch - step.limit)

        def body() -> None:
            step.results[microbatch] = step.bodies[microbatch]()
            step.finished += 1

        context = Context(("S", microbatch), microbatch, body, step.flags)
        context.place = place(microbatch)
        return context

    def _remove_ready(self, step: Step, entry: ReadyContext) -> None:
        """Remove an entry from the heap of ready contexts."""
        # Nearly always the smallest entry: then the heap need not be made anew.
        if step.ready[0] is entry:
            heapq.heappop(step.ready)
        else:
            step.ready.remove(entry)
            heapq.heapify(step.ready)

    def _take_picked_context(self, step: Step) -> Context | None:
        """Take the context that the leading peer has picked, and return it.

        None if the peer has picked none, or if the context is not ready on this rank yet.

        The pick is removed from the queue with that, and a microbatch that starts is counted.
        """
        if not step.picks:
            return None
        key = step.picks[0]
        if key == ("S", step.started):
            step.picks.popleft()
            return self._start_microbatch(step)
        for entry in step.ready:
            if entry.context.key == key and not entry.context.is_blocked:
                step.picks.popleft()
                self._remove_ready(step, entry)
                return entry.context
        return None
