"""Collects figures of the job for the summary at its end (``job_summary``)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Sequence

from trainworks_launcher.supervise import job_summary
from trainworks_launcher.supervise.part import Part

if TYPE_CHECKING:
    from trainworks_launcher.supervise.attempt import Attempt


class Summary(Part):
    """Present when the program has started, unless a person has switched it off."""

    def __init__(self, attempt: Attempt) -> None:
        """Begin to collect figures; start a sampler if the job uses GPUs."""
        self._attempt = attempt
        plan, environment = attempt.plan, attempt.environment
        member = plan.member or plan.host
        hosts = plan.control.hosts if plan.control is not None else (member,)
        self._account = job_summary.JobSummary(attempt.loop, member, hosts, attempt.log)
        # The job began with the first attempt, and this may be a later one.
        attempt.history.program_began = attempt.history.program_began or time.monotonic()
        attempt.handlers[job_summary.MESSAGE] = self._account.receive

        devices = environment.devices
        if devices.gpus > 0 and devices.visible_gpus != ():
            file = f"{environment.launcher_directory}/programs/gpu_use.py"
            program = (environment.launcher_python, "-I", file)
            self._account.watch_gpus(program, devices.visible_gpus or ())

    @property
    def pids(self) -> Sequence[int]:
        """Process id of the program that samples the GPUs."""
        return self._account.pids

    def leaving(self) -> None:
        """Send the leader the figures of this host."""
        attempt, running = self._attempt, self._attempt.running
        if running.ranks is None:
            tails = [running.tail]
        else:
            tails = [rank.tail for rank in running.ranks.all]
        restarts = attempt.history.restarts + running.restarts
        idle = None
        for part in attempt.parts:
            if part.idle_seconds is not None:
                idle = part.idle_seconds
        attempt.tell(job_summary.MESSAGE, **self._account.close(tails, restarts, idle))

    def left(self) -> None:
        """Log the summary of all hosts, on the leader, unless another attempt follows."""
        attempt = self._attempt
        is_restarted = attempt.outcome is not None and attempt.outcome.again
        if attempt.plan.role != "worker" and not is_restarted:
            self._account.write(attempt.history.program_began)
