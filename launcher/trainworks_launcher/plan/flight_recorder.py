"""torch's flight recorder: each rank keeps its last collectives, and writes
them down when NCCL's time-out is over.

``torchfrtrace`` reads the files. Sources: torch/csrc/distributed/c10d/FlightRecorder.hpp and
ProcessGroupNCCL.hpp, and PyTorch's page "ProcessGroupNCCL Environment Variables". Pure.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.job.job import Job

_RENAMED_IN = (2, 13)  # of torch
"""From this release on, the older names of the first two variables print a
warning in every rank.
"""

_ENTRIES = "2000"
"""Collectives that a rank keeps: what newer releases keep by default."""


def recorder_variables(job: Job) -> Mapping[str, str]:
    """Return the variables that switch the recorder on.

    None where torch has no NCCL, or the user has set them.
    """
    components = job.environment.manifest.components
    if "torch" not in components or "nccl" not in components:
        return MappingProxyType({})
    file = f"{job.environment.output}/{names.HANG_DIRECTORY}/flight-recorder-rank-"
    settings = (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), _ENTRIES),
        (names.RECORDER_FILES, file),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    )
    is_renamed = release(components["torch"]) >= _RENAMED_IN
    variables = {}
    for new_and_old, value in settings:
        if job.inherited.keys().isdisjoint(new_and_old):
            name = new_and_old[0] if is_renamed else new_and_old[-1]
            variables[name] = value
    return MappingProxyType(variables)


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, to be compared."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
