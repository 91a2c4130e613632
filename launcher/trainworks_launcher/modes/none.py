"""No distribution: every host of the job runs the program once, by itself."""

from __future__ import annotations

from types import MappingProxyType

from trainworks_launcher.job import Job
from trainworks_launcher.modes import common
from trainworks_launcher.plan import NodePlan, Reason, control_of, network_variables, role_of, words_of

NAME = "none"
"""As Job.mode has it."""


def plan(job: Job) -> NodePlan:
    """Plan the job's host."""
    network, why = network_variables(job)
    command = common.command(job)
    reasons = [Reason("mode none", "no distribution is switched on, so each host runs the program once")]
    return NodePlan(
        mode=NAME,
        host=job.host,
        role=role_of(job),
        needs=tuple(word for word in words_of(command)[:1] if word.startswith("/")),
        argv=words_of(command),
        env=MappingProxyType({**job.variables, **network}),
        cwd=job.code.directory,
        code=job.code,
        requirements=common.requirements(job),
        control=control_of(job),
        limits=job.limits,
        why=(*reasons, *command, *why),
        warnings=job.warnings,
    )
