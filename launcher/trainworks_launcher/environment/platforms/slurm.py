"""Slurm: ``srun`` starts the launcher once per node, or once per rank. Pure.

One task per node (``srun --ntasks-per-node=1 train ...``): the launcher starts
the ranks of its node, in any mode.
Several tasks per node (``--ntasks-per-node=8``): each task is a rank, and the launcher starts the
script in it. The variables are those of srun(1), OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.platforms import Description, Sources, Tasks
from trainworks_launcher.environment.platforms.common import Reader, config_of, expand_nodes

_ADVICE = "start it in a job step: srun --ntasks-per-node=1 train ... (or one task per GPU)"

_PORTS = (61000, 4536)
"""First port above the kernel's ephemeral range, and how many there are up to 65535: enroot's rule
for MASTER_PORT (conf/hooks/extra/50-slurm-pytorch.sh). Jobs that share a node then have different
ports, mostly.
"""

_OF_PMI = ("PMI_", "PMIX_")
"""Slurm's own server for MPI, and its plugins (``PMIX_MCA_``), which the image's Open MPI does not
have. Source: enroot, conf/hooks/extra/50-slurm-pmi.sh.
"""

HIDDEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"mpirun": ("SLURM_", *_OF_PMI), "ranks": _OF_PMI}
)
"""With these mpirun starts its daemons by srun, which is not in the image, and takes itself for a
rank of srun; and its own ranks look for Slurm's server instead of mpirun's.
"""


def describe(sources: Sources) -> Description:
    """Return the nodes of the job step. A batch script of one node counts as a step of one task."""
    reader = Reader(sources.variables, "Slurm", _ADVICE)
    job = reader.integer("SLURM_JOB_ID", "SLURM_JOBID")
    components = reader.optional("SLURM_HET_SIZE", "SLURM_PACK_SIZE")
    if components not in ("", "0", "1"):
        advice = (
            f"set {names.HOSTS_VARIABLE} to all components' hosts and {names.HOST_VARIABLE} to the"
            " host's own name"
        )
        problem = (
            f"a heterogeneous job has {components} components,"
            " and each step describes its own one only"
        )
        return Description(problems=(Problem(problem, "variable SLURM_HET_SIZE", advice),))
    if (
        not reader.optional("SLURM_STEP_ID", "SLURM_STEPID")
        and reader.optional("SLURM_JOB_NUM_NODES") == "1"
    ):
        host = reader.optional("SLURMD_NODENAME") or sources.hostname
        return _described(config_of((host,), host), "SLURMD_NODENAME", job, None, reader)
    step = reader.integer("SLURM_STEP_ID", "SLURM_STEPID")
    listed = reader.text("SLURM_STEP_NODELIST")
    nodes = reader.integer("SLURM_STEP_NUM_NODES", least=1)
    node = reader.integer("SLURM_NODEID")
    tasks = reader.integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    per_node = reader.text("SLURM_STEP_TASKS_PER_NODE")
    rank, local_rank = reader.integer("SLURM_PROCID"), reader.integer("SLURM_LOCALID")
    if reader.problems:
        return Description(problems=reader.problems)
    try:
        hosts = expand_nodes(listed)
        counts = expand_counts(per_node)
    except ValueError as error:
        reader.refuse(str(error), "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
        return Description(problems=reader.problems)
    if not len(hosts) == len(counts) == nodes:
        problem = (
            f"{listed!r} names {len(hosts)} node(s),"
            f" {per_node!r} {len(counts)}, and the step has {nodes}"
        )
        reader.refuse(
            problem, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"
        )
    elif sum(counts) != tasks or rank >= tasks:
        problem = f"task {rank} of {tasks}, and {per_node!r} are {sum(counts)} task(s)"
        reader.refuse(problem, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    elif node >= nodes or local_rank >= counts[node]:
        problem = f"task {local_rank} of node {node}, and the nodes have {per_node!r} task(s)"
        reader.refuse(problem, "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")
    if reader.problems:
        return Description(problems=reader.problems)
    place = Tasks(rank, local_rank, counts) if max(counts) > 1 else None
    return _described(
        config_of(hosts, hosts[node]), "SLURM_STEP_NODELIST", job + step, place, reader
    )


def _described(
    config: Mapping[str, Json], where: str, number: int, tasks: Tasks | None, reader: Reader
) -> Description:
    """Return the description of a job step. number: What the ports follow from."""
    first, count = _PORTS
    step = reader.optional("SLURM_STEP_ID", "SLURM_STEPID")
    on_node = reader.optional("SLURM_GPUS_ON_NODE")
    return Description(
        resource_config=config,
        where=where,
        gpus=int(on_node) if on_node.isdecimal() else None,
        tasks=tasks,
        control_port=first + (number + count // 2) % count,
        master_port=first + number % count,
        job_id=reader.optional("SLURM_JOB_ID", "SLURM_JOBID")
        + (f".{step}" if step not in ("", "0") else ""),
        hidden=HIDDEN,
        problems=reader.problems,
    )


def expand_counts(listed: str) -> tuple[int, ...]:
    """Return the tasks of each node. Raises ValueError for anything else.

    >>> expand_counts("8(x2),4")
    (8, 8, 4)
    """
    counts: list[int] = []
    for entry in listed.replace(" ", "").split(","):
        match = re.fullmatch(r"([1-9]\d{0,5})(?:\(x([1-9]\d{0,4})\))?", entry)
        if not match:
            raise ValueError(f"{listed!r} is not a list of tasks per node")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return tuple(counts)
