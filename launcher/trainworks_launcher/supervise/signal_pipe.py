"""The signals of this process, as a descriptor that the event loop can wait for."""

from __future__ import annotations

import contextlib
import os
import signal

from trainworks_launcher.contract.stop_signals import handled

_READ_BYTES = 4096


class SignalPipe:
    """Signals that come from the opening to ``close``.

    Attributes:
        descriptor: Readable when a signal has come.
    """

    def __init__(self) -> None:
        """Take the signals over from earlier handlers, which ``close`` restores."""
        self.descriptor, self._sender = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._sender, False)
        # First of all: a signal between the two, of which only the handler here hears, would be
        # lost. The handlers do nothing: the descriptor carries the signal into the loop.
        self._earlier_descriptor = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        self._earlier_handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (*handled(), signal.SIGCHLD)
        }

    def read(self) -> bytes:
        """Return the signals that have come since the last call, a number each."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.descriptor, _READ_BYTES)
        return b""

    def close(self) -> bytes:
        """Restore the earlier handlers. Returns the signals that nothing has read."""
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)
        unread = self.read()
        signal.set_wakeup_fd(self._earlier_descriptor)
        os.close(self.descriptor)
        os.close(self._sender)
        return unread
