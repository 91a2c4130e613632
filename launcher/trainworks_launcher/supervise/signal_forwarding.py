"""Forward signals that mean something to the script and not to the launcher, such as SIGUSR1 of a
scheduler before the time limit.

Each host gets its signal from the scheduler, and forwards it to its own ranks. A process without a
handler would die of the signal. So a rank that does not exist yet, or still imports, gets it when
it has a handler. A rank that never has a handler never gets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainworks_launcher.contract.stop_signals import name_of
from trainworks_launcher.supervise.phase import Phase
from trainworks_launcher.supervise.processes import processes

if TYPE_CHECKING:
    from trainworks_launcher.supervise.attempt import Attempt

_LOOK_SECONDS = 0.5
"""Seconds between two looks for ranks that have a handler now."""


class SignalForwarding:
    """The signals of one host that some of its ranks have not got yet.

    Every method runs in the loop's thread.
    """

    def __init__(self, attempt: Attempt) -> None:
        """Begin without a signal."""
        self._attempt = attempt
        # On hosts without a launcher mpirun forwards signals to the ranks itself.
        self._is_forwarded_by_mpirun = attempt.plan.shell is not None
        # Signal -> process ids of the ranks, or of the command, that have got it.
        self._receivers: dict[int, set[int]] = {}

    def forward(self, number: int) -> None:
        """Forward a signal to the ranks, now or when they have a handler.

        Does nothing after the job's outcome. A signal that is still being forwarded counts once, as
        a pending signal does in any process (signal(7)).

        Args:
            number: The signal.
        """
        if number in self._receivers or self._attempt.phase >= Phase.ENDING:
            return
        self._receivers[number] = set()
        self._send_where_handled(number)
        if number in self._receivers:
            self._attempt.log(
                f"{name_of(number)}: kept until each rank of this host has a handler for it"
            )

    def _send_where_handled(self, number: int) -> None:
        """Send a signal to the ranks that have a handler and have not got it yet.

        Looks again after ``_LOOK_SECONDS``, until every rank has got it.
        """
        receivers, ranks = self._receivers[number], self._rank_pids()
        sent: list[int] = []
        for rank in ranks:
            if rank in receivers:
                continue
            # The handler may be in a process below the rank.
            for pid in processes.signal_receivers(rank, number):
                processes.send(pid, number)
                receivers.add(rank)
                sent.append(pid)
        if sent:
            self._attempt.log(
                f"{name_of(number)}: passed on to process {', '.join(map(str, sent))}"
            )
        # Without a number in ``_receivers`` the signal may come again.
        if ranks and receivers.issuperset(ranks):
            del self._receivers[number]
        else:
            self._attempt.loop.after(_LOOK_SECONDS, lambda: self._send_where_handled(number))

    def _rank_pids(self) -> tuple[int, ...]:
        """Return the process ids of the ranks; () before the program starts and after its end.

        That is the id of the command if the ranks do not report, or if mpirun forwards signals
        itself.
        """
        if self._attempt.phase is not Phase.RUNNING:
            return ()
        running = self._attempt.running
        if running.ranks is not None and not self._is_forwarded_by_mpirun:
            return running.ranks.running()
        if not running.is_active:
            return ()
        return (running.pid,)
