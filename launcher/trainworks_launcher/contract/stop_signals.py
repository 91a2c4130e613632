"""Stop signals that come before the supervisor runs: while the job is read and planned, and programs are asked.

For process 1 of a container the kernel drops a signal that has no handler (pid_namespaces(7)), so handlers are the
first thing that ``train`` sets. Until ``hold`` a stop signal ends the reading at once, also where it waits for a
program or for the resolution of a name. After ``hold`` it is only noted, and the supervisor takes it up.
"""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals by which a platform, or a person, stops a job."""


class StoppedError(BaseException):
    """A stop signal came while the job was read. No ``except Exception`` may swallow it."""

    def __init__(self, number: int) -> None:
        """Keep the number of the signal."""
        super().__init__(number)
        self.number = number


class EarlyStops:
    """Handlers of the stop signals, from entering to leaving; leaving restores those that were there before.

    Attributes:
        numbers: Stop signals that came, in order.
    """

    def __init__(self) -> None:
        """Set nothing yet."""
        self.numbers: list[int] = []
        self._held = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> EarlyStops:
        """Set the handlers."""
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore what was there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """From now on only note what comes."""
        self._held = True

    def _came(self, number: int, frame: object) -> None:
        del frame
        self.numbers.append(number)
        if not self._held:
            raise StoppedError(number)
