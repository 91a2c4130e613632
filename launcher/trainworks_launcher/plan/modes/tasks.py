"""Plan mode tasks: the platform starts every rank as a task, for example srun --ntasks-per-node=8.

Each task has a launcher, which becomes one rank. The variables are those of torchrun, so that a
script needs no change. The first task of each host fetches the code and installs the requirements
for all tasks of the host, which share the container.
"""

from __future__ import annotations

from trainworks_launcher.job.job import Job
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.modes.common import Variable
from trainworks_launcher.plan.plan import NodePlan, Reason


def plan(job: Job) -> NodePlan:
    """Plan the job's task, which is one rank: the task that this process is."""
    placement = job.placement
    tasks = placement.tasks
    assert tasks is not None, "the mode of a platform that starts every rank"
    local_world_size = str(placement.processes_per_host)
    rows = [
        Variable("RANK", str(tasks.rank), "rank of this task in the job", ours=True),
        Variable("LOCAL_RANK", str(tasks.local_rank), "rank of this task on its host", ours=True),
        Variable("WORLD_SIZE", str(placement.processes), "tasks of the job", ours=True),
        Variable("LOCAL_WORLD_SIZE", local_world_size, "tasks of this host", ours=True),
        Variable("GROUP_RANK", str(placement.host_rank), "number of this host", ours=True),
    ]
    why = (
        f"{job.environment.platform.platform} starts {placement.processes} tasks,"
        " each of which is one rank"
    )
    choice = Reason("mode tasks", why)
    node_plan = common.own_process(job, common.command(job), [choice], rows, _warnings(job))
    node_plan = node_plan._replace(rank=tasks.rank)
    if tasks.local_rank == 0:
        return node_plan
    # The first task of the host prepares for all: this one fetches and installs nothing.
    prepared = node_plan.code._replace(archive="", fetch=())
    return node_plan._replace(code=prepared, requirements=())


def _warnings(job: Job) -> tuple[str, ...]:
    """Return a warning if a task sees fewer GPUs than its host has tasks; else ``()``.

    A script for torchrun chooses its GPU by LOCAL_RANK, and fails then.
    """
    gpus, tasks = job.environment.devices.gpus, job.placement.processes_per_host
    if not 0 < gpus < tasks:
        return ()
    warning = (
        f"this task sees {gpus} GPU(s), and its host has {tasks} tasks:"
        " a script that chooses its GPU by LOCAL_RANK fails;"
        " give every task all GPUs of the host"
    )
    return (warning,)
