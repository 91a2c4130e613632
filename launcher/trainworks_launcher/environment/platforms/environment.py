"""Reads the hosts from torch.distributed's own variables, as any manifest may set them. Pure.

Volcano, PyTorchJobs of older operators and Run:ai set these variables, too.
``MASTER_ADDR`` with ``WORLD_SIZE`` and ``RANK``, or with ``NNODES`` (RunPod, Lightning AI:
``NUM_NODES``) and ``NODE_RANK``: one process on each host, or one ``train``. Only the leader's
address is known. A script that runs without a distribution reads these variables itself, so the
launcher leaves them as they are.

Sources: PyTorch, torch.distributed, environment variable initialization; torchrun, Definitions;
volcano-sh/volcano, pkg/controllers/job/plugins/distributed-framework/pytorch/pytorch.go;
kubeflow/training-operator before 1.7, pkg/controller.v1/pytorch/envvar.go.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.environment.platforms import NONE, Description, Sources
from trainworks_launcher.environment.platforms.common import (
    Reader,
    find_rendezvous,
    is_loopback,
    make_config,
    make_labels,
    read_number,
)

_ADVICE = (
    "set MASTER_ADDR, NNODES and NODE_RANK on every host (or MASTER_ADDR, WORLD_SIZE and RANK,"
    f" which count hosts then), or {names.HOSTS_VARIABLE} and {names.HOST_VARIABLE}; a job of one"
    " host needs none of them: unset them"
)

_HIDDEN = MappingProxyType({"mpirun": ("WORLD_SIZE", "RANK"), "ranks": ("WORLD_SIZE", "RANK")})
"""Variables that count hosts: a rank of mpirun that reads them would take another rank's place."""

_PER_HOST = (
    "NPROC_PER_NODE",
    "PROCESSES_PER_NODE",
    "PROCS_PER_NODE",
    "GPUS_PER_NODE",
    "NUM_GPUS_PER_NODE",
)
"""Variables with the number of processes on each host, as manifests call them. In such a manifest
WORLD_SIZE mostly counts processes, not hosts.
"""


def describe(sources: Sources) -> Description:
    """Return the hosts by their labels: ``node-0``, ``node-1``, or this host alone.

    No host name is known; only the leader's address has to lead to a host. If another program has
    started this process as one of several ranks, ``ranks_elsewhere`` says so. Nothing is raised:
    ``problems`` has the variables that are missing, wrong or contradictory.
    """
    variables = sources.variables
    reader = Reader(variables, "the environment", _ADVICE)
    kept = find_rendezvous(variables)
    where = _find_count(variables)
    if where == "WORLD_SIZE":
        local = _find_local_job(reader, variables)
        if local is not None:
            return local
        _refuse_ambiguous_world_size(reader)
        if reader.problems:
            return Description(problems=reader.problems)

    count = reader.integer(where, least=1)
    why = NONE.why
    if where == "WORLD_SIZE":
        world = reader.optional("WORLD_SIZE")
        why = (
            f"WORLD_SIZE={world} is taken for the number of hosts;"
            " NNODES and NODE_RANK would say it"
        )
        _check_ranks(reader)
        indices: tuple[str, ...] = ("RANK",)
    else:
        elsewhere = _find_rank(reader, where, count)
        if elsewhere:
            return Description(
                where=where, kept=kept, ranks_elsewhere=elsewhere, problems=reader.problems
            )
        indices = _find_indices(reader, where, count)
    is_first = reader.optional(*indices) in ("", "0")
    if count == 1 and is_first and not reader.problems:
        return Description(where=where, kept=kept)

    index = reader.index(*indices, count=count)
    address = reader.address("MASTER_ADDR")
    if reader.problems:
        return Description(problems=reader.problems)
    hosts = make_labels(count)
    return Description(
        why=why,
        resource_config=make_config(hosts, hosts[index]),
        where=where,
        leader_address=address,
        names_resolve=False,
        kept=kept,
        hidden=_HIDDEN,
    )


def _find_count(variables: Mapping[str, str]) -> str:
    """Return the variable with the number of hosts: NNODES, NUM_NODES or WORLD_SIZE.

    The variable may be missing. The reader then notes the one that should be set.
    """
    for name in ("NNODES", "NUM_NODES"):
        if name in variables:
            return name
    has_ranks = "WORLD_SIZE" in variables and "RANK" in variables
    if has_ranks or "NODE_RANK" not in variables:
        return "WORLD_SIZE"
    return "NNODES"


def _find_local_job(reader: Reader, variables: Mapping[str, str]) -> Description | None:
    """Return a job of this host if MASTER_ADDR is a loopback address; None if it may have more.

    For example ``MASTER_ADDR=localhost`` with ``WORLD_SIZE=4``: four processes of this host.
    """
    if not is_loopback(reader.optional("MASTER_ADDR")):
        return None
    kept = find_rendezvous(variables)
    if "WORLD_SIZE" not in variables and "RANK" not in variables:
        return Description(where="MASTER_ADDR", kept=kept)
    world = reader.optional("WORLD_SIZE")
    if world in ("", "1"):
        return None
    elsewhere = f"WORLD_SIZE={world} with MASTER_ADDR={variables['MASTER_ADDR']}"
    warning = f"{elsewhere}: a script that reads them waits for the other processes on this host"
    return Description(
        where="WORLD_SIZE", kept=kept, ranks_elsewhere=elsewhere, warnings=(warning,)
    )


def _refuse_ambiguous_world_size(reader: Reader) -> None:
    """Note a problem if WORLD_SIZE may count processes: WORLD_SIZE=16 with NPROC_PER_NODE=8."""
    world_text, per_host_text = reader.optional("WORLD_SIZE"), reader.optional(*_PER_HOST)
    world, per_host = read_number(world_text), read_number(per_host_text)
    # A number that is no multiple cannot count processes.
    if per_host < 2 or world == 0 or world % per_host:
        return
    problem = (
        f"WORLD_SIZE={world_text} with {per_host_text} processes"
        " on each host may count processes, or hosts"
    )
    advice = (
        f"set NNODES to the number of hosts ({world // per_host},"
        f" or {world_text}) and NODE_RANK to this one's, from 0"
    )
    reader.refuse(problem, "WORLD_SIZE", advice=advice)


def _check_ranks(reader: Reader) -> None:
    """Note a problem if RANK and NODE_RANK differ, and only WORLD_SIZE is a count."""
    rank, node_rank = reader.optional("RANK"), reader.optional("NODE_RANK")
    if rank and node_rank and node_rank != rank:
        problem = (
            f"RANK is {rank}, NODE_RANK is {node_rank},"
            " and NNODES does not say how many hosts there are"
        )
        reader.refuse(problem, "RANK", "NODE_RANK")


def _find_rank(reader: Reader, where: str, count: int) -> str:
    """Return why this process is one rank of several on its host; ``""`` if it is not.

    For example WORLD_SIZE=16 and RANK=3 with NNODES=2: another program has started 16 ranks.

    Args:
        reader: Reader of the variables.
        where: Variable with the number of hosts.
        count: Number of hosts.
    """
    world, rank = reader.optional("WORLD_SIZE"), reader.optional("RANK")
    node_rank = reader.optional("NODE_RANK")
    counts_hosts = world in ("", "1", str(count)) and node_rank in ("", rank)
    if not rank or counts_hosts:
        return ""
    return f"RANK={rank} with {where}={count} and NODE_RANK={node_rank}"


def _find_indices(reader: Reader, where: str, count: int) -> tuple[str, ...]:
    """Return the variables that may have this host's index, the first one before the second.

    Note a problem if WORLD_SIZE does not fit the number of hosts.

    Args:
        reader: Reader of the variables.
        where: Variable with the number of hosts.
        count: Number of hosts.
    """
    world = reader.optional("WORLD_SIZE")
    if world.isdecimal() and int(world) % count:
        reader.refuse(
            f"WORLD_SIZE={world} is not a multiple of {where}={count}", "WORLD_SIZE", where
        )
    if world == str(count):  # WORLD_SIZE counts hosts, and RANK is a host's index
        return ("NODE_RANK", "RANK")
    return ("NODE_RANK",)
