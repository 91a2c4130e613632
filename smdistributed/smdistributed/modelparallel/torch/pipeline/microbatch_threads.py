"""Contexts and the threads that run them.

A context is one run of the user's step function on a microbatch, or one served request. A context
may wait for another rank in the middle of a Python call, so each waiting context has a thread.
Exactly one thread of a rank runs at any time, and wakes its successor before it sleeps. So contexts
need no locks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .threadstate import Flags

Key = tuple[Any, ...]
"""The key of a context, or of an answer that a context waits for."""


class Produced(NamedTuple):
    """A tensor that a remote call returned.

    Attributes:
        tensor: A weak reference to the tensor.
        rank: The rank that computed it.
        hop: The served part of the call.
        position: Number of the tensor in the result.
    """

    tensor: weakref.ref[torch.Tensor]
    rank: int
    hop: Any
    position: int


class Runner:
    """A thread that contexts run on.

    Attributes:
        main: Whether it is the thread that called the step.
        ident: Its number, as `threading.get_ident` returns it.
        task: A context that the thread starts when it is woken, or None.
        closed: Whether the thread ends when it is woken.
    """

    __slots__ = ("_lock", "closed", "ident", "main", "task")

    def __init__(self, *, main: bool = False) -> None:
        self.main, self.ident = main, threading.get_ident()
        self.task: Context | None = None
        self.closed = False
        # The lock is held while the thread sleeps or runs; `wake` releases it.
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Let this thread run. The caller must sleep next, because one thread runs at a time."""
        self._lock.release()

    def sleep(self) -> None:
        """Wait until another thread calls `wake`. Only the thread itself calls this."""
        self._lock.acquire()


class Context:
    """One run of a step function, or one served request.

    Attributes:
        key: ("S", microbatch) for the step function, ("F", call, segment) for a forward, ("B",
            call, segment) for a backward. Equal on tensor-parallel peers.
        microbatch: Number of the microbatch.
        body: The function that the context runs.
        flags: Modes of torch that the body runs with.
        inline: Whether the body cannot wait for another rank, and so may run on the thread of a
            waiting context.
        runner: The thread that the context runs on; None before its start.
        is_blocked: Whether another context runs above this one on the stack of its thread.
        calls: Number of model calls so far.
        produced: Results of remote calls of this context, by `id()` of the tensor.
        in_model: Whether the root module runs.
        tail: The tensors of the tail call of the present model call.
        place: Number that stands for the context's place in the step, for its random numbers.
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
        inline: bool = False,
    ) -> None:
        self.key, self.microbatch = key, microbatch
        self.body, self.flags = body, flags
        self.inline = inline
        self.place = 0
        self.runner: Runner | None = None
        self.is_blocked = self.in_model = False
        self.calls = 0
        self.produced: dict[int, Produced] = {}
        self.tail: list[Any] | None = None


class Worker(threading.Thread):
    """A pooled thread for contexts."""

    def __init__(self, run_contexts: Callable[[Runner], None]) -> None:
        super().__init__(name="smp-context", daemon=True)
        self._run_contexts = run_contexts
        self.runner = Runner()
        self.start()

    def run(self) -> None:
        """Wait for the first context, and run contexts until the pool is closed."""
        self.runner.ident = threading.get_ident()
        # This call makes torch.set_num_threads hold in this thread. Otherwise only the first
        # parallel loop would do that. A product of matrices is no such loop: it would use as many
        # threads as OMP_NUM_THREADS has, or one for each core.
        torch.get_num_threads()
        self.runner.sleep()
        if not self.runner.closed:
            self._run_contexts(self.runner)
