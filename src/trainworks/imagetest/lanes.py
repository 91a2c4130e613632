"""Asks an image several questions at once, ahead of the tests that want the answers.

A check is mostly one program that imports PyTorch and uses one processor. Each lane has a container of its own, so that
no program sees the files, ports and processes of another, and a time-out, which restarts a container, ends one only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Self, TypeVar

from trainworks.engine.processes import Interruption, wait_for
from trainworks.engine.protocol import Container, Engine

MOST_LANES: Final = 4
"""How many questions are asked at once, at most: a program that compiles a model with PyTorch takes 2 GB of memory."""

_Answer = TypeVar("_Answer")


class Lanes:
    """Threads that ask an image; they start with the first questions and end with the ``with`` block."""

    def __init__(self, engine: Engine, reference: str) -> None:
        """Start nothing yet."""
        self._engine = engine
        self._reference = reference
        self._most = min(MOST_LANES, os.cpu_count() or 1)
        self._work: SimpleQueue[Callable[[Container | Exception], None] | None] = SimpleQueue()
        self._asked: list[Future[object]] = []
        self._threads: list[threading.Thread] = []
        self._interruption = Interruption()
        self._unended: list[Exception] = []

    def ask(self, question: Callable[[Container], _Answer]) -> Callable[[], _Answer]:
        """Ask as soon as a lane is free, in the order of the calls.

        Args:
            question: Called once, in another thread, with a running container that earlier questions have used.

        Returns:
            What waits for the answer and returns it, or raises what the question raised, or why there is no container.
        """
        future: Future[_Answer] = Future()

        def answer(container: Container | Exception) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if isinstance(container, Exception):
                future.set_exception(container)
                return
            try:
                future.set_result(question(container))
            except BaseException as error:  # noqa: BLE001 (raised again where the answer is wanted)
                future.set_exception(error)

        def waited() -> _Answer:
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            wait_for(done.wait)
            return future.result()

        self._asked.append(future)  # type: ignore[arg-type]
        self._work.put(answer)
        if len(self._threads) < self._most:
            # Not a daemon: its container is removed also when Python ends.
            self._threads.append(threading.Thread(target=self._serve))
            self._threads[-1].start()
        return waited

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what nobody waits for any more, and all containers; raises what kept one from ending."""
        for future in self._asked:
            future.cancel()
        if not all(future.done() for future in self._asked):
            self._interruption.request()
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        if self._unended and error is None:
            raise self._unended[0]

    def _serve(self) -> None:
        """Answer one question after another in one container."""
        started = False
        try:
            with self._interruption.reaches_this_thread(), self._engine.container(self._reference) as container:
                started = True
                while (answer := self._work.get()) is not None:
                    answer(container)
        except KeyboardInterrupt:
            # It was requested; whoever requested it knows.
            return
        except Exception as trouble:  # noqa: BLE001 (raised again in the thread that asked)
            if started:
                self._unended.append(trouble)
                return
            while (answer := self._work.get()) is not None:
                answer(trouble)
