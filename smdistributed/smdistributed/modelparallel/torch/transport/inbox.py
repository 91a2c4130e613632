"""What arrives from other ranks, and which thread reads it.

A thread that must wake up before it can go on takes up to 0.1 ms, longer than a small message needs
to be sent. So the thread that waits for messages reads them itself, and looks for them for a moment
before it sleeps. While it computes, another thread reads: a peer that sends a large tensor need not
wait.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

SPIN_SECONDS = 0.0002
"""How long a thread looks for a message before it sleeps.

A sleeping thread needs a good part of that to wake up.
"""


class Source(Protocol[T_co]):
    """A connection that messages come from."""

    def fileno(self) -> int:
        """Return its file descriptor."""

    def read(self) -> tuple[T_co | None, bool]:
        """Read one message, and wait for its end.

        Returns:
            The message, or None if there is nothing to tell; whether more may come.
        """

    def buffered(self) -> bool:
        """Return whether a part of another message has been read already."""


class Inbox(Generic[T]):
    """Messages of all peers, in the order in which they arrived.

    One thread at a time may wait for them.

    Args:
        may_read: Whether the present thread, if it waits, may read. None: no thread may, and each
            source has a thread. So it is on other systems than Linux, too.
    """

    def __init__(self, may_read: Callable[[], bool] | None) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._sources: dict[int, Source[T]] = {}
        self._threads: list[threading.Thread] = []
        self._may_read = may_read if sys.platform == "linux" else None
        self._changed = threading.Condition()
        if self._may_read is not None:
            # The reading thread sleeps on the bell. It rings once for an
            # arrival, if it is on, and for each nudge.
            self._arrivals, self._bell, self._nudge = select.epoll(), select.epoll(), os.eventfd(0)
            self._bell.register(self._arrivals, 0)
            self._bell.register(self._nudge, select.EPOLLIN | select.EPOLLET)
            weakref.finalize(
                self, os.close, self._nudge
            ).atexit = False  # a link may be closed later than that
            self._waiting = False
            self._begun: set[int] = set()

    def add(self, source: Source[T], name: str) -> None:
        """Read from a source from now on.

        Args:
            source: The connection.
            name: Of the source's thread, if it gets one.
        """
        self._sources[source.fileno()] = source
        if self._may_read is None:
            self._start(
                threading.Thread(target=self._read_one, args=(source,), name=name, daemon=True)
            )
            return
        self._arrivals.register(source.fileno(), select.EPOLLIN)
        if not self._threads:
            self._start(threading.Thread(target=self._read_all, name="smp-reader", daemon=True))
            self._ring()

    def put(self, item: T) -> None:
        """Add a message. Only the thread that waits may do this."""
        self._items.put(item)

    def empty(self) -> bool:
        """Return whether `get` would wait."""
        return self._items.empty()

    def get(self, timeout: float | None = None) -> T:
        """Return the next message, and wait for it.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            queue.Empty: None has come.
        """
        if self._items.empty() and (self._may_read is None or not self._may_read()):
            return self._items.get(timeout=timeout)
        if self._items.empty():
            end = None if timeout is None else time.monotonic() + timeout
            try:
                self._waiting = True
                self._bell.modify(self._arrivals, 0)
                with self._changed:
                    while self._items.empty():
                        self._take(self._ready(end))
            finally:
                self._waiting = False
                self._ring()
                if self._begun:
                    os.eventfd_write(self._nudge, 1)
        return self._items.get_nowait()

    def wait_for_end(self, sources: Collection[int], seconds: float) -> None:
        """Wait until sources, by file descriptor, have nothing more to tell.

        They have been shut down.
        """
        end = time.monotonic() + seconds
        if self._changed.acquire(timeout=seconds):
            try:
                self._changed.wait_for(
                    lambda: self._sources.keys().isdisjoint(sources), max(end - time.monotonic(), 0)
                )
            finally:
                self._changed.release()
                if self._may_read is not None:
                    os.eventfd_write(self._nudge, 1)

    def _start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()

    def _ring(self) -> None:
        self._bell.modify(self._arrivals, select.EPOLLIN | select.EPOLLONESHOT)

    def _ready(self, end: float | None) -> Collection[int]:
        """Return the sources that have something; at least one."""
        if self._begun:
            return tuple(self._begun)
        spin = time.monotonic() + SPIN_SECONDS
        while not (ready := self._arrivals.poll(0)):
            os.sched_yield()
            if time.monotonic() > spin:
                ready = self._arrivals.poll(None if end is None else max(end - time.monotonic(), 0))
                break
        if not ready and end is not None and time.monotonic() >= end:
            raise queue.Empty
        return [number for number, _ in ready]

    def _take(self, ready: Collection[int]) -> None:
        """Read one message of each source."""
        for number in ready:
            source = self._sources[number]
            more = False
            try:
                item, more = source.read()
                if item is not None:
                    self._items.put(item)
            finally:
                if more and source.buffered():
                    self._begun.add(number)
                else:
                    self._begun.discard(number)
                if not more:
                    self._arrivals.unregister(number)
                    self._forget(number)

    def _forget(self, number: int) -> None:
        with self._changed:
            del self._sources[number]
            self._changed.notify_all()

    def _read_all(self) -> None:
        """Read while no other thread does."""
        while self._sources:
            self._bell.poll()
            with self._changed:
                while not self._waiting:
                    ready = {*self._begun, *(number for number, _ in self._arrivals.poll(0))}
                    if not ready:
                        self._ring()
                        break
                    self._take(ready)

    def _read_one(self, source: Source[T]) -> None:
        number, more = source.fileno(), True
        while more:
            item, more = source.read()
            if item is not None:
                self._items.put(item)
        self._forget(number)
