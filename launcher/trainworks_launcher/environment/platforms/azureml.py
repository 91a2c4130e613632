"""Azure Machine Learning: a job on several nodes, one process on each. Pure.

Azure sets only the leader's address. With more processes on a node Azure starts every rank itself.
Source: Azure Machine Learning, Distributed GPU training guide, environment variables of a PyTorch
distribution.
"""

from __future__ import annotations

from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import (
    RENDEZVOUS,
    Reader,
    find_rendezvous,
    make_config,
    make_labels,
)
from trainworks_launcher.environment.platforms.ranks import find_other_ranks

_ADVICE = (
    "use distribution: type: pytorch with process_count_per_instance: 1, or set TRAINWORKS_HOSTS"
    " and TRAINWORKS_HOST"
)


def describe(sources: Sources) -> Description:
    """Return the nodes by their labels ``node-0``, ``node-1``, or this host alone.

    If Azure has started this process as one of several ranks, ``ranks_elsewhere`` says so. Nothing
    is raised: ``problems`` has the variables that are missing or wrong.
    """
    reader = Reader(sources.variables, "Azure Machine Learning", _ADVICE)
    count = reader.integer("AZUREML_NODE_COUNT", least=1)
    world = reader.optional("WORLD_SIZE")
    elsewhere = find_other_ranks(sources.variables)
    if world and not elsewhere:
        elsewhere = f"WORLD_SIZE={world}"
    # One process on each node: WORLD_SIZE counts the nodes, and train starts their ranks.
    if elsewhere and world != str(count):
        return Description(where="AZUREML_NODE_COUNT", ranks_elsewhere=elsewhere, kept=RENDEZVOUS)
    if count == 1 and not reader.problems:
        return Description(where="AZUREML_NODE_COUNT", kept=find_rendezvous(sources.variables))
    index = reader.index("NODE_RANK", count=count)
    address = reader.address("MASTER_ADDR")
    if reader.problems:
        return Description(problems=reader.problems)
    hosts = make_labels(count)
    return Description(
        resource_config=make_config(hosts, hosts[index]),
        where="AZUREML_NODE_COUNT",
        leader_address=address,
        names_resolve=False,
        kept=find_rendezvous(sources.variables),
    )
