"""Runs the checks of a host: looks, asks the driver. Takes Checks, returns findings."""

from __future__ import annotations

import os

from trainworks_launcher.checks import FAILED, GPU_SECONDS, QUICK_SECONDS, Checks, Finding
from trainworks_launcher.checks.host_state import look
from trainworks_launcher.checks.rules import judge

_OTHER_SECONDS = 0.5
"""What all but the driver takes, with a wide margin."""


_PERSISTENCE = "/run/nvidia-persistenced/socket"
"""Of the daemon that keeps the driver at work when no program uses a GPU.

NVIDIA's container runtime mounts it.
"""


def run(asked: Checks) -> tuple[Finding, ...]:
    """Check this host."""
    gpus = None
    if asked.gpus:
        from trainworks_launcher.checks.gpus import ask  # a host without GPUs starts sooner

        starting = 0.0 if os.path.exists(_PERSISTENCE) else asked.gpus * GPU_SECONDS  # noqa: PTH110
        gpus = ask(QUICK_SECONDS - _OTHER_SECONDS + starting)
    return judge(asked, look(asked.interface, asked.directories, gpus))


_FAILURE = "check failed: "


def failures_in(output: bytes) -> list[str]:
    """Return the failures that a process has printed with ``line_of``."""
    lines = output.decode("utf-8", "replace").splitlines()
    return [
        line.partition(_FAILURE)[2] for line in lines if line.startswith(f"trainworks: {_FAILURE}")
    ]


def line_of(finding: Finding) -> str:
    """Return the line of a finding for the log."""
    return f"{_FAILURE if finding.severity == FAILED else 'warning: '}{finding}"
