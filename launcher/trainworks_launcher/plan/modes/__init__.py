"""Plan a host by the mode of its job. Each mode has a file here and a row in contract/modes.py.

A mode's file has ``plan(job) -> NodePlan``, a pure function that plans one host, or raises
RefusalError.
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
    """Return the function ``plan`` of a mode's file, such as torch_distributed.py.

    Only this file is imported, which saves time at the start. Raises KeyError for a mode that is
    not a key of ``MODES``.
    """
    module = import_module(f"{__name__}.{MODES[mode].file}")
    plan: Callable[[Job], NodePlan] = module.plan
    return plan


_PYTHON_HOME = "PYTHONHOME"
"""Slurm hands the environment of the submitting host on, with the home of that host's Python."""


def plan_host(job: Job) -> NodePlan:
    """Return the plan of the job's host, by the job's mode.

    A host without ranks runs the program once, by itself (as sagemaker-training). The launcher in a
    job of the Kubernetes MPI operator has no ranks either, but runs mpirun.

    Raises RefusalError with all problems of the mode.
    """
    placement = job.placement
    mode = "none"
    if placement.has_ranks or placement.has_ssh_workers:
        mode = placement.mode
    plan = planner(mode)(job)

    platform = job.environment.platform
    why = list(plan.why)
    why.append(Reason(f"platform {platform.platform or 'none'}", platform.why, Origin.PLATFORM))
    if plan.requirements:
        kept = why_kept(job.environment)
        if kept:
            why.append(Reason("requirements", kept, Origin.IMAGE))

    fabric = job.network.fabric
    left_out = [name for name, value in job.inherited.items() if fabric.why_left_out(name, value)]
    warnings = list(plan.warnings)
    home_warning = _warn_of_python_home(job)
    if home_warning:
        left_out.append(_PYTHON_HOME)
        warnings.append(home_warning)

    # Beginnings of names of the platform's variables that would mislead mpirun or torchrun, or the
    # ranks that mpirun starts.
    hidden = (*plan.hidden, *platform.hidden.get(plan.ranks_by, ()))
    hidden_from_ranks: tuple[str, ...] = ()
    if plan.ranks_by == "mpirun":
        hidden_from_ranks = platform.hidden.get("ranks", ())
    return plan._replace(
        checks=checks_of(job.environment, placement, job.network),
        restarts=placement.elastic.restarts,
        why=tuple(why),
        platform=platform.platform,
        member=placement.member,
        hidden=hidden,
        left_out=tuple(left_out),
        warnings=tuple(warnings),
        hidden_from_ranks=hidden_from_ranks,
    )


def _warn_of_python_home(job: Job) -> str:
    """Return a warning if PYTHONHOME belongs to another Python than the job's; else ``""``.

    Python looks for its library in PYTHONHOME. With the library of another Python, Python ends with
    status 1 before the first line of a script.
    """
    home = job.inherited.get(_PYTHON_HOME, "")
    python = job.environment.programs.get("python", "")
    if not home or python.startswith(f"{home.rstrip('/')}/"):
        return ""
    return (
        f"left out {_PYTHON_HOME}={home}: it is of another Python than {python or 'the image has'}"
    )
