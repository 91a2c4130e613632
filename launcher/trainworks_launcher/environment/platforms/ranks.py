"""Ranks of another starter: mpirun, torchrun, or an operator for TensorFlow. Pure.

For example ``mpirun -n 8 train script.py`` starts this process as one of eight. The launcher then
starts the script once, and leaves the starter's variables as they are, because the script finds
its rank in these variables. The launcher starts no ranks of its own: each of the eight processes
would start all ranks.

Sources: Open MPI, mpirun(1), environment variables; PMI-1, PMI_SIZE; Cray ALPS, aprun(1);
MVAPICH2, MV2_COMM_WORLD_SIZE; torchrun, Environment Variables; TensorFlow, Distributed training,
TF_CONFIG.
"""

from __future__ import annotations

from typing import Mapping

from trainworks_launcher.contract.json_values import decode, mapping
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import RENDEZVOUS

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "ALPS_APP_PE", "HOROVOD_RANK")
_TORCHRUN_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
_TENSORFLOW_VARIABLE = "TF_CONFIG"


def describe(sources: Sources) -> Description:
    """Return a job of this one process, with the variable that counts the other ranks."""
    where = "the environment"
    if _TENSORFLOW_VARIABLE in sources.variables:
        where = _TENSORFLOW_VARIABLE
    elsewhere = find_other_ranks(sources.variables)
    return Description(where=where, ranks_elsewhere=elsewhere, kept=RENDEZVOUS)


def find_other_ranks(variables: Mapping[str, str]) -> str:
    """Return the variable by which this process is one of several ranks, as ``PMI_SIZE=8``.

    ``""`` if there is no such variable.
    """
    sizes = [name for name in _SIZE_VARIABLES if name in variables]
    if any(name in variables for name in _TORCHRUN_VARIABLES):
        sizes += [name for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if name in variables]
    for name in sizes:
        if variables[name].strip() != "1":
            return f"{name}={variables[name]}"
    # A rank without a number of ranks is one of several, as far as is known.
    if not sizes:
        for name in (*_RANK_VARIABLES, *_TORCHRUN_VARIABLES):
            if name in variables:
                return f"{name}={variables[name]}"
    if _TENSORFLOW_VARIABLE in variables and count_tasks(variables[_TENSORFLOW_VARIABLE]) != 1:
        return _TENSORFLOW_VARIABLE
    return ""


def count_tasks(config: str) -> int:
    """Return the number of tasks in a TF_CONFIG.

    For example 3 for ``{"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}}``; 1 if the text
    has no cluster, 0 if it cannot be read.
    """
    try:
        cluster = mapping(mapping(decode(config)).get("cluster"))
    except ValueError:
        return 0
    if not cluster:
        return 1
    count = 0
    for tasks in cluster.values():
        if isinstance(tasks, (list, dict)):
            count += len(tasks)
    return count
