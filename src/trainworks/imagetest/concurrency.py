"""Asks an image several questions at once, ahead of the tests that want the answers.

A check is mostly one program that imports PyTorch and uses one processor. Questions that are asked
at once have a container each, so that no program sees the files, ports and processes of another,
and a time-out, which restarts a container, ends one only.
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
"""How many questions are asked at once, at most: a program that compiles a
model with PyTorch takes 2 GB of memory.
"""

_Answer = TypeVar("_Answer")


class Lanes:
    """Threads that ask an image.

    They start with the first questions and end with the ``with`` block.
    """

    def __init__(self, engine: Engine, reference: str, *, isolated: Isolation = "") -> None:
        """Start nothing yet; ``isolated`` as of ``Engine.container``."""
        self._isolated = isolated
        self._engine = engine
        self._reference = reference
        self._pool = ThreadPoolExecutor(min(MOST_LANES, os.cpu_count() or 1))
        self._asked: list[Future[object]] = []
        self._interruption = Interruption()
        self._containers = ExitStack()
        self._idle: SimpleQueue[Container] = SimpleQueue()

    def ask(self, question: Callable[[Container], _Answer]) -> Callable[[], _Answer]:
        """Ask as soon as a lane is free, in the order of the calls.

        Args:
            question: Called once, in another thread, with a running container that earlier
                questions have used.

        Returns:
            What waits for the answer and returns it, or raises what the question raised, or why
            there is no container.
        """

        def answer() -> _Answer:
            with self._interruption.reaches_this_thread():
                try:
                    container = self._idle.get_nowait()
                except Empty:
                    made = self._engine.container(self._reference, isolated=self._isolated)
                    container = self._containers.enter_context(made)
                try:
                    return question(container)
                finally:
                    self._idle.put(container)

        def waited() -> _Answer:
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            wait_for(done.wait)
            return future.result()

        future = self._pool.submit(answer)
        self._asked.append(future)  # type: ignore[arg-type]
        return waited

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End what nobody waits for any more, and all containers.

        Raises what kept one from ending.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not all(future.done() for future in self._asked):
            self._interruption.request()
        self._pool.shutdown()
        try:
            self._containers.close()
        except Exception:
            if error is None:
                raise
