"""Slurm: ``srun`` starts the launcher once per node, or once per rank. Pure.

One task per node (``srun --ntasks-per-node=1 train ...``): the launcher starts the ranks of its
node, in any mode. Several tasks per node (``--ntasks-per-node=8``): each task is a rank, and each
launcher starts the script once. Source: srun(1), OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.platforms import Description, Sources, Tasks
from trainworks_launcher.environment.platforms.common import Reader, expand_nodes, make_config

_ADVICE = "start it in a job step: srun --ntasks-per-node=1 train ... (or one task per GPU)"

_FIRST_PORT = 61000
"""First port above the kernel's ephemeral range."""

_PORTS = 4536
"""Number of ports from _FIRST_PORT to 65535.

A port follows from the job's id, so that jobs on one node mostly have different ports: enroot's
rule for MASTER_PORT (conf/hooks/extra/50-slurm-pytorch.sh).
"""

_PMI = ("PMI_", "PMIX_")
"""Beginnings of the variables of Slurm's PMI server and of its plugins (``PMIX_MCA_``), which the
image's Open MPI does not have. Source: enroot, conf/hooks/extra/50-slurm-pmi.sh.
"""

HIDDEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"mpirun": ("SLURM_", *_PMI), "ranks": _PMI}
)
"""``Description.hidden``.

With SLURM_ variables mpirun starts its daemons by srun, which the image does not have. With PMI
variables mpirun reads its own place as a rank of srun, and its ranks connect to Slurm's server
instead of mpirun's.
"""


def describe(sources: Sources) -> Description:
    """Return the nodes of the job step. A batch script of one node counts as a step of one task.

    Nothing is raised: ``problems`` has the variables that are missing, wrong or contradictory.
    """
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
    is_step = bool(reader.optional("SLURM_STEP_ID", "SLURM_STEPID"))
    if not is_step and reader.optional("SLURM_JOB_NUM_NODES") == "1":
        host = reader.optional("SLURMD_NODENAME") or sources.hostname
        return _described(make_config((host,), host), "SLURMD_NODENAME", job, None, reader)

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
    # The variables of one step agree, unless a person has changed some of them.
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
    place = None
    if max(counts) > 1:  # each task is a rank
        place = Tasks(rank, local_rank, counts)
    return _described(
        make_config(hosts, hosts[node]), "SLURM_STEP_NODELIST", job + step, place, reader
    )


def _described(
    config: Mapping[str, Json], where: str, number: int, tasks: Tasks | None, reader: Reader
) -> Description:
    """Return the description of a job step.

    Args:
        config: The hosts, as a resource config.
        where: Variable with the hosts.
        number: Sum of the job's and the step's id, from which the ports follow.
        tasks: This process's place among the ranks; None: the launcher starts the ranks.
        reader: Reader of the variables.
    """
    job_id = reader.optional("SLURM_JOB_ID", "SLURM_JOBID")
    step = reader.optional("SLURM_STEP_ID", "SLURM_STEPID")
    if step not in ("", "0"):
        job_id += f".{step}"
    gpus = None
    # Not set in a job that asks for no GPUs: then the container's devices decide.
    on_node = reader.optional("SLURM_GPUS_ON_NODE")
    if on_node.isdecimal():
        gpus = int(on_node)
    return Description(
        resource_config=config,
        where=where,
        gpus=gpus,
        tasks=tasks,
        # Half of the range apart: two jobs with near ids do not take each other's ports.
        control_port=_FIRST_PORT + (number + _PORTS // 2) % _PORTS,
        master_port=_FIRST_PORT + number % _PORTS,
        job_id=job_id,
        hidden=HIDDEN,
        problems=reader.problems,
    )


def expand_counts(listed: str) -> tuple[int, ...]:
    """Return the number of tasks on each node. Raises ValueError for another form.

    >>> expand_counts("8(x2),4")
    (8, 8, 4)
    """
    counts: list[int] = []
    for entry in listed.replace(" ", "").split(","):
        match = re.fullmatch(r"([1-9]\d{0,5})(?:\(x([1-9]\d{0,4})\))?", entry)
        if not match:
            raise ValueError(f"{listed!r} is not a list of tasks per node")
        count, nodes = int(match.group(1)), int(match.group(2) or 1)
        counts += [count] * nodes
    return tuple(counts)
