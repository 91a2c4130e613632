"""What is done on a host before its command starts, as a list of child processes. Pure.

Every step is a process of its own, never work in the launcher's thread: heartbeats and stop signals
go on meanwhile. To add one: append it in ``steps``; what it needs to know comes with the plan.
"""

from __future__ import annotations

import json
from typing import NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.plan.plan import NodePlan


class Step(NamedTuple):
    """One step of a preparation.

    Attributes:
        what: For the log and the failure text, for example ``installing requirements.txt``.
        argv: Command line of its process.
        status: Exit status of the job if it fails.
    """

    what: str
    argv: tuple[str, ...]
    status: int = names.EXIT_PREPARATION


def steps(plan: NodePlan, launcher: Sequence[str], directory: str) -> tuple[Step, ...]:
    """Return the steps of a plan, in order.

    Args:
        plan: The plan.
        launcher: Words that start a small program of the launcher (Python, isolated).
        directory: Directory of those programs.
    """
    found: list[Step] = []
    if plan.checks is not None and plan.checks.needs_process:
        argv = (*launcher, f"{directory}/programs/check.py", json.dumps(plan.checks._asdict()))
        found.append(Step("checking this host", argv, names.EXIT_CHECK))
    code = plan.code
    if code.fetch:
        found.append(Step(f"fetching {code.archive}", code.fetch))
    if code.archive:
        archive = names.FETCHED_ARCHIVE if code.fetch else code.archive
        found.append(
            Step(
                "unpacking the code",
                (*launcher, f"{directory}/programs/unpack.py", archive, code.directory),
            )
        )
    return (*found, *installation(plan))


def installation(plan: NodePlan) -> tuple[Step, ...]:
    """Return the step that installs what the code needs, if anything: the last
    one, once the code is there.
    """
    if not plan.requirements:
        return ()
    what = (
        plan.code.requirements
        if "-r" in plan.requirements
        else f"the project ({plan.code.project})"
    )
    return (Step(f"installing {what}", plan.requirements),)
