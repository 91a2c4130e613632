"""Runs programs of checks in parallel, before the tests that read the results.

A check is mostly one program that imports PyTorch and uses one processor. Parallel programs have a
container each, so that no program sees the files, ports and processes of another, and a time-out,
which restarts a container, ends one program only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Final, Self, TypeVar

from trainworks.engine.protocol import Container, Engine, Isolation
from trainworks.engine.subprocesses import Interruption, wait_for

MOST_LANES: Final = 4
"""The most parallel programs: one that compiles a model with PyTorch takes 2 GB of memory."""

_Result = TypeVar("_Result")


class Lanes:
    """Threads that run programs in containers of an image.

    They start with the first programs and end with the ``with`` block.
    """

    def __init__(self, engine: Engine, reference: str, *, isolated: Isolation = "") -> None:
        """Start nothing yet; ``isolated`` as of ``Engine.container``."""
        self._isolated = isolated
        self._engine = engine
        self._reference = reference
        self._pool = ThreadPoolExecutor(min(MOST_LANES, os.cpu_count() or 1))
        self._futures: list[Future[object]] = []
        self._interruption = Interruption()
        self._containers = ExitStack()
        self._idle: SimpleQueue[Container] = SimpleQueue()

    def start(self, task: Callable[[Container], _Result]) -> Callable[[], _Result]:
        """Run a task as soon as a thread is free, in the order of the calls.

        Args:
            task: Called once, in another thread, with a running container that earlier
                tasks have used.

        Returns:
            A function that waits for the task and returns its result. The function raises the
            error of the task, or of the container's start.
        """

        def run() -> _Result:
            with self._interruption.reaches_this_thread():
                try:
                    container = self._idle.get_nowait()
                except Empty:
                    started = self._engine.container(self._reference, isolated=self._isolated)
                    container = self._containers.enter_context(started)
                try:
                    return task(container)
                finally:
                    self._idle.put(container)

        def wait() -> _Result:
            # Not Future.result: Ctrl-C must end the wait.
            finished = threading.Event()
            future.add_done_callback(lambda _: finished.set())
            wait_for(finished.wait)
            return future.result()

        future = self._pool.submit(run)
        self._futures.append(future)  # type: ignore[arg-type]
        return wait

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel tasks, and end all containers.

        Raises the error of a container's end, unless another error is under way.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not all(future.done() for future in self._futures):
            self._interruption.request()
        self._pool.shutdown()
        try:
            self._containers.close()
        except Exception:
            if error is None:
                raise
