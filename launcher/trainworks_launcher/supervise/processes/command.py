"""What runs on this host: one command at a time, and the ranks that it started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainworks_launcher.supervise.processes import processes
from trainworks_launcher.supervise.processes.output import Tail

if TYPE_CHECKING:
    from trainworks_launcher.supervise.processes.processes import Child
    from trainworks_launcher.supervise.processes.ranks import Ranks


class Running:
    """The processes that a stop signal is for.

    Attributes:
        command: The step of the preparation or the job's command that was
            started last; None before.
        ranks: The ranks that report here; None where there are none.
        restarts: How often torchrun has started the ranks of this host again.
        is_copy: Whether the command waits in its mpirun for the leader's copy of the program.
    """

    def __init__(self, ranks_by: str) -> None:
        """Nothing runs yet. ranks_by: who starts the ranks of this job; ``""``: nobody."""
        self.command: Child | None = None
        self.ranks: Ranks | None = None
        self.restarts = 0
        self.is_copy = False
        self._ranks_by = ranks_by

    @property
    def is_active(self) -> bool:
        """Whether the command runs."""
        return self.command is not None and self.command.running

    @property
    def tail(self) -> Tail:
        """The end of the command's output."""
        return self.command.tail if self.command is not None else Tail()

    @property
    def pid(self) -> int:
        """The process id of the command; 0 if there is none."""
        return self.command.pid if self.command is not None else 0

    def rank_pids(self) -> tuple[int, ...]:
        """Return the process ids of the ranks that run here."""
        if self.ranks is not None:
            return self.ranks.running()
        if self._ranks_by and self.command is not None and self.command.running:
            return processes.children_of(self.command.pid)
        return ()

    def send(self, number: int) -> None:
        """Send a signal to those who are meant to get it: the ranks, or where
        there are none the whole command.
        """
        ranks = self.rank_pids()
        for pid in ranks:
            processes.send(pid, number)
        if not ranks and self.command is not None and self.command.running:
            self.command.signal_group(number)

    def send_to_ranks(self, number: int) -> None:
        """Send a signal to the ranks only."""
        for pid in self.rank_pids():
            processes.send(pid, number)
