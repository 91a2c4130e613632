"""What the kernel says of the memory of this container (cgroups(7), versions 1 and 2)."""

from __future__ import annotations

import os

from trainworks_launcher.contract.files import text_of
from trainworks_launcher.environment.cgroups import groups


def oom_kills(membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Return how many processes of this control group were killed so far for lack of memory.

    None if that is not known.

    Source: ``oom_kill`` in memory.events (version 2) or memory.oom_control
    (version 1, Linux 4.13 and newer).
    """
    for directory, version in groups("memory", membership, root):
        rows = text_of(
            f"{directory}/{'memory.events' if version == 2 else 'memory.oom_control'}"
        ).splitlines()
        for name, _, count in (row.partition(" ") for row in rows):
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return None


def highest_bytes(
    membership: str = "/proc/self/cgroup",
    root: str = "/sys/fs/cgroup",
    *,
    contained: bool = True,
) -> int | None:
    """Return the most that this control group has used since it began, with the page cache.

    Source: memory.peak (version 2, Linux 5.19) or memory.max_usage_in_bytes (version 1).

    Args:
        membership: File with the groups of this process.
        root: Where the groups are mounted.
        contained: Whether this process runs in a container: its group has no other processes.

    Returns:
        Bytes. None if they are not known, or not the job's own: the group of the whole machine (the
        only one with a release_agent), or one with processes of others, such as a login session's.
    """
    for directory, version in groups("memory", membership, root):
        if os.path.exists(f"{directory}/release_agent"):  # noqa: PTH110
            return None
        file = "memory.peak" if version == 2 else "memory.max_usage_in_bytes"
        said = text_of(f"{directory}/{file}").strip()
        if said.isdecimal():
            is_own = contained or _has_only_this_process(directory)
            return int(said) if is_own else None
    return None


def _has_only_this_process(directory: str) -> bool:
    """Return whether a control group has this process and no other: the job's own have ended."""
    return text_of(f"{directory}/cgroup.procs").split() == [str(os.getpid())]
