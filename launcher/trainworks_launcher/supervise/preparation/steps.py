"""The steps of a host's preparation, as a list of child processes. Pure.

Every step is a process of its own, never work in the launcher's thread: heartbeats and stop signals
go on meanwhile. To add one: append it in ``steps``; the facts that it needs come with the plan.
"""

from __future__ import annotations

import json
from typing import NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.plan.plan import NodePlan


class Step(NamedTuple):
    """One step of a preparation.

    Attributes:
        what: Its name in the log and the failure text, for example ``installing
            requirements.txt``.
        argv: Command line of its process.
        status: Exit status of the job if it fails.
    """

    what: str
    argv: tuple[str, ...]
    status: int = names.EXIT_PREPARATION


def steps(plan: NodePlan, launcher: Sequence[str], directory: str) -> tuple[Step, ...]:
    """Return the steps of a plan, in order: check, fetch, unpack, install; only those needed.

    Args:
        plan: The plan.
        launcher: Words that start a small program of the launcher (Python, isolated).
        directory: The launcher's directory, which has ``programs/``.
    """
    planned: list[Step] = []
    if plan.checks is not None and plan.checks.needs_process:
        argv = (*launcher, f"{directory}/programs/check.py", json.dumps(plan.checks._asdict()))
        planned.append(Step("checking this host", argv, names.EXIT_CHECK))
    code = plan.code
    if code.fetch:
        planned.append(Step(f"fetching {code.archive}", code.fetch))
    if code.archive:
        # fetch.py has put a remote archive into the runtime directory, under this name.
        archive = names.FETCHED_ARCHIVE if code.fetch else code.archive
        argv = (*launcher, f"{directory}/programs/unpack.py", archive, code.directory)
        planned.append(Step("unpacking the code", argv))
    return (*planned, *installation(plan))


def installation(plan: NodePlan) -> tuple[Step, ...]:
    """Return the step that installs the requirements of the code; () if it has none."""
    if not plan.requirements:
        return ()
    source = f"the project ({plan.code.project})"
    if "-r" in plan.requirements:
        source = plan.code.requirements
    return (Step(f"installing {source}", plan.requirements),)
