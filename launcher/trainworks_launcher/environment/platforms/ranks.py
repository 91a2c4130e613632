"""Another program has started this process as one of several: mpirun, torchrun,
or an operator for TensorFlow. Pure.

The program may start the user's script itself, with the launcher in front of it. Then the script
finds its place by that program's variables, which it gets as they are. The launcher cannot start
ranks of its own here: each process would start all of them. Sources: Open MPI, mpirun(1),
environment variables; PMI-1, PMI_SIZE; Cray ALPS, aprun(1); MVAPICH2, MV2_COMM_WORLD_SIZE;
torchrun, Environment Variables; TensorFlow, Distributed training, TF_CONFIG.
"""

from __future__ import annotations

from typing import Mapping

from trainworks_launcher.contract.json_values import decode, mapping
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import RENDEZVOUS

_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "ALPS_APP_PE", "HOROVOD_RANK")
_TORCHRUN = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
_TENSORFLOW = "TF_CONFIG"


def describe(sources: Sources) -> Description:
    """Return a job of this one process.

    With the reason why it must not start others, if there are more.
    """
    return Description(
        where=_TENSORFLOW if _TENSORFLOW in sources.variables else "the environment",
        ranks_elsewhere=others(sources.variables),
        kept=RENDEZVOUS,
    )


def others(variables: Mapping[str, str]) -> str:
    """Return the variable that says that this process is one of several, with its value.

    ``""`` if none does.
    """
    sizes = [name for name in _SIZES if name in variables]
    if any(name in variables for name in _TORCHRUN):
        sizes += [name for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if name in variables]
    for name in sizes:
        if variables[name].strip() != "1":
            return f"{name}={variables[name]}"
    for name in (*_RANKS, *_TORCHRUN):
        if name in variables and not sizes:
            return f"{name}={variables[name]}"
    if _TENSORFLOW in variables and tasks_of(variables[_TENSORFLOW]) != 1:
        return _TENSORFLOW
    return ""


def tasks_of(config: str) -> int:
    """Return how many tasks a TF_CONFIG has.

    1 if it describes no cluster, 0 if it cannot be read.
    """
    try:
        cluster = mapping(mapping(decode(config)).get("cluster"))
    except ValueError:
        return 0
    return (
        sum(len(listed) for listed in cluster.values() if isinstance(listed, (list, dict)))
        if cluster
        else 1
    )
