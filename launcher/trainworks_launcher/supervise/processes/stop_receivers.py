"""The processes of a host that get a stop signal at once, and those that get it after them.

A shell without a trap dies of SIGTERM, and so do a Python wrapper without a handler, and ``tee``.
With the shell the job's command would be at its end while the script behind it still saves. So
where a process that waits for its child has, behind it, processes with a handler for the signal,
only these get it at once. The others get it when these have ended, so that a shell does not go on
with its next line. A program that does not wait for a child gets the signal at once, with its
process group if it is the command, also where only a helper that it started has a handler (Go's
programs have one for every signal).
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple

from trainworks_launcher.supervise.processes import processes

if TYPE_CHECKING:
    from trainworks_launcher.supervise.processes.command import HostCommand
    from trainworks_launcher.supervise.processes.processes import Child


class _Process(NamedTuple):
    """A process that is known again: its number may be given to another one."""

    pid: int
    started: str

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        now = processes.stat(self.pid)
        return now.started == self.started and now.state != processes.HAS_ENDED


class _HeldBack(NamedTuple):
    """A rank, or the command, that gets the signal after the processes behind it.

    Attributes:
        first: The rank, or the command.
        receivers: The processes that have got the signal.
        command: The command, whose process group gets the signal; None for a rank.
        is_last: Whether the receivers had ended at the look before.
    """

    first: _Process
    receivers: tuple[_Process, ...]
    command: Child | None
    is_last: bool = False


class StopReceivers:
    """The stop signal of one host. Every method runs in the loop's thread."""

    def __init__(self) -> None:
        """Send nothing yet."""
        self._number = 0
        self._held_back: list[_HeldBack] = []

    @property
    def any_held_back(self) -> bool:
        """Whether a process waits for its signal."""
        return bool(self._held_back)

    def send(self, number: int, running: HostCommand) -> None:
        """Send a stop signal to the ranks, or to the command's process group if no rank runs.

        Of a shell and the programs that it waits for only those with a handler get it, if there are
        any. SIGINT goes to all: at a terminal every process gets it, and shells and Python expect
        that.

        Args:
            number: The signal.
            running: The command of this host, and its ranks.
        """
        if number == signal.SIGINT:
            running.send(number)
            return
        self._number = number
        # At a second signal all of them get it again.
        self._held_back = []
        ranks = running.rank_pids()
        for rank in ranks:
            self._send(rank, None)
        command = running.command
        if not ranks and command is not None and command.running:
            self._send(command.pid, command)

    def send_to_held_back(self) -> None:
        """Look once: send the signal to those behind which all had ended at the look before.

        The time of a look is for a shell that ends by itself, with the script's own status. What a
        shell has started since, with a handler, gets the signal first.
        """
        held_back, self._held_back = self._held_back, []
        for waiting in held_back:
            if not waiting.first.is_running:
                continue
            if not waiting.is_last:
                is_last = not any(receiver.is_running for receiver in waiting.receivers)
                self._held_back.append(waiting._replace(is_last=is_last))
                continue
            self._send(waiting.first.pid, waiting.command)

    def _send(self, first: int, command: Child | None) -> None:
        """Send the signal to the rank, or to the command's process group.

        If that waits for programs, only those of them that have a handler get it, if there are any.

        Args:
            first: Process id of the rank, or of the command.
            command: The command; None for a rank.
        """
        receivers = []
        if processes.waits_for_a_child(first):
            receivers = _with_handler(first, self._number)
        if receivers:
            signalled = tuple(_Process(pid, processes.stat(pid).started) for pid in receivers)
            for pid in receivers:
                processes.send(pid, self._number)
            if first not in receivers:
                started = processes.stat(first).started
                self._held_back.append(_HeldBack(_Process(first, started), signalled, command))
        elif command is not None:
            command.signal_group(self._number)
        else:
            processes.send(first, self._number)


def _with_handler(pid: int, number: int) -> list[int]:
    """Return those of a process and of the programs that it waits for that handle a signal.

    A shell with a trap runs it when the program behind it has ended: so both get the signal.

    Args:
        pid: The process.
        number: The signal.
    """
    found = []
    if processes.has_handler(pid, number):
        found.append(pid)
    if processes.waits_for_a_child(pid):
        for child in processes.children_of(pid):
            found += _with_handler(child, number)
    return found
