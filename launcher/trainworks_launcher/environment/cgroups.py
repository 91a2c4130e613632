"""What the kernel lets this container have: its control group (cgroups(7),
versions 1 and 2), its seccomp profile.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Iterator

from trainworks_launcher.contract.files import text_of

_CLONE3 = 435
"""Number of the system call on every architecture; glibc starts threads by it."""


_PIDS_OF_THE_HOST = f"pid:[{0xEFFFFFFC}]"


def is_contained() -> bool:
    """Return whether the process ids of this process are those of a container,
    which ends with its process 1.

    Source: include/linux/proc_ns.h, PROC_PID_INIT_INO: the first namespace of
    process ids always has that number.
    """
    try:
        return os.readlink("/proc/self/ns/pid") != _PIDS_OF_THE_HOST
    except OSError:  # a laptop without /proc
        return False


def groups(
    controller: str, membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup"
) -> Iterator[tuple[str, int]]:
    """Yield the directories that may be this control group's, the likelier one
    first, and their version.

    Args:
        controller: Name of the controller, as ``memory``; in version 2 all of
            them share one directory.
        membership: File with the groups of this process.
        root: Where the groups are mounted.
    """
    for line in text_of(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            directory, version = root, 2
        elif controller in controllers.split(","):
            directory, version = f"{root}/{controller}", 1
        else:
            continue
        # Inside a container the path may be the host's, which cannot be seen;
        # then the mount is our own group.
        yield f"{directory}/{path.strip('/')}".rstrip("/"), version
        yield directory, version


def cpu_quota(membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Return the CPUs' worth of time that this control group, and those above
    it, may use, rounded up; None: no limit.

    Source: cpu.max (version 2), cpu.cfs_quota_us and cpu.cfs_period_us (version 1). docker's --cpus
    and Kubernetes' limits.cpu set them; they are not in the set of CPUs that sched_getaffinity(2)
    returns.
    """
    found = []
    for directory, version in groups("cpu", membership, root):
        for place in (Path(directory), *Path(directory).parents):
            if not f"{place}/".startswith(f"{root}/"):
                break
            with contextlib.suppress(OSError, ValueError):
                if version == 2:
                    quota, period = (place / "cpu.max").read_text(encoding="ascii").split()
                else:
                    both = (place / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
                    quota, period = (file.read_text(encoding="ascii").strip() for file in both)
                if int(quota) > 0:
                    found.append(-(-int(quota) // int(period)))
    return min(found, default=None)


def why_no_thread() -> tuple[str, str]:
    """Return (why a thread could not be started, what to do), as far as it can be observed."""
    if _clone3() == errno.EPERM:
        problem = "this container may not start threads: its seccomp profile refuses clone3"
        return (
            problem,
            (
                "update the host's container engine and libseccomp, or start it with --security-opt"
                " seccomp=unconfined"
            ),
        )
    limit = of_processes()
    advice = "raise that limit" if limit else "look at its limits of processes and of memory"
    return f"this container may not start threads{limit}", advice


def of_processes() -> str:
    """Return the limit of processes and threads, as the end of a sentence.

    ``""`` if there is none.
    """
    import resource

    found = []
    for directory, _ in groups("pids"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(directory, "pids.max").read_text(encoding="ascii"))
            found.append(
                (limit, f"the pids limit of this container is {limit} (docker run --pids-limit)")
            )
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.geteuid():
        found.append(
            (soft, f"user {os.geteuid()} may have {soft} processes and threads (ulimit -u)")
        )
    return f": {min(found)[1]}" if found else ""


def _clone3() -> int:
    """Return the error number of a clone3 that can make nothing: EINVAL, if the
    call itself is allowed.
    """
    import ctypes

    kernel = ctypes.CDLL(None, use_errno=True)
    kernel.syscall(_CLONE3, None, 0)
    return ctypes.get_errno()
