"""tasks: the platform starts every rank as a task of its own, and the launcher
of each task becomes one rank.

The variables are torchrun's, so a script finds its ranks as it does there. Code and requirements
are prepared by the first task of each host: its tasks share the container.
"""

from __future__ import annotations

from trainworks_launcher.job.job import Job
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.modes.common import Variable
from trainworks_launcher.plan.plan import NodePlan, Reason


def plan(job: Job) -> NodePlan:
    """Plan the job's task."""
    placement = job.placement
    tasks = placement.tasks
    assert tasks is not None, "the mode of a platform that starts every rank"
    rows = [
        Variable(name, str(value), why, ours=True)
        for name, value, why in (
            ("RANK", tasks.rank, "rank of this task in the job"),
            ("LOCAL_RANK", tasks.local_rank, "rank of this task on its host"),
            ("WORLD_SIZE", placement.processes, "tasks of the job"),
            ("LOCAL_WORLD_SIZE", placement.processes_per_host, "tasks of this host"),
            ("GROUP_RANK", placement.host_rank, "number of this host"),
        )
    ]
    why = (
        f"{job.environment.platform.platform} starts {placement.processes} tasks,"
        " each of which is one rank"
    )
    made = common.own_process(
        job, common.command(job), [Reason("mode tasks", why)], rows, _warnings(job)
    )
    made = made._replace(rank=tasks.rank)
    if tasks.local_rank:
        return made._replace(code=made.code._replace(archive="", fetch=()), requirements=())
    return made


def _warnings(job: Job) -> tuple[str, ...]:
    """Return what a script has to know that chooses its GPU by LOCAL_RANK, as
    scripts for torchrun do.
    """
    gpus, tasks = job.environment.devices.gpus, job.placement.processes_per_host
    if not 0 < gpus < tasks:
        return ()
    sees = f"this task sees {gpus} GPU(s), and its host has {tasks} tasks"
    return (
        (
            f"{sees}: a script that chooses its GPU by LOCAL_RANK fails;"
            " give every task all GPUs of the host"
        ),
    )
