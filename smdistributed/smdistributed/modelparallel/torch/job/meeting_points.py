"""Wait until all ranks of a group have made a call, and name the missing ranks."""

from __future__ import annotations

import collections
import time

import torch.distributed as dist

from smdistributed.modelparallel.torch.exceptions import StepError

from .collective_calls import calls
from .state import state
from .topology import CommGroup

LIMIT = 300.0
"""Seconds that a rank waits for the others, which may still write a file or end an evaluation."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.05
"""Seconds between two looks into the store. They double, because most calls are made at once."""

_calls: collections.Counter[str] = collections.Counter()
"""Name of a call and its group in the store -> number of such calls of this rank."""


def meet(call: str, group: CommGroup = CommGroup.MP_GROUP) -> None:
    """Wait until every rank of a group has made this call.

    A group of one rank does not wait. The call is counted, and is recorded for the comparison of
    ranks that wait.

    Args:
        call: The script's call, for the error.
        group: Kind of the group with the ranks that must make the call.

    Raises:
        StepError: Some ranks have not called it after ``LIMIT`` seconds.
        RuntimeError: The store cannot be used (torch's own error).
    """
    members = state.topo.members(group)
    if len(members) == 1:
        return
    with calls.inside(call, group):
        _wait_for_all(call, group, members)


def _wait_for_all(call: str, group: CommGroup, members: tuple[int, ...]) -> None:
    """Store that this rank has made a call, and wait until all ranks of a group have.

    The count of this call is raised, and the key of this rank stays in the store.

    Args:
        call: The script's call.
        group: Kind of the group.
        members: Global ranks of the group.

    Raises:
        StepError: Some ranks have not made the call after ``LIMIT`` seconds.
        RuntimeError: The store cannot be used (torch's own error).
    """
    # The number distinguishes several calls of one function.
    base = f"smp/meet/{group.name}/{'.'.join(map(str, members))}/{call}"
    _calls[base] += 1
    keys = {member: f"{base}/{_calls[base]}/{member}" for member in members}
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  there is no public name
    store.set(keys[state.topo.rank], "")
    end, pause = time.monotonic() + LIMIT, _FIRST_PAUSE_SECONDS
    while True:
        missing = [member for member, key in keys.items() if not store.check([key])]
        if not missing:
            return
        if time.monotonic() > end:
            raise StepError(
                f"{call}: waited {LIMIT:g} s on rank {state.topo.rank}, but rank(s) "
                f"{', '.join(map(str, missing))} did not call it.\n"
                f"Every rank of {group.name} must call it: {', '.join(map(str, members))}"
            )
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
