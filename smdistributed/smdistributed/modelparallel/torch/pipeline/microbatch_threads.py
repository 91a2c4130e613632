"""Contexts and the threads that run them.

A context is one run of the user's step function on a microbatch, or one served request. It may wait
for another rank in the middle of a Python call, so each context that waits has a thread. Exactly
one thread of a rank runs at any time: the one that was handed the baton. So contexts need no locks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .threadstate import Flags

Key = tuple[Any, ...]


class Runner:
    """A thread that contexts run on.

    Attributes:
        task: A context that the thread shall start when it is woken.
        closed: The thread shall end when it is woken.
    """

    __slots__ = ("_lock", "closed", "ident", "main", "task")

    def __init__(self, *, main: bool = False) -> None:
        self.main, self.ident = main, threading.get_ident()
        self.task: Context | None = None
        self.closed = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Hand the baton to this thread."""
        self._lock.release()

    def sleep(self) -> None:
        """Wait for the baton; called by the thread itself."""
        self._lock.acquire()


class Context:
    """One run of a step function, or one served request.

    Attributes:
        key: What it is: ("S", microbatch), ("F", call, segment) or ("B", call,
            segment). Equal on tensor peers.
        microbatch: Its microbatch.
        body: What it runs.
        flags: Modes of torch that hold in it.
        inline: It cannot wait for another rank, so it may run on the thread of a waiting context.
        runner: The thread it runs on; None before its start.
        is_blocked: Another context runs on its thread, above it, so it cannot go on.
        calls: Number of model calls so far.
        produced: Results of remote calls of this context, by identity: the
            tensor, the rank, its hop, the position.
        in_model: It runs the root module.
        tail: The tensors of the tail call of the present model call.
        place: Its place in the step, for its random numbers.
    """

    __slots__ = (
        "body",
        "calls",
        "flags",
        "in_model",
        "inline",
        "is_blocked",
        "key",
        "microbatch",
        "place",
        "produced",
        "runner",
        "tail",
    )

    def __init__(
        self,
        key: Key,
        microbatch: int,
        body: Callable[[], None],
        flags: Flags,
        *,
        inline: bool,
        place: int,
    ) -> None:
        self.key, self.microbatch, self.body, self.flags, self.inline = (
            key,
            microbatch,
            body,
            flags,
            inline,
        )
        self.place = place
        self.runner: Runner | None = None
        self.is_blocked = self.in_model = False
        self.calls = 0
        self.produced: dict[int, tuple[Any, int, Any, int]] = {}
        self.tail: list[Any] | None = None


class Worker(threading.Thread):
    """A pooled thread for contexts."""

    def __init__(self, run_contexts: Callable[[Runner], None]) -> None:
        super().__init__(name="smp-context", daemon=True)
        self._run_contexts = run_contexts
        self.runner = Runner()
        self.start()

    def run(self) -> None:
        """Wait for the first context, and run contexts until the end."""
        self.runner.ident = threading.get_ident()
        # The question gives this thread what torch.set_num_threads said. Without it the first
        # parallel loop would, and a product of matrices is none: it would use as many threads as
        # OMP_NUM_THREADS says, or as there are cores.
        torch.get_num_threads()
        self.runner.sleep()
        if not self.runner.closed:
            self._run_contexts(self.runner)
