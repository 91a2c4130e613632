"""Read the environment variables with the rank of a process: torchrun's, else Open MPI's."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
"""Variable of torchrun -> variable of Open MPI with the same meaning."""

SMDATAPARALLEL = {
    "SMDATAPARALLEL_LOCAL_RANK": "LOCAL_RANK",
    "SMDATAPARALLEL_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
}
"""Variable that scripts for smdistributed.dataparallel read -> variable of torchrun."""

ADDRESS, PORT = "127.0.0.1", "7777"
"""The documented rendezvous of a job on one host, without ``MASTER_ADDR`` and ``MASTER_PORT``."""


@dataclass(frozen=True)
class Ranks:
    """The place of a process in its job.

    Attributes:
        rank: Rank among all processes.
        size: Number of all processes.
        local_rank: Rank among the processes of the host.
        local_size: Number of processes of the host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


def ranks_of(environment: Mapping[str, str]) -> Ranks:
    """Read the place of a process. Without the variables the job has one process.

    Raises:
        ValueError: A variable is not an integer. The text names the variable.
    """
    return Ranks(
        _number(environment, "RANK", 0),
        _number(environment, "WORLD_SIZE", 1),
        _number(environment, "LOCAL_RANK", 0),
        _number(environment, "LOCAL_WORLD_SIZE", 1),
    )


def complete(environment: MutableMapping[str, str]) -> None:
    """Set missing variables that follow from others. Outside a job nothing is set."""
    for name, other in (*OPEN_MPI.items(), *SMDATAPARALLEL.items()):
        if not environment.get(name) and environment.get(other):
            environment[name] = environment[other]


def set_rendezvous(environment: MutableMapping[str, str], port: int | None = None) -> None:
    """Set ``MASTER_ADDR`` and ``MASTER_PORT`` where they are missing."""
    environment.setdefault("MASTER_ADDR", ADDRESS)
    environment.setdefault("MASTER_PORT", PORT if port is None else str(port))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Read a variable of torchrun, or the one of Open MPI with the same meaning."""
    for variable in (name, OPEN_MPI[name]):
        text = environment.get(variable)
        if text:
            try:
                return int(text)
            except ValueError:
                raise ValueError(
                    f"the environment variable {variable}={text!r} is not an integer"
                ) from None
    return default
