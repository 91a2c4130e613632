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
    """Present if the plan has processes beside the program."""

    def __init__(self, attempt: Attempt) -> None:
        """Start none yet."""
        self._attempt = attempt
        self._sidecars = Sidecars(attempt.plan.auxiliaries, self._start)

    def starting(self) -> None:
        """Start all sidecars, before the program that they serve.

        Raises:
            CannotStartError: One cannot be started.
        """
        try:
            self._sidecars.start()
        except OSError as error:
            text = f"cannot start the process beside the program: {error}"
            raise CannotStartError(text) from error

    def _start(self, row: Auxiliary) -> Child:
        """Start one sidecar, with its name before each line of its output. Raises OSError."""
        attempt = self._attempt
        attempt.log(f"starting the {row.name}")
        env = {**attempt.runtime.env, **row.env}
        prefix = f"[{row.name}] ".encode()
        return attempt.start_child(Command(row.argv, attempt.plan.cwd, env, prefix=prefix))

    def reap(self) -> None:
        """Report a sidecar that has failed as this host's failure.

        The programs that it serves would wait for ever.
        """
        for row, child in self._sidecars.failures():
            outcome = self._attempt.verdict.judge_command(
                f"the {row.name}", child.returncode, child.tail
            )
            self._attempt.report(outcome)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the sidecars that run."""
        return self._sidecars.pids

    def program_ended(self) -> None:
        """End the sidecars: they serve nothing any more."""
        self._sidecars.end()
