"""Whether the kernel has killed processes of this container for lack of memory (cgroups(7), versions 1 and 2)."""

from __future__ import annotations

from pathlib import Path


def oom_kills(membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Return how many processes of this control group were killed so far for lack of memory; None if that is not known.

    Source: ``oom_kill`` in memory.events (version 2) or memory.oom_control (version 1, Linux 4.13 and newer).
    """
    try:
        lines = Path(membership).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            directory, file = root, "memory.events"
        elif "memory" in controllers.split(","):
            directory, file = f"{root}/memory", "memory.oom_control"
        else:
            continue
        # Inside a container the path may be the host's, which cannot be seen; then the mount is our own group.
        for place in (f"{directory}/{path.strip('/')}/{file}", f"{directory}/{file}"):
            count = _count(place)
            if count is not None:
                return count
    return None


def _count(file: str) -> int | None:
    try:
        words = [line.split() for line in Path(file).read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return None
    return next((int(row[1]) for row in words if len(row) == 2 and row[0] == "oom_kill" and row[1].isdecimal()), None)
