"""Switch on torch's flight recorder: each rank writes its last collectives when NCCL times out.

``torchfrtrace`` reads the files. Sources: torch/csrc/distributed/c10d/FlightRecorder.hpp and
ProcessGroupNCCL.hpp, and PyTorch's page "ProcessGroupNCCL Environment Variables". Pure.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.job.job import Job

_FIRST_WITH_NEW_NAMES = (2, 13)
"""First release of torch that warns of the older names of two variables, in every rank."""

_ENTRIES = "2000"
"""Number of collectives that a rank keeps, the default of newer releases."""


class _Setting(NamedTuple):
    """A setting of the flight recorder.

    Attributes:
        variables: Names of its variable, the newest first.
        value: Value of the variable.
    """

    variables: tuple[str, ...]
    value: str


def recorder_variables(job: Job) -> Mapping[str, str]:
    """Return the variables of the flight recorder, without those that the container sets.

    Empty for an image without torch or without NCCL.
    """
    components = job.environment.manifest.components
    if "torch" not in components or "nccl" not in components:
        return MappingProxyType({})
    file = f"{job.environment.output}/{names.HANG_DIRECTORY}/flight-recorder-rank-"
    settings = (
        _Setting(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), _ENTRIES),
        _Setting(names.RECORDER_FILES, file),
        _Setting(("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    )
    has_new_names = release(components["torch"]) >= _FIRST_WITH_NEW_NAMES
    variables = {}
    for setting in settings:
        # The container sets the variable, by its newer or its older name: the user's choice.
        if not job.inherited.keys().isdisjoint(setting.variables):
            continue
        name = setting.variables[-1]
        if has_new_names:
            name = setting.variables[0]
        variables[name] = setting.value
    return MappingProxyType(variables)


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, for comparison: ``2.9.1+cu130`` is ``(2, 9)``."""
    numbers = re.findall(r"\d+", version)
    return tuple(map(int, numbers[:2]))
