"""The variables by which a process knows its rank: those of torchrun first,
then those of Open MPI's mpirun.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
"""torchrun's variables, and what Open MPI calls the same."""

SMDATAPARALLEL = {
    "SMDATAPARALLEL_LOCAL_RANK": "LOCAL_RANK",
    "SMDATAPARALLEL_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
}
"""Names that scripts for smdistributed.dataparallel read, and torchrun's."""

ADDRESS, PORT = "127.0.0.1", "7777"
"""The rendezvous of a job that has no ``MASTER_ADDR`` and ``MASTER_PORT``: as
documented, on one host.
"""


@dataclass(frozen=True)
class Ranks:
    """The place of a process in its job.

    Attributes:
        rank: Its rank among all processes.
        size: Their number.
        local_rank: Its rank among the processes of its host.
        local_size: Their number.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


def ranks_of(environment: Mapping[str, str]) -> Ranks:
    """Return the place that the variables give; a process without them is a job of one.

    Raises:
        ValueError: A variable is not an integer. It says which.
    """
    return Ranks(
        _number(environment, "RANK", 0),
        _number(environment, "WORLD_SIZE", 1),
        _number(environment, "LOCAL_RANK", 0),
        _number(environment, "LOCAL_WORLD_SIZE", 1),
    )


def complete(environment: MutableMapping[str, str]) -> None:
    """Set the variables that are missing and follow from those that are there.

    In no job it sets nothing.
    """
    for name, other in (*OPEN_MPI.items(), *SMDATAPARALLEL.items()):
        if not environment.get(name) and environment.get(other):
            environment[name] = environment[other]


def set_rendezvous(environment: MutableMapping[str, str], port: int | None = None) -> None:
    """Set ``MASTER_ADDR`` and ``MASTER_PORT`` where they are missing."""
    environment.setdefault("MASTER_ADDR", ADDRESS)
    environment.setdefault("MASTER_PORT", PORT if port is None else str(port))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    for each in (name, OPEN_MPI[name]):
        if text := environment.get(each):
            try:
                return int(text)
            except ValueError:
                raise ValueError(
                    f"the environment variable {each}={text!r} is not an integer"
                ) from None
    return default
