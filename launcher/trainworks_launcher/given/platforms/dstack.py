"""dstack: tasks on several nodes. Pure.

Source: dstackai/dstack, runner/internal/executor/executor.go, execJob (its jobEnvs); DSTACK_NODES_IPS is one address a
line.
"""

from __future__ import annotations

from trainworks_launcher.given.platforms import Description, Given
from trainworks_launcher.given.platforms.common import described_by_addresses

_ADVICE = "dstack sets them for every node of a task: do not set or unset them"


def describe(given: Given) -> Description:
    """Return the nodes, called by their addresses."""
    return described_by_addresses(
        given,
        "dstack",
        _ADVICE,
        count="DSTACK_NODES_NUM",
        rank="DSTACK_NODE_RANK",
        addresses="DSTACK_NODES_IPS",
        gpus="DSTACK_GPUS_PER_NODE",
        leader="DSTACK_MASTER_NODE_IP",
    )
