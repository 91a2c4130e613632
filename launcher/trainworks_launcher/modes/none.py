"""No distribution: every host of the job runs the program once, by itself."""

from __future__ import annotations

from types import MappingProxyType

from trainworks_launcher.job import Job
from trainworks_launcher.modes import common
from trainworks_launcher.plan import NodePlan, Reason, control_of, network_variables, role_of

NAME = "none"
"""As Job.mode has it."""


def plan(job: Job) -> NodePlan:
    """Plan the job's host."""
    network, why = network_variables(job)
    reasons = [Reason("mode none", "no distribution is switched on, so each host runs the program once")]
    return NodePlan(
        mode=NAME,
        host=job.host,
        role=role_of(job),
        needs=tuple(word for word in common.command(job)[:1] if word.startswith("/")),
        argv=common.command(job),
        env=MappingProxyType({**job.variables, **network}),
        cwd=job.code.directory,
        code=job.code,
        requirements=common.requirements(job),
        control=control_of(job),
        limits=job.limits,
        why=(*reasons, *why),
        warnings=job.warnings,
    )
