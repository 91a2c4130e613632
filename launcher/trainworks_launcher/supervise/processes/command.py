"""The command that runs on this host, one at a time, and the ranks that the command started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainworks_launcher.supervise.processes import processes
from trainworks_launcher.supervise.processes.output import Tail

if TYPE_CHECKING:
    from trainworks_launcher.supervise.processes.processes import Child
    from trainworks_launcher.supervise.processes.ranks import Ranks


class HostCommand:
    """The processes that a stop signal is for.

    Attributes:
        command: The command that was started last: a step of the preparation, or the job's
            command. None before the first one.
        ranks: The ranks that report to this launcher; None where none do.
        restarts: How often torchrun has started the ranks of this host again.
        is_copy: Whether the command waits in its mpirun for the leader's copy of the program.
    """

    def __init__(self, ranks_by: str) -> None:
        """Begin without a command.

        Args:
            ranks_by: Starter of the job's ranks, as ``NodePlan.ranks_by``; ``""`` for none.
        """
        self.command: Child | None = None
        self.ranks: Ranks | None = None
        self.restarts = 0
        self.is_copy = False
        self._ranks_by = ranks_by

    @property
    def is_active(self) -> bool:
        """Whether a command runs."""
        return self.command is not None and self.command.running

    @property
    def tail(self) -> Tail:
        """The end of the command's output."""
        if self.command is None:
            return Tail()
        return self.command.tail

    @property
    def pid(self) -> int:
        """The process id of the command; 0 before the first one."""
        if self.command is None:
            return 0
        return self.command.pid

    def rank_pids(self) -> tuple[int, ...]:
        """Return the process ids of the ranks that run on this host.

        () in a job without ranks: its command is the program itself.
        """
        if self.ranks is not None:
            return self.ranks.running()
        # Ranks that do not report are the children of their starter.
        if self._ranks_by and self.command is not None and self.command.running:
            return processes.children_of(self.command.pid)
        return ()

    def send(self, number: int) -> None:
        """Send a signal to the ranks, or to the command's process group if no rank runs.

        Args:
            number: The signal.
        """
        ranks = self.rank_pids()
        for pid in ranks:
            processes.send(pid, number)
        if not ranks and self.command is not None and self.command.running:
            self.command.signal_group(number)

    def send_to_ranks(self, number: int) -> None:
        """Send a signal to the ranks that run, and not to their starter."""
        for pid in self.rank_pids():
            processes.send(pid, number)
