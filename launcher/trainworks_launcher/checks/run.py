"""Run the checks of a host: read its state, query its driver, and return the problems."""

from __future__ import annotations

import os

from trainworks_launcher.checks import FAILED, GPU_SECONDS, QUICK_SECONDS, Checks, Finding
from trainworks_launcher.checks.host_state import read_host_state
from trainworks_launcher.checks.rules import find_problems

_OTHER_SECONDS = 0.5
"""Time for all but the driver, with a wide margin."""

_PERSISTENCE = "/run/nvidia-persistenced/socket"
"""Socket of the daemon that keeps the driver running when no program uses a GPU.

NVIDIA's container runtime mounts it.
"""


def run_checks(checks: Checks) -> tuple[Finding, ...]:
    """Check this host: read its state, query its driver, and return the problems, failures first.

    The driver is queried only if GPUs are expected. That is limited to ``QUICK_SECONDS``, and to
    ``GPU_SECONDS`` more for each GPU that the driver has to start first. Nothing is logged.
    """
    gpus = None
    if checks.gpus:
        # Imported late, because a host without GPUs starts sooner without it.
        from trainworks_launcher.checks.gpus import query_gpus

        seconds = QUICK_SECONDS - _OTHER_SECONDS
        # Without that daemon the driver starts each GPU first.
        if not os.path.exists(_PERSISTENCE):  # noqa: PTH110
            seconds += checks.gpus * GPU_SECONDS
        gpus = query_gpus(seconds)
    return find_problems(checks, read_host_state(checks.interface, checks.directories, gpus))


_FAILURE = "check failed: "


def failures_in(output: bytes) -> list[str]:
    """Return the failures in the output of programs/check.py, which prints ``line_of`` a finding.

    Each without the prefix; ``[]`` for none.
    """
    lines = output.decode("utf-8", "replace").splitlines()
    failures = [line for line in lines if line.startswith(f"trainworks: {_FAILURE}")]
    return [line.partition(_FAILURE)[2] for line in failures]


def line_of(finding: Finding) -> str:
    """Return the line of a finding for the log: ``check failed: ...`` or ``warning: ...``."""
    prefix = _FAILURE if finding.severity == FAILED else "warning: "
    return f"{prefix}{finding}"
