"""Checks of a host before the first step: expected values (``Checks``), and problems (``Finding``).
Pure.

``plan.host_checks`` makes Checks from a job. ``host_state`` reads the kernel's files, ``gpus``
queries nvidia-smi, and ``rules`` finds problems in both. If the driver is queried, the checks run
in a process of their own (``programs/check.py``). A host without GPUs is checked in the launcher
itself, in two milliseconds with the imports.
"""

from __future__ import annotations

from typing import NamedTuple

from trainworks_launcher.contract import names

QUICK, OFF = names.CHECK_LEVELS

QUICK_SECONDS = 3.0
"""Limit of QUICK in all, where the driver runs already."""

GPU_SECONDS = 3.0
"""Time for each GPU that the driver has to start first.

Source: NVIDIA, Driver Persistence, Overview.
"""

FAILED, WARNING = "failed", "warning"
"""Severities: a failed check ends the job, a warning is a line in the log."""


REPLACE = "replace this host; its platform repairs or replaces it if you report it"
"""Advice for broken hardware."""


def count_of(number: int, noun: str) -> str:
    """Write ``1 GPU`` or ``2 GPUs``."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


class Finding(NamedTuple):
    """A problem of a host.

    Attributes:
        severity: FAILED or WARNING.
        what: The problem, with figures.
        advice: Advice for a person.
    """

    severity: str
    what: str
    advice: str

    def __str__(self) -> str:
        """Return the line for logs and the failure text."""
        return f"{self.what}: {self.advice}"


class Checks(NamedTuple):
    """The expected values of one host.

    Attributes:
        gpus: Number of GPUs that the host seems to have; with any, the driver is queried.
        row_gpus: Number of GPUs in the instance table; 0 if not there.
        row_efa: Number of EFA devices in the instance table; 0 if not there.
        efa: Number of EFA devices that were seen; None if not known.
        instance_type: Type of the host.
        cuda: Version of the image's CUDA; ``""`` for none, or if the image has no manifest.
        minimum_driver: Oldest driver for that CUDA; ``""`` if not known.
        without_cuda: Whether the image has a manifest without CUDA.
        shared_memory: Whether the job runs on GPUs, and so needs more of /dev/shm than Docker's
            default.
        interface: Network interface to the other hosts; ``""`` if not known, or for one host.
        directories: Directories to which the job writes.
        visible_gpus: The GPUs that the job may use, by number or by UUID; None for all.
    """

    gpus: int = 0
    row_gpus: int = 0
    row_efa: int = 0
    efa: int | None = 0
    instance_type: str = ""
    cuda: str = ""
    minimum_driver: str = ""
    without_cuda: bool = False
    shared_memory: bool = False
    interface: str = ""
    directories: tuple[str, ...] = ()
    visible_gpus: tuple[str, ...] | None = None

    @property
    def needs_process(self) -> bool:
        """Whether a driver is queried, which may hang."""
        return self.gpus > 0
