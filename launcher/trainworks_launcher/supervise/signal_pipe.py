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
        """Replace the handlers of stop signals, forwarded signals and SIGCHLD until ``close``.

        Call this in the main thread: Python sets handlers only there. Raises OSError if no pipe can
        be made.
        """
        self.descriptor, self._sender = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._sender, False)
        # The descriptor before the handlers: a signal that comes to a new handler without a
        # descriptor would be lost. The handlers do nothing: the descriptor carries the signal into
        # the loop. A full pipe loses a signal, but only if thousands have not been read.
        self._earlier_descriptor = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        self._earlier_handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (*handled(), signal.SIGCHLD)
        }

    def read(self) -> bytes:
        """Return the signals that have come since the last call: a byte for each, its number."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.descriptor, _READ_BYTES)
        return b""

    def close(self) -> bytes:
        """Restore the earlier handlers, and return the signals that were not read, as ``read``.

        The descriptor is closed; the loop must not watch it any more.
        """
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)
        unread = self.read()
        signal.set_wakeup_fd(self._earlier_descriptor)
        os.close(self.descriptor)
        os.close(self._sender)
        return unread
