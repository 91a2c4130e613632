"""Checks of a host before the first step: what is asked (``Checks``), and what is found
(``Finding``). Pure.

``plan.host_checks`` makes Checks from a job. ``look`` reads the kernel's files, ``rules`` says what
they mean. ``gpus`` asks nvidia-smi. ``programs/check.py`` is the process that does it where the
driver is asked; a host without GPUs is looked at in the launcher itself, which costs two
milliseconds with its loading.
"""

from __future__ import annotations

from typing import NamedTuple

from trainworks_launcher.contract import names

QUICK, OFF = names.CHECK_LEVELS

QUICK_SECONDS = 3.0
"""The most that QUICK may take in all, where the driver is at work already."""

GPU_SECONDS = 3.0
"""What each GPU takes more where the driver starts it first.

Source: NVIDIA, Driver Persistence, Overview.
"""

FAILED, WARNING = "failed", "warning"
"""Severities: a failed check ends the job, a warning is a line in the log."""


REPLACE = "replace this host; its platform repairs or replaces it if you report it"
"""Advice where the hardware is broken."""


def count_of(number: int, what: str) -> str:
    """Return ``1 GPU`` or ``2 GPUs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


class Finding(NamedTuple):
    """Something that is wrong with a host.

    Attributes:
        severity: FAILED or WARNING.
        what: What is wrong, with figures.
        advice: What to do.
    """

    severity: str
    what: str
    advice: str

    def __str__(self) -> str:
        """Return the line for logs and the failure text."""
        return f"{self.what}: {self.advice}"


class Checks(NamedTuple):
    """What is checked on one host, and what is expected of it.

    Attributes:
        gpus: GPUs that the host seems to have; its driver is asked if there are any.
        visible_gpus: Those that the job may use, by number or by UUID, and that
            are judged; None: all.
        row_gpus: GPUs that the instance table says; 0 if it does not.
        row_efa: EFA devices that the instance table says; 0 if it does not.
        efa: EFA devices that were seen; None if they cannot be known.
        instance_type: Type of the host.
        cuda: Version of the image's CUDA; ``""`` if it has none, or does not say.
        minimum_driver: Oldest driver that runs it; ``""`` if the image does not say.
        without_cuda: Whether the image says what it has, and CUDA is not in it.
        shared_memory: Whether the job needs more of /dev/shm than Docker's
            default: it runs on GPUs.
        interface: Network interface to the other hosts; ``""`` if none is
            known, or there are no others.
        directories: Where the job writes.
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
        """Whether a driver is asked, which may hang."""
        return self.gpus > 0
