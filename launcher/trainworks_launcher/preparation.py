"""What is done on a host before its command starts, as a list of child processes. Pure.

Every step is a process of its own, never work in the launcher's thread: heartbeats and stop signals go on meanwhile. To
add one: append it in ``steps``; what it needs to know comes with the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from trainworks_launcher.plan import NodePlan


@dataclass(frozen=True)
class Step:
    """what: for the log and the failure text, as in "installing requirements.txt". argv: of the process."""

    what: str
    argv: tuple[str, ...]


def steps(plan: NodePlan, launcher: Sequence[str], directory: str) -> tuple[Step, ...]:
    """The steps of a plan, in order.

    launcher: words that start a small program of ours (Python, isolated). directory: where those programs are.
    """
    found: list[Step] = []
    if plan.code.archive:
        words = (*launcher, f"{directory}/unpack.py", plan.code.archive, plan.code.directory)
        found.append(Step("unpacking the code", words))
    if plan.requirements:
        found.append(Step("installing requirements.txt", plan.requirements))
    return tuple(found)
