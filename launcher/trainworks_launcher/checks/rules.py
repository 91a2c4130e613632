"""Find the problems of a host in its state: one function for each subject yields findings. Pure.

A check fails if the job could only waste money: it would train on the CPU, crash, or give wrong
results. All other problems are warnings. A subject that does not apply (no GPU, an unknown instance
type) yields nothing.
"""

from __future__ import annotations

from typing import Iterator

from trainworks_launcher.checks import FAILED, REPLACE, WARNING, Checks, Finding, count_of
from trainworks_launcher.checks.host_state import HostState

GIB = 1 << 30

SHARED_MEMORY_BYTES = GIB
"""Less is a warning on GPUs.

Data loaders with workers then die of SIGBUS (PyTorch, README: Using shared memory), and NCCL cannot
start on many of them.
"""

_DEFAULT_SHARED_MEMORY = 64 << 20
"""Docker's default. Less is a warning everywhere."""

DISK_BYTES = 2 * GIB
"""Less is a warning: there is hardly room for checkpoints and packages."""

DISK_FULL_BYTES = 16 << 20
"""Less fails: logs, requirements and the failure file cannot be written."""

CLOCK_SECONDS = 2.0
"""A larger difference between two hosts is a warning: logs are in the wrong order, and files of the
other host look too new or too old. AWS refuses signed requests from 5 minutes on.
"""


def version_of(text: str) -> tuple[int, ...]:
    """Parse a driver's version; parts that are not a number are left out.

    >>> version_of("535.183.01")
    (535, 183, 1)
    """
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def find_problems(checks: Checks, state: HostState) -> tuple[Finding, ...]:
    """Return all problems of a host, failures first; () for none. Nothing is read or logged.

    Args:
        checks: The expected values.
        state: The state of the host.
    """
    findings: list[Finding] = []
    if state.gpus is not None:
        # Imported late, because a host without GPUs starts sooner without it.
        from trainworks_launcher.checks.gpus import find_gpu_problems

        findings = list(find_gpu_problems(checks, state.gpus))
    findings += _check_driver(checks, state)
    findings += _check_numbers_of_devices(checks, state)
    findings += _check_space(checks, state)
    if checks.interface and state.interface_up is False:
        problem = (
            f"the network interface {checks.interface} is down,"
            " and the other hosts are reached by it"
        )
        advice = "bring it up, or name another one; replace the host if its link is broken"
        findings.append(Finding(FAILED, problem, advice))
    return tuple(sorted(findings, key=lambda finding: finding.severity != FAILED))


def _check_driver(checks: Checks, state: HostState) -> Iterator[Finding]:
    """Yield a finding for GPUs without CUDA in the image, and for a driver that is too old."""
    gpus = max(checks.gpus, checks.row_gpus)
    # A warning only, because it may be intended: a container without CUDA gets no GPU.
    if gpus and checks.without_cuda:
        yield Finding(
            WARNING, f"{count_of(gpus, 'GPU')} and an image without CUDA", "use an image for CUDA"
        )
    if not checks.minimum_driver or not state.driver:
        return
    if version_of(state.driver) < version_of(checks.minimum_driver):
        problem = (
            f"the host's NVIDIA driver {state.driver} is older than {checks.minimum_driver}, which"
            f" CUDA {checks.cuda or 'of this image'} needs"
        )
        advice = "update the driver, use newer hosts, or an image for an older CUDA"
        yield Finding(FAILED, problem, advice)


def _check_numbers_of_devices(checks: Checks, state: HostState) -> Iterator[Finding]:
    """Yield a finding if the container has fewer GPUs or EFA devices than the instance type."""
    present = checks.gpus
    if state.gpus is not None and state.gpus.devices:
        # The driver may know fewer GPUs than the container has device files.
        present = min(checks.gpus, len(state.gpus.devices))
    if checks.row_gpus > present and not checks.without_cuda:
        problem = (
            f"{checks.instance_type} has {count_of(checks.row_gpus, 'GPU')},"
            f" and this container has {present}"
        )
        yield Finding(FAILED, problem, f"pass all of them into the container, or {REPLACE}")
    if checks.efa and checks.efa < checks.row_efa:
        # No device at all is reported where EFA is chosen: it matters between hosts.
        problem = (
            f"{checks.instance_type} has {count_of(checks.row_efa, 'EFA device')},"
            f" and this container has {checks.efa}"
        )
        yield Finding(
            WARNING,
            problem,
            f"pass all of them into the container; if the host has fewer, {REPLACE}",
        )


def _check_space(checks: Checks, state: HostState) -> Iterator[Finding]:
    """Yield a finding if /dev/shm is small, and for each directory without free disk."""
    size = state.shared_memory
    least = SHARED_MEMORY_BYTES if checks.shared_memory else _DEFAULT_SHARED_MEMORY
    if size is not None and size < least:
        shown = _format_size(size)
        problem = f"/dev/shm has {shown}: data loaders with workers may die of SIGBUS"  # noqa: S108
        advice = (
            "start the container with --shm-size, or --ipc=host;"
            " Kubernetes: an emptyDir of medium Memory"
        )
        yield Finding(WARNING, problem, advice)
    for directory, free in state.free.items():
        if free < DISK_BYTES:
            severity = FAILED if free < DISK_FULL_BYTES else WARNING
            yield Finding(
                severity,
                f"{directory} has {_format_size(free)} of free disk",
                "use a larger volume, or free some",
            )


# --- between hosts --------------------------------------------------------------------------------
def clock(host: str, difference: float, uncertainty: float) -> Finding | None:
    """Return a warning if the clock of a host and the leader's surely differ by two seconds.

    None if they do not, or if the uncertainty is too large.

    Args:
        host: The host.
        difference: Its clock less the leader's, in seconds.
        uncertainty: Seconds by which ``difference`` may be wrong: half of the round trip.
    """
    if abs(difference) - uncertainty <= CLOCK_SECONDS:
        return None
    direction = "ahead of" if difference > 0 else "behind"
    problem = f"the clock of {host} is {abs(difference):.1f} s {direction} the leader's"
    return Finding(
        WARNING,
        problem,
        "synchronize the clocks (chrony, NTP): logs, certificates and signed requests need it",
    )


def _format_size(size: int) -> str:
    """Write bytes for people: ``1.5 GiB`` or ``64 MiB``."""
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / (1 << 20):.0f} MiB"
