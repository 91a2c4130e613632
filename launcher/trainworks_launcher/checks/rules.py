"""What the figures of a host mean: one function per subject, each yields findings. Pure.

A check fails where the job could only waste what it costs: it would train on the CPU, crash, or
give wrong results. All else is a warning. What does not apply (no GPU, an instance type that is not
known) yields nothing.
"""

from __future__ import annotations

from typing import Iterator

from trainworks_launcher.checks import FAILED, REPLACE, WARNING, Checks, Finding, count_of
from trainworks_launcher.checks.host_state import Seen

GIB = 1 << 30

SHARED_MEMORY_BYTES = GIB
"""Less is a warning on GPUs.

Data loaders with workers then die of SIGBUS (PyTorch, README: Using shared memory), and NCCL cannot
start on many of them.
"""

_DEFAULT_SHARED_MEMORY = 64 << 20
"""Docker's default.

Less is a warning everywhere: somebody has made it smaller, or there is none.
"""

DISK_BYTES = 2 * GIB
"""Less is a warning: checkpoints and packages hardly fit."""

DISK_FULL_BYTES = 16 << 20
"""Less fails: logs, requirements and the failure file cannot be written."""

CLOCK_SECONDS = 2.0
"""A larger difference between two hosts is a warning: logs are in the wrong order, and files of the
other host look new or old. AWS refuses signed requests from 5 minutes on.
"""


def version_of(text: str) -> tuple[int, ...]:
    """Return a driver's version as numbers: ``535.183.01`` is (535, 183, 1)."""
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def judge(asked: Checks, seen: Seen) -> tuple[Finding, ...]:
    """Return everything that is wrong with a host, failures first."""
    found: list[Finding] = []
    if seen.gpus is not None:
        from trainworks_launcher.checks.gpus import judge_gpus  # a host without GPUs starts sooner

        found = list(judge_gpus(asked, seen.gpus))
    found += [*_driver(asked, seen), *_counts(asked, seen), *_places(asked, seen)]
    if asked.interface and seen.interface_up is False:
        problem = (
            f"the network interface {asked.interface} is down,"
            " and the other hosts are reached by it"
        )
        advice = "bring it up, or name another one; replace the host if its link is broken"
        found.append(Finding(FAILED, problem, advice))
    return tuple(sorted(found, key=lambda finding: finding.severity != FAILED))


def _driver(asked: Checks, seen: Seen) -> Iterator[Finding]:
    gpus = max(asked.gpus, asked.row_gpus)
    if gpus and asked.without_cuda:  # a container without CUDA is given no GPU, and may be meant so
        yield Finding(
            WARNING, f"{count_of(gpus, 'GPU')} and an image without CUDA", "use an image for CUDA"
        )
    if (
        asked.minimum_driver
        and seen.driver
        and version_of(seen.driver) < version_of(asked.minimum_driver)
    ):
        problem = (
            f"the host's NVIDIA driver {seen.driver} is older than {asked.minimum_driver}, which"
            f" CUDA {asked.cuda or 'of this image'} needs"
        )
        yield Finding(
            FAILED, problem, "update the driver, use newer hosts, or an image for an older CUDA"
        )


def _counts(asked: Checks, seen: Seen) -> Iterator[Finding]:
    devices = seen.gpus.devices if seen.gpus is not None else {}
    present = min(asked.gpus, len(devices)) if devices else asked.gpus
    if asked.row_gpus > present and not asked.without_cuda:
        problem = (
            f"{asked.instance_type} has {count_of(asked.row_gpus, 'GPU')},"
            f" and this container has {present}"
        )
        yield Finding(FAILED, problem, f"pass all of them into the container, or {REPLACE}")
    if asked.efa and asked.efa < asked.row_efa:
        # None at all is said where EFA is chosen: it matters between hosts.
        problem = (
            f"{asked.instance_type} has {count_of(asked.row_efa, 'EFA device')}, and this container"
            f" has {asked.efa}"
        )
        yield Finding(
            WARNING,
            problem,
            f"pass all of them into the container; if the host has fewer, {REPLACE}",
        )


def _places(asked: Checks, seen: Seen) -> Iterator[Finding]:
    size = seen.shared_memory
    least = SHARED_MEMORY_BYTES if asked.shared_memory else _DEFAULT_SHARED_MEMORY
    if size is not None and size < least:
        problem = f"/dev/shm has {_size(size)}: data loaders with workers may die of SIGBUS"  # noqa: S108
        advice = (
            "start the container with --shm-size, or --ipc=host;"
            " Kubernetes: an emptyDir of medium Memory"
        )
        yield Finding(WARNING, problem, advice)
    for directory, free in seen.free.items():
        if free < DISK_BYTES:
            severity = FAILED if free < DISK_FULL_BYTES else WARNING
            yield Finding(
                severity,
                f"{directory} has {_size(free)} of free disk",
                "use a larger volume, or free some",
            )


# --- between hosts --------------------------------------------------------------------------------
def clock(host: str, difference: float, uncertainty: float) -> Finding | None:
    """Return a warning if the clock of a host and the leader's differ.

    Args:
        host: The host.
        difference: Its clock less the leader's, in seconds.
        uncertainty: Seconds by which ``difference`` may be wrong: half of the round trip.
    """
    if abs(difference) - uncertainty <= CLOCK_SECONDS:
        return None
    way = "ahead of" if difference > 0 else "behind"
    problem = f"the clock of {host} is {abs(difference):.1f} s {way} the leader's"
    return Finding(
        WARNING,
        problem,
        "synchronize the clocks (chrony, NTP): logs, certificates and signed requests need it",
    )


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
