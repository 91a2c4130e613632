"""What the command line of ``train`` asks for: the program with its arguments,
and how it is started. Pure.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.modes import MODES


class Invocation(NamedTuple):
    """The words after ``train``.

    Attributes:
        program: The program and its arguments, which stood after ``--``; ``()``
            where the job's files name it.
        mode: A name of ``registry.MODES`` that has a switch, or ``none``;
            ``""`` if it is not given.
        processes_per_host: Processes on each host; 0 if it is not given.
        restarts: How often the ranks are started again after a failure; 0 if it is not given.
    """

    program: tuple[str, ...] = ()
    mode: str = ""
    processes_per_host: int = 0
    restarts: int = 0

    @property
    def hyperparameters(self) -> Mapping[str, Json]:
        """The same as the reserved hyperparameters that a job's file would have."""
        found: dict[str, Json] = {}
        if self.mode and MODES[self.mode].switch:
            found[MODES[self.mode].switch] = True
        if self.processes_per_host:
            found[names.PROCESSES_PER_HOST] = self.processes_per_host
        if self.restarts:
            found[names.MAX_RESTARTS] = self.restarts
        return MappingProxyType(found)


NOTHING_ASKED = Invocation()
"""``train`` alone."""
