"""AWS Batch, multi-node parallel jobs. Pure.

Every node knows its index and the number of nodes; only the others know the main node's address,
and no node knows those of the others. So hosts are called by their numbers, and their addresses are
learned when they join the leader. Batch ends the job when the main node ends: the leader has to be
there. Source: AWS Batch user guide, mnp-env-vars.html.
"""

from __future__ import annotations

from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, config_of, numbered

_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
_ADVICE = "Batch sets them in every node of a multi-node parallel job: do not set or unset them"


def describe(sources: Sources) -> Description:
    """Return the nodes, the main node first."""
    reader = Reader(sources.variables, "AWS Batch", _ADVICE)
    count = reader.integer("AWS_BATCH_JOB_NUM_NODES", least=1)
    index = reader.index("AWS_BATCH_JOB_NODE_INDEX", count=count)
    main = reader.index("AWS_BATCH_JOB_MAIN_NODE_INDEX", count=count)
    known = {"AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_MAIN_NODE_INDEX"}
    is_main = not known & {*reader.missing} and index == main
    address = sources.address() if is_main else reader.text(_ADDRESS)
    if is_main and not address and count > 1:
        reader.refuse(
            "this is the main node, and it has no IPv4 address on a default route",
            "AWS_BATCH_JOB_NODE_INDEX",
        )
    if reader.problems:
        return Description(problems=reader.problems)
    names = numbered(count)
    return Description(
        resource_config=config_of(
            (names[main], *(name for name in names if name != names[main])), names[index]
        ),
        where="AWS_BATCH_JOB_NUM_NODES",
        leader_address=address,
        names_resolve=False,
        job_id=reader.optional("AWS_BATCH_JOB_ID").partition("#")[0],
    )
