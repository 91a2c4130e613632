"""SkyPilot: tasks on several nodes. Pure.

Source: docs.skypilot.co, running-jobs/environment-variables; SKYPILOT_NODE_IPS is one address a line, the head's first.
"""

from __future__ import annotations

from trainworks_launcher.given.platforms import Description, Given
from trainworks_launcher.given.platforms.common import described_by_addresses

_ADVICE = "SkyPilot sets them in a task's run section: hand them on if it starts a container of its own"


def describe(given: Given) -> Description:
    """Return the nodes, called by their addresses."""
    return described_by_addresses(
        given,
        "SkyPilot",
        _ADVICE,
        count="SKYPILOT_NUM_NODES",
        rank="SKYPILOT_NODE_RANK",
        addresses="SKYPILOT_NODE_IPS",
        gpus="SKYPILOT_NUM_GPUS_PER_NODE",
    )
