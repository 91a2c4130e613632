"""The ways to start a job: one file per mode, whose row is in ``contract.modes``.

A mode's file has ``plan(job) -> NodePlan``, a pure function that plans the host of the job, or
raises RefusalError.
"""

from __future__ import annotations

from importlib import import_module
from typing import Callable

from trainworks_launcher.contract.modes import MODES
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.job.job import Job
from trainworks_launcher.job.staging import why_kept
from trainworks_launcher.plan.host_checks import checks_of
from trainworks_launcher.plan.plan import NodePlan, Reason


def planner(mode: str) -> Callable[[Job], NodePlan]:
    """Return the planner of a mode, by name.

    Only its own file is loaded, which keeps the start quick.
    """
    found: Callable[[Job], NodePlan] = import_module(f"{__name__}.{MODES[mode].file}").plan
    return found


_PYTHON_HOME = "PYTHONHOME"  # of a host's Python, where the scheduler hands its environment on


def plan_host(job: Job) -> NodePlan:
    """Return the plan of the job's host, by the job's mode.

    Raises RefusalError with all problems that the mode finds.

    A host that takes no part in the distribution runs the program once, by itself (as
    sagemaker-training). Where it is the only one with a launcher, it starts the ranks of the
    others.
    """
    placement = job.placement
    plan = planner(placement.mode if placement.takes_part or placement.served else "none")(job)
    platform = job.environment.platform
    why = [
        *plan.why,
        Reason(f"platform {platform.platform or 'none'}", platform.why, Origin.PLATFORM),
    ]
    kept = why_kept(job.environment) if plan.requirements else ""
    if kept:
        why.append(Reason("requirements", kept, Origin.IMAGE))
    hidden = (*plan.hidden, *platform.hidden.get(plan.ranks_by, ()))
    checks = checks_of(job.environment, placement, job.network)
    left_out = [
        name
        for name, value in job.inherited.items()
        if job.network.fabric.why_left_out(name, value)
    ]
    warnings = list(plan.warnings)
    python, home = job.environment.programs.get("python", ""), job.inherited.get(_PYTHON_HOME, "")
    if home and not python.startswith(f"{home.rstrip('/')}/"):
        # Python looks for its own library there, and ends with status 1 before
        # the first line of a script.
        left_out.append(_PYTHON_HOME)
        warnings.append(
            f"left out {_PYTHON_HOME}={home}: it is of another Python than"
            f" {python or 'the image has'}"
        )
    member = placement.member
    return plan._replace(
        checks=checks,
        restarts=placement.elastic.restarts,
        why=tuple(why),
        platform=platform.platform,
        member=member,
        hidden=hidden,
        left_out=tuple(left_out),
        warnings=tuple(warnings),
        hidden_from_ranks=platform.hidden.get("ranks", ()) if plan.ranks_by == "mpirun" else (),
    )
