"""Plan mode none: every host of the job runs the program once, by itself."""

from __future__ import annotations

from trainworks_launcher.job.job import Job
from trainworks_launcher.plan.modes import common
from trainworks_launcher.plan.plan import NodePlan, Reason


def plan(job: Job) -> NodePlan:
    """Plan the job's host. Hosts without ranks in a job of another mode are planned here, too."""
    why = "no distribution is switched on, so each host runs the program once"
    if job.placement.mode != "none":
        why = (
            f"{job.placement.mode} is for other instance groups; this host runs the program once"
            " and ends with the job"
        )
    return common.own_process(job, common.command(job), [Reason("mode none", why)])
