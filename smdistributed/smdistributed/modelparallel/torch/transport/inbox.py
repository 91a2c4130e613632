"""The inbox of a rank, and the choice of the thread that reads messages.

A sleeping thread needs up to 0.1 ms to wake up, longer than a small message needs to arrive. So the
thread that waits for messages reads them itself, and polls for a moment before it sleeps. While
this thread computes, another thread reads, so that a peer with a large tensor need not wait.
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
"""Seconds that a thread polls for a message before it sleeps.

To wake up a sleeping thread takes up to half of that.
"""


class Source(Protocol[T_co]):
    """A connection that messages come from."""

    def fileno(self) -> int:
        """Return its file descriptor."""

    def read(self) -> tuple[T_co | None, bool]:
        """Read one message, and wait for its end.

        Returns:
            The message, or None if this rank has closed the connection; whether more may come.
        """

    def buffered(self) -> bool:
        """Return whether a part of the next message has been read already."""


class Inbox(Generic[T]):
    """Messages of all peers, in the order in which they arrived.

    One thread at a time may wait for them.

    Args:
        may_read: Returns whether the present thread may read while it waits. None: each source has
            a reader thread. This is also so on other systems than Linux.
    """

    def __init__(self, may_read: Callable[[], bool] | None) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._sources: dict[int, Source[T]] = {}
        self._threads: list[threading.Thread] = []
        self._may_read = may_read if sys.platform == "linux" else None
        self._changed = threading.Condition()
        if self._may_read is not None:
            # The reader thread sleeps on `_bell`. An arrival wakes it once, if the bell is on, and
            # so does each write to `_nudge`.
            self._arrivals, self._bell = select.epoll(), select.epoll()
            self._nudge = os.eventfd(0)
            self._bell.register(self._arrivals, 0)
            self._bell.register(self._nudge, select.EPOLLIN | select.EPOLLET)
            # Not at the end of the process: a link may be closed later than that.
            weakref.finalize(self, os.close, self._nudge).atexit = False
            self._waiting = False
            # Sources with a part of the next message in their buffer: epoll does not report it.
            self._begun: set[int] = set()

    def add(self, source: Source[T], name: str) -> None:
        """Begin to read from a source, in the thread that waits or in a reader thread.

        The thread is a daemon. With `may_read` all sources share one reader thread, which starts
        with the first source.

        Args:
            source: The connection.
            name: Name of the source's thread, if it gets one.

        Raises:
            OSError: The descriptor cannot be watched.
        """
        self._sources[source.fileno()] = source
        if self._may_read is None:
            thread = threading.Thread(target=self._read_one, args=(source,), name=name, daemon=True)
            self._start(thread)
            return
        self._arrivals.register(source.fileno(), select.EPOLLIN)
        if not self._threads:
            self._start(threading.Thread(target=self._read_all, name="smp-reader", daemon=True))
            self._arm_bell()

    def put(self, item: T) -> None:
        """Add a message. Only the thread that waits for messages may call this."""
        self._items.put(item)

    def empty(self) -> bool:
        """Return whether `get` would wait."""
        return self._items.empty()

    def get(self, timeout: float | None = None) -> T:
        """Wait for the next message, remove it from the inbox, and return it.

        While it waits, this thread may read all sources itself; otherwise the reader threads do.

        Args:
            timeout: Seconds; None waits for ever.

        Raises:
            queue.Empty: No message came in this time.
            BaseException: An interrupt, such as KeyboardInterrupt.
        """
        # Hot: a remote call waits here. Polling by this thread saves the wake-up of a reader.
        if self._items.empty() and (self._may_read is None or not self._may_read()):
            return self._items.get(timeout=timeout)
        if self._items.empty():
            end = None if timeout is None else time.monotonic() + timeout
            try:
                # From now on this thread reads: the bell is off, so no arrival wakes the reader.
                self._waiting = True
                self._bell.modify(self._arrivals, 0)
                with self._changed:
                    while self._items.empty():
                        self._take(self._ready(end))
            finally:
                self._waiting = False
                self._arm_bell()
                # The rest of such a message is in this process already: no arrival rings for it.
                if self._begun:
                    os.eventfd_write(self._nudge, 1)
        return self._items.get_nowait()

    def wait_for_end(self, sources: Collection[int], seconds: float) -> None:
        """Wait until sources that were shut down have been read to their end.

        Returns without an error after the longest wait, too.

        A reader thread that sleeps is woken with that.

        Args:
            sources: File descriptors of the sources.
            seconds: The longest wait.
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
        """Start a reader thread."""
        self._threads.append(thread)
        thread.start()

    def _arm_bell(self) -> None:
        """Let the next arrival wake the reader thread."""
        self._bell.modify(self._arrivals, select.EPOLLIN | select.EPOLLONESHOT)

    def _ready(self, end: float | None) -> Collection[int]:
        """Wait for messages, and return the file descriptors of their sources.

        Polls for `SPIN_SECONDS`, and sleeps after that.

        Nothing is read.

        Args:
            end: Time at which the wait ends, as of `time.monotonic`; None: never.

        Raises:
            queue.Empty: No message came until then.
            OSError: The descriptors cannot be polled.
        """
        if self._begun:
            return tuple(self._begun)
        end_of_spin = time.monotonic() + SPIN_SECONDS
        ready = self._arrivals.poll(0)
        while not ready:
            os.sched_yield()
            if time.monotonic() > end_of_spin:
                timeout = None if end is None else max(end - time.monotonic(), 0)
                ready = self._arrivals.poll(timeout)
                break
            ready = self._arrivals.poll(0)
        if not ready and end is not None and time.monotonic() >= end:
            raise queue.Empty
        return [number for number, _ in ready]

    def _take(self, ready: Collection[int]) -> None:
        """Read one message of each source, and add it to the inbox.

        A source without more messages is forgotten, also after an error of its `read`.

        Args:
            ready: File descriptors of sources with a message.

        Raises:
            BaseException: An error of a source's `read`: an interrupt.
        """
        for number in ready:
            source = self._sources[number]
            has_more = False
            try:
                item, has_more = source.read()
                if item is not None:
                    self._items.put(item)
            finally:
                if has_more and source.buffered():
                    self._begun.add(number)
                else:
                    self._begun.discard(number)
                if not has_more:
                    self._arrivals.unregister(number)
                    self._forget(number)

    def _forget(self, number: int) -> None:
        """Remove a source that has ended, and wake `wait_for_end`.

        Args:
            number: File descriptor of the source.
        """
        with self._changed:
            del self._sources[number]
            self._changed.notify_all()

    def _read_all(self) -> None:
        """Read when no other thread waits for messages. The body of the reader thread.

        It ends with the last source.

        Messages go into the inbox.
        """
        while self._sources:
            self._bell.poll()
            with self._changed:
                while not self._waiting:
                    ready = set(self._begun)
                    ready.update(number for number, _ in self._arrivals.poll(0))
                    if not ready:
                        self._arm_bell()
                        break
                    self._take(ready)

    def _read_one(self, source: Source[T]) -> None:
        """Read a source to its end. The body of the source's own thread.

        Messages go into the inbox, and the source is forgotten at its end.
        """
        number, has_more = source.fileno(), True
        while has_more:
            item, has_more = source.read()
            if item is not None:
                self._items.put(item)
        self._forget(number)
