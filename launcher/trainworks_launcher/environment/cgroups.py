"""Reads the limits of this container: its control group (cgroups(7)) and its seccomp profile."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Iterator

from trainworks_launcher.contract.files import text_of

_CLONE3 = 435
"""Number of the system call on every architecture; glibc starts threads by it."""


_HOST_NAMESPACE = f"pid:[{0xEFFFFFFC}]"
"""The host's PID namespace (include/linux/proc_ns.h, PROC_PID_INIT_INO)."""


def is_contained() -> bool:
    """Return whether this process has a PID namespace of its own, as in a container.

    The kernel ends all processes of such a namespace with its process 1.
    """
    try:
        return os.readlink("/proc/self/ns/pid") != _HOST_NAMESPACE
    except OSError:  # a laptop without /proc
        return False


def groups(
    controller: str, membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup"
) -> Iterator[tuple[str, int]]:
    """Yield candidates for the directory of this control group, the likeliest one first.

    Each comes with its version, for example ``("/sys/fs/cgroup/system.slice/job", 2)``.

    Args:
        controller: Name of the controller, for example ``memory``. In version 2 all controllers
            share one directory.
        membership: File with the groups of this process.
        root: Mount point of the groups.
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
        # Inside a container the path may be the host's, which the container does not see. Then the
        # mount point is this process's group.
        yield f"{directory}/{path.strip('/')}".rstrip("/"), version
        yield directory, version


def cpu_quota(membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Return the CPU time that this control group may use, in CPUs, rounded up; None: no limit.

    The groups above this one may have a lower limit: the lowest one counts. ``docker run --cpus``
    and Kubernetes' limits.cpu set the limit; the CPUs of sched_getaffinity(2) do not show it.

    Args:
        membership: File with the groups of this process.
        root: Mount point of the groups.
    """
    quotas = []
    for directory, version in groups("cpu", membership, root):
        for group in (Path(directory), *Path(directory).parents):
            if not f"{group}/".startswith(f"{root}/"):
                break
            with contextlib.suppress(OSError, ValueError):
                # Microseconds of CPU time in a period. Without a limit the quota is "max", which is
                # no number, in version 2, and -1 in version 1.
                if version == 2:
                    quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
                else:
                    quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
                    period = (group / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
                if int(quota) > 0:
                    # Rounded up.
                    quotas.append(-(-int(quota) // int(period)))
    return min(quotas, default=None)


def why_no_thread() -> tuple[str, str]:
    """Return the probable reason why a thread could not be started, and the advice."""
    if _try_clone3() == errno.EPERM:
        reason = "this container may not start threads: its seccomp profile refuses clone3"
        advice = (
            "update the host's container engine and libseccomp, or start it with --security-opt"
            " seccomp=unconfined"
        )
        return reason, advice
    limit = process_limit()
    advice = "raise that limit" if limit else "look at its limits of processes and of memory"
    return f"this container may not start threads{limit}", advice


def process_limit() -> str:
    """Return the limit of processes and threads as the end of a sentence; "" if there is none.

    For example ``: user 1000 may have 4096 processes and threads (ulimit -u)``.
    """
    import resource

    limits = []
    for directory, _ in groups("pids"):
        with contextlib.suppress(OSError, ValueError):
            number = int(Path(directory, "pids.max").read_text(encoding="ascii"))
            words = f"the pids limit of this container is {number} (docker run --pids-limit)"
            limits.append((number, words))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid():  # root has no such limit
        words = f"user {os.geteuid()} may have {soft} processes and threads (ulimit -u)"
        limits.append((soft, words))
    if not limits:
        return ""
    _, lowest = min(limits)
    return f": {lowest}"


def _try_clone3() -> int:
    """Return the error number of a clone3 without arguments: EINVAL if the call is allowed.

    Such a call starts nothing. EPERM means that a seccomp profile refuses the call.
    """
    import ctypes

    kernel = ctypes.CDLL(None, use_errno=True)
    kernel.syscall(_CLONE3, None, 0)
    return ctypes.get_errno()
