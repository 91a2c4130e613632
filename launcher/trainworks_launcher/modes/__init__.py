"""The ways to start a job: one file per mode, one line here.

A mode is a module with ``NAME`` (as ``Job.mode`` has it) and ``plan(job) -> NodePlan``, a pure function that plans the
host of the job, or raises RefusalError. To add one: write the file, add the row, and move its switch in ``job`` from
MODES_NOT_BUILT to MODES_BUILT.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Callable, Mapping

from trainworks_launcher.job import Job
from trainworks_launcher.modes import mpi, none, torch_distributed
from trainworks_launcher.plan import NodePlan

MODES: Mapping[str, Callable[[Job], NodePlan]] = MappingProxyType(
    {
        none.NAME: none.plan,
        mpi.NAME: mpi.plan,
        torch_distributed.NAME: torch_distributed.plan,
    }
)
"""Mode -> its planner."""


def plan_host(job: Job) -> NodePlan:
    """The plan of the job's host, by the job's mode. Raises RefusalError with all problems that the mode finds."""
    return MODES[job.mode](job)
