"""List the launcher's reaction to each signal, and handle signals before a job is planned.

| signal | reaction |
|---|---|
| TERM, INT | stop the job: the ranks get the same signal |
| HUP, QUIT | stop the job: the ranks get TERM, the signal at which scripts save |
| HUP, ignored when the launcher starts (nohup) | stays ignored |
| USR1, USR2, ALRM, VTALRM, PROF, IO, PWR | are passed on to the ranks; no stop |
| STKFLT, XCPU, RTMIN to RTMAX | are passed on to the ranks; no stop |
| CONT, WINCH, URG | nothing |
| TSTP, TTIN, TTOU, STOP | stop the launcher alone: a scheduler suspends each process |
| CHLD, PIPE, XFSZ | belong to the launcher; they come of its own children and files |
| ABRT, BUS, FPE, ILL, SEGV, SYS, TRAP | are faults of the launcher, which they end |
| KILL | ends the launcher; its guard ends the job |

For process 1 of a container the kernel drops a signal without a handler (pid_namespaces(7)), so
handlers are the first thing that ``train`` sets. Until ``hold`` a stop signal ends the reading of
the job at once, even during a wait for a program or for the resolution of a name. After ``hold``
the signal is only noted, for the supervisor. A signal that is passed on is always only noted.
"""

from __future__ import annotations

import signal
from types import TracebackType
from typing import Any, Mapping

STOP_SIGNALS: Mapping[int, signal.Signals] = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGQUIT: signal.SIGTERM,
}
"""Signal by which a platform, or a person, stops a job -> the signal for the ranks."""

_NAMED = ("USR1", "USR2", "ALRM", "VTALRM", "PROF", "IO", "PWR", "STKFLT", "XCPU")


def _signals_for_ranks() -> frozenset[int]:
    """Return the numbers of _NAMED and of all real-time signals, as far as this system has them."""
    numbers = set(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
    for name in _NAMED:
        number = getattr(signal, f"SIG{name}", None)
        # Python knows STKFLT only since 3.11.
        if number is not None:
            numbers.add(int(number))
    return frozenset(numbers)


PASSED_ON = _signals_for_ranks()
"""Signals for ranks, such as USR1. A script may handle them; without a handler the rank ends."""


def handled() -> tuple[int, ...]:
    """Return the signals that the launcher handles, without an ignored HUP (nohup(1))."""
    numbers = list(map(int, (*STOP_SIGNALS, *PASSED_ON)))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    return tuple(numbers)


def name_of(number: int) -> str:
    """Return the name of a signal, for example ``SIGTERM``, or ``signal 40`` of a real-time one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class StoppedError(BaseException):
    """A stop signal came while the job was read. No ``except Exception`` may catch this."""

    def __init__(self, number: int) -> None:
        """Hold the number of the signal."""
        super().__init__(number)
        self.number = number


class EarlyStops:
    """Signal handlers of a ``with`` block, after which the earlier ones are restored.

    Attributes:
        numbers: Signals that came, in order.
    """

    def __init__(self) -> None:
        """Set nothing yet."""
        self.numbers: list[int] = []
        self._held = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> EarlyStops:
        """Set the handlers. From now on a stop signal raises StoppedError in the main thread."""
        for number in handled():
            self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """Only note signals from now on."""
        self._held = True

    def _came(self, number: int, frame: object) -> None:
        """Note a signal, as its handler. Raise StoppedError for a stop signal before ``hold``."""
        del frame
        self.numbers.append(number)
        if not self._held and number in STOP_SIGNALS:
            raise StoppedError(number)
