"""HyperPod's training operator: its agent is the program, and gets its ranks from the operator. Pure.

The operator sets ``NNODES`` and nothing else of the other hosts. One agent runs in each pod, and starts its ranks.
"""

from __future__ import annotations

from trainworks_launcher.given.platforms import HYPERPOD_AGENT, Description, Given


def describe(given: Given) -> Description:
    """Return the job of this one agent."""
    del given
    return Description(where=HYPERPOD_AGENT)
