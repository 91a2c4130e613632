"""The command line of ``train``: the program with its arguments, and the options before. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.modes import MODES


class Invocation(NamedTuple):
    """The words after ``train``, for example ``--mode mpi -- python train.py``.

    Attributes:
        program: The words after ``--``: the program and its arguments; ``()`` if the job's files
            name the program.
        mode: Name of a mode with a switch (``SWITCHES`` in ``contract/modes.py``), or ``none``;
            ``""`` without the option.
        processes_per_host: Number of processes on each host; 0 without the option.
        restarts: How often the ranks are started again after a failure; 0 without the option.
    """

    program: tuple[str, ...] = ()
    mode: str = ""
    processes_per_host: int = 0
    restarts: int = 0

    @property
    def hyperparameters(self) -> Mapping[str, Json]:
        """The options as hyperparameters, for example ``{"sagemaker_mpi_enabled": True}``."""
        reserved: dict[str, Json] = {}
        if self.mode and MODES[self.mode].switch:
            reserved[MODES[self.mode].switch] = True
        if self.processes_per_host:
            reserved[names.PROCESSES_PER_HOST] = self.processes_per_host
        if self.restarts:
            reserved[names.MAX_RESTARTS] = self.restarts
        return MappingProxyType(reserved)


NOTHING_ASKED = Invocation()
"""``train`` without options and program: the job's files name the program."""
