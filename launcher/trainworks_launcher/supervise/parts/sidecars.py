"""Runs the processes beside the program, such as parameter servers (``processes.sidecars``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

from trainworks_launcher.supervise.attempt import Attempt, Command
from trainworks_launcher.supervise.part import CannotStartError, Part
from trainworks_launcher.supervise.processes.sidecars import Sidecars

if TYPE_CHECKING:
    from trainworks_launcher.plan.plan import Auxiliary
    from trainworks_launcher.supervise.processes.processes import Child


class SidecarProcesses(Part):
    """Present where the plan has processes beside the program."""

    def __init__(self, attempt: Attempt) -> None:
        """None runs yet."""
        self._attempt = attempt
        self._auxiliaries = Sidecars(attempt.plan.auxiliaries, self._start)

    def starting(self) -> None:
        """Start all of them, before the program that they serve."""
        try:
            self._auxiliaries.start()
        except OSError as error:
            text = f"cannot start the process beside the program: {error}"
            raise CannotStartError(text) from error

    def _start(self, row: Auxiliary) -> Child:
        attempt = self._attempt
        attempt.log(f"starting the {row.name}")
        env = {**attempt.runtime.env, **row.env}
        prefix = f"[{row.name}] ".encode()
        return attempt.start_child(Command(row.argv, attempt.plan.cwd, env, prefix=prefix))

    def reap(self) -> None:
        """Report those that have failed: the programs that they serve would wait for ever."""
        for row, child in self._auxiliaries.failures():
            outcome = self._attempt.verdict.judge_command(
                f"the {row.name}", child.returncode, child.tail
            )
            self._attempt.report(outcome)

    @property
    def pids(self) -> Sequence[int]:
        """Those that run."""
        return self._auxiliaries.pids

    def program_ended(self) -> None:
        """End them: they serve nothing any more."""
        self._auxiliaries.end()
