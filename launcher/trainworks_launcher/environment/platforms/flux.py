"""Flux: ``flux run`` starts the launcher once on each node, or once for each rank. Pure.

The variables do not name the nodes. So a job of one node is started, as one host or as its tasks,
and a job of several nodes is refused. Source: flux-environment(7), TASK ENVIRONMENT.
"""

from __future__ import annotations

from trainworks_launcher.contract import names
from trainworks_launcher.environment.platforms import Description, Sources, Tasks
from trainworks_launcher.environment.platforms.common import Reader, make_config

_ADVICE = "start it with flux run, which sets them for every task: do not set or unset them"


def describe(sources: Sources) -> Description:
    """Return the node of the job, with its tasks; a problem if the job has several nodes.

    A job of one task has no ``tasks``: the launcher starts its ranks. Nothing is raised.
    """
    reader = Reader(sources.variables, "Flux", _ADVICE)
    nodes = reader.integer("FLUX_JOB_NNODES", least=1)
    size = reader.integer("FLUX_JOB_SIZE", least=1)
    job = reader.optional("FLUX_JOB_ID")
    if reader.problems:
        return Description(problems=reader.problems)
    if nodes > 1:
        problem = f"the job has {nodes} nodes, and Flux does not say which ones"
        advice = (
            "start one task on each node,"
            f" and set {names.HOSTS_VARIABLE}=a,b to the same list on all of them (from"
            f" flux resource list) and {names.HOST_VARIABLE} to the node's own name"
        )
        reader.refuse(problem, "FLUX_JOB_NNODES", advice=advice)
        return Description(problems=reader.problems)
    if size == 1:
        return Description(where="FLUX_JOB_NNODES", job_id=job)
    rank = reader.index("FLUX_TASK_RANK", count=size)
    local_rank = reader.index("FLUX_TASK_LOCAL_ID", count=size)
    if reader.problems:
        return Description(problems=reader.problems)
    return Description(
        resource_config=make_config((sources.hostname,), sources.hostname),
        where="FLUX_JOB_SIZE",
        tasks=Tasks(rank, local_rank, (size,)),
        job_id=job,
    )
