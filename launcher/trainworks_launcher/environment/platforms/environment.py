"""Hosts that are described to torch by variables of their own: Volcano, older
PyTorchJobs, Run:ai, manifests by hand.

``MASTER_ADDR`` with ``WORLD_SIZE`` and ``RANK``, or with ``NNODES`` (RunPod, Lightning AI:
``NUM_NODES``) and ``NODE_RANK``: one process on each host, or one ``train``. Only the leader's
address is known. A script that runs without a distribution reads the variables itself, so it gets
them as they are. Sources: PyTorch, torch.distributed, environment variable initialization;
torchrun, Definitions; volcano-sh/volcano,
pkg/controllers/job/plugins/distributed-framework/pytorch/pytorch.go; kubeflow/training-operator
before 1.7, pkg/controller.v1/pytorch/envvar.go.
"""

from __future__ import annotations

from types import MappingProxyType

from trainworks_launcher.contract import names
from trainworks_launcher.environment.platforms import NONE, Description, Sources
from trainworks_launcher.environment.platforms.common import (
    Reader,
    config_of,
    find_rendezvous,
    is_loopback,
    numbered,
    read_number,
)

_ADVICE = (
    "set MASTER_ADDR, NNODES and NODE_RANK on every host (or MASTER_ADDR, WORLD_SIZE and RANK,"
    f" which count hosts then), or {names.HOSTS_VARIABLE} and {names.HOST_VARIABLE}; a job of one"
    " host needs none of them: unset them"
)

_SAID_OF_HOSTS = MappingProxyType(
    {"mpirun": ("WORLD_SIZE", "RANK"), "ranks": ("WORLD_SIZE", "RANK")}
)
"""They count hosts: a rank of mpirun that reads them would take itself for another."""

_PER_HOST = (
    "NPROC_PER_NODE",
    "PROCESSES_PER_NODE",
    "PROCS_PER_NODE",
    "GPUS_PER_NODE",
    "NUM_GPUS_PER_NODE",
)
"""Variables with the processes of each host, as manifests call them: beside
them WORLD_SIZE mostly counts processes.
"""


def describe(sources: Sources) -> Description:
    """Return the hosts.

    They are called by their numbers; only the leader's address has to lead to one.
    """
    variables = sources.variables
    reader = Reader(variables, "the environment", _ADVICE)
    kept = find_rendezvous(variables)
    world, rank, node_rank = map(reader.optional, ("WORLD_SIZE", "RANK", "NODE_RANK"))
    by_ranks = {"WORLD_SIZE", "RANK"} <= {*variables} or "NODE_RANK" not in variables
    nodes = next((name for name in ("NNODES", "NUM_NODES") if name in variables), "NNODES")
    where = "WORLD_SIZE" if by_ranks and nodes not in variables else nodes
    if is_loopback(reader.optional("MASTER_ADDR")) and where == "WORLD_SIZE":
        if not {"WORLD_SIZE", "RANK"} & {*variables}:
            return Description(where="MASTER_ADDR", kept=kept)
        if world not in ("", "1"):
            elsewhere = f"WORLD_SIZE={world} with MASTER_ADDR={variables['MASTER_ADDR']}"
            waits = (
                f"{elsewhere}: a script that reads them waits for the other processes on this host"
            )
            return Description(where=where, kept=kept, ranks_elsewhere=elsewhere, warnings=(waits,))
    per_host = next(filter(None, map(reader.optional, _PER_HOST)), "")
    if (
        where == "WORLD_SIZE"
        and read_number(per_host) > 1
        and read_number(world)
        and read_number(world) % read_number(per_host) == 0
    ):
        fewer = read_number(world) // read_number(per_host)
        problem = (
            f"WORLD_SIZE={world} with {per_host} processes"
            " on each host may count processes, or hosts"
        )
        advice = (
            f"set NNODES to the number of hosts ({fewer},"
            f" or {world}) and NODE_RANK to this one's, from 0"
        )
        reader.refuse(problem, "WORLD_SIZE", advice=advice)
        return Description(problems=reader.problems)
    count = reader.integer(where, least=1)
    if (
        where == nodes
        and rank
        and (world not in ("", "1", str(count)) or node_rank not in ("", rank))
    ):
        elsewhere = f"RANK={rank} with {nodes}={count} and NODE_RANK={node_rank}"
        return Description(
            where=where, kept=kept, ranks_elsewhere=elsewhere, problems=reader.problems
        )
    if where == nodes:
        index_of = ("NODE_RANK", "RANK") if world == str(count) else ("NODE_RANK",)
        if world.isdecimal() and int(world) % count:
            reader.refuse(
                f"WORLD_SIZE={world} is not a multiple of {nodes}={count}", "WORLD_SIZE", where
            )
    else:
        index_of = ("RANK",)
        if node_rank and rank and node_rank != rank:
            problem = (
                f"RANK is {rank}, NODE_RANK is {node_rank},"
                " and NNODES does not say how many hosts there are"
            )
            reader.refuse(problem, "RANK", "NODE_RANK")
    if count == 1 and not reader.problems and reader.optional(*index_of) in ("", "0"):
        return Description(where=where, kept=kept)
    index = reader.index(*index_of, count=count)
    address = reader.address("MASTER_ADDR")
    if reader.problems:
        return Description(problems=reader.problems)
    hosts = numbered(count)
    counted = (
        f"WORLD_SIZE={world} is taken for the number of hosts; NNODES and NODE_RANK would say it"
    )
    return Description(
        why=counted if where == "WORLD_SIZE" else NONE.why,
        resource_config=config_of(hosts, hosts[index]),
        where=where,
        leader_address=address,
        names_resolve=False,
        kept=kept,
        hidden=_SAID_OF_HOSTS,
    )
