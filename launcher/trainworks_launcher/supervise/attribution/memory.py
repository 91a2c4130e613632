"""What the kernel says of the memory of this container (cgroups(7), versions 1 and 2)."""

from __future__ import annotations

import os

from trainworks_launcher.contract.files import text_of
from trainworks_launcher.environment.cgroups import groups


def oom_kills(membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Count the processes of this control group that the kernel has killed for lack of memory.

    Source: ``oom_kill`` in memory.events (version 2) or memory.oom_control (version 1, Linux 4.13
    and newer).

    Args:
        membership: File with the groups of this process.
        root: Where the groups are mounted.

    Returns:
        The number since the group began; None if the kernel has no such counter.
    """
    for directory, version in groups("memory", membership, root):
        file = "memory.events" if version == 2 else "memory.oom_control"
        # A line of the file, for example: oom_kill 3
        for line in text_of(f"{directory}/{file}").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return None


def highest_bytes(
    membership: str = "/proc/self/cgroup",
    root: str = "/sys/fs/cgroup",
    *,
    contained: bool = True,
) -> int | None:
    """Read the peak memory of this control group since it began, with the page cache.

    The figure is of all processes of the group, also of those that have ended. Source: memory.peak
    (version 2, Linux 5.19) or memory.max_usage_in_bytes (version 1).

    Args:
        membership: File with the groups of this process.
        root: Where the groups are mounted.
        contained: Whether this process runs in a container: its group has no other processes.

    Returns:
        Bytes. None if they are not known, or not the job's own: the group of the whole machine (the
        only one with a release_agent), or one with processes of others, such as a login session's.
    """
    for directory, version in groups("memory", membership, root):
        # Only the root group has this file: its figure is that of the whole machine.
        if os.path.exists(f"{directory}/release_agent"):  # noqa: PTH110
            return None
        file = "memory.peak" if version == 2 else "memory.max_usage_in_bytes"
        peak = text_of(f"{directory}/{file}").strip()
        if not peak.isdecimal():
            continue
        if not contained and not _has_only_this_process(directory):
            return None
        return int(peak)
    return None


def _has_only_this_process(directory: str) -> bool:
    """Return whether a control group has this process and no other: the job's own have ended."""
    return text_of(f"{directory}/cgroup.procs").split() == [str(os.getpid())]
