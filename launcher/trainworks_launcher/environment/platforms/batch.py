"""AWS Batch, multi-node parallel jobs. Pure.

Batch tells every node its index and the number of nodes, and tells the other nodes the address of
the main node; no node gets the addresses of the others. So hosts have labels (``node-0``), and the
leader learns a host's address when the host joins. The leader runs on the main node, because Batch
ends the job when the main node ends. Source: AWS Batch user guide, mnp-env-vars.html.
"""

from __future__ import annotations

from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, make_config, make_labels

_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
_ADVICE = "Batch sets them in every node of a multi-node parallel job: do not set or unset them"


def describe(sources: Sources) -> Description:
    """Return the nodes, the main node first, by labels such as ``node-0``.

    On the main node this host's own address is looked up. Nothing is raised: ``problems`` has what
    is missing or wrong.
    """
    reader = Reader(sources.variables, "AWS Batch", _ADVICE)
    count = reader.integer("AWS_BATCH_JOB_NUM_NODES", least=1)
    index = reader.index("AWS_BATCH_JOB_NODE_INDEX", count=count)
    main = reader.index("AWS_BATCH_JOB_MAIN_NODE_INDEX", count=count)
    # The reader returns 0 for a missing index: only set variables say which node is the main one.
    is_main = index == main and not reader.missing
    if is_main:
        address = sources.address()
    else:
        address = reader.text(_ADDRESS)
    if is_main and not address and count > 1:
        reader.refuse(
            "this is the main node, and it has no IPv4 address on a default route",
            "AWS_BATCH_JOB_NODE_INDEX",
        )
    if reader.problems:
        return Description(problems=reader.problems)
    hosts = make_labels(count)
    leader = hosts[main]
    workers = [host for host in hosts if host != leader]
    return Description(
        resource_config=make_config((leader, *workers), hosts[index]),
        where="AWS_BATCH_JOB_NUM_NODES",
        leader_address=address,
        names_resolve=False,
        job_id=reader.optional("AWS_BATCH_JOB_ID").partition("#")[0],
    )
