"""Signals that mean something to the script and not to the launcher: SIGUSR1 of
a scheduler before the time limit.

Each host gets its own from the scheduler, and hands it to its own ranks. A process without a
handler would die of it: a rank that is not there yet, or still imports, gets the signal when it has
one. One that never has a handler never gets it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainworks_launcher.contract.stop_signals import name_of
from trainworks_launcher.supervise.phase import Phase
from trainworks_launcher.supervise.processes import processes

if TYPE_CHECKING:
    from trainworks_launcher.supervise.attempt import Attempt

_LOOK_SECONDS = 0.5


class PassingOn:
    """The signals of one host that its ranks have still to get.

    Every method runs in the loop's thread.
    """

    def __init__(self, attempt: Attempt) -> None:
        """None has come yet."""
        self._attempt = attempt
        self._by_mpirun = attempt.plan.shell is not None  # the other hosts have no launcher
        self._given: dict[int, set[int]] = {}  # signal -> ranks, or commands, that have it

    def came(self, number: int) -> None:
        """A signal to this container.

        One that is still kept is the same one, as for any process (signal(7)).
        """
        if number not in self._given and self._attempt.phase < Phase.ENDING:
            self._given[number] = set()
            self._hand_on(number)
            if number in self._given:
                self._attempt.log(
                    f"{name_of(number)}: kept until each rank of this host has a handler for it"
                )

    def _hand_on(self, number: int) -> None:
        """Hand a signal to the ranks that can take it now, and look again while
        some have not got it.
        """
        given, ranks = self._given[number], self._ranks()
        sent: list[int] = []
        for rank in ranks:
            takers = processes.signal_receivers(rank, number) if rank not in given else []
            for pid in takers:
                processes.send(pid, number)
                given.add(rank)
            sent += takers
        if sent:
            self._attempt.log(
                f"{name_of(number)}: passed on to process {', '.join(map(str, sent))}"
            )
        if ranks and given.issuperset(ranks):
            del self._given[number]
        else:
            self._attempt.loop.after(_LOOK_SECONDS, lambda: self._hand_on(number))

    def _ranks(self) -> tuple[int, ...]:
        """Process ids of the ranks.

        Of the command where they do not report, or where mpirun has them on hosts without a
        launcher: it passes signals on itself.
        """
        if self._attempt.phase is not Phase.RUNNING:
            return ()
        running = self._attempt.running
        if running.ranks is not None and not self._by_mpirun:
            return running.ranks.running()
        command = running.command
        return (command.pid,) if command is not None and command.running else ()
