"""How long a host takes to pull an image, estimated from the sizes of its layers; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainworks.facts.rows import Pull

MEGABYTE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PullTime:
    """Seconds that a pull takes, and the host that it is estimated for."""

    host: Pull
    seconds: float


def pull_seconds(layers: Sequence[int], host: Pull) -> float:
    """Return the seconds until the last layer is unpacked, on a host that has none of them.

    Layers are downloaded in their order, several at a time, and unpacked in their order as they arrive.

    Args:
        layers: Uncompressed sizes in bytes, the lowest first.
        host: What is assumed of the host and its network.
    """
    connections, unpackers = [0.0] * host.connections, [0.0] * host.unpacks
    for size in layers:
        packed = size * host.packed_percent / 100
        arrived = min(connections) + packed / (host.connection_megabytes_per_second * MEGABYTE)
        connections[connections.index(min(connections))] = arrived
        unpacked = max(min(unpackers), arrived) + size / (host.unpack_megabytes_per_second * MEGABYTE)
        unpackers[unpackers.index(min(unpackers))] = unpacked
    return max(unpackers)


def pull_times(layers: Sequence[int], hosts: Sequence[Pull]) -> tuple[PullTime, ...]:
    """Return the estimate for each kind of host; ``layers`` as above."""
    return tuple(PullTime(host=host, seconds=round(pull_seconds(layers, host), 1)) for host in hosts)


def pull_text(times: Sequence[PullTime]) -> list[str]:
    """Return a line for people for each estimate, with what it assumes."""
    return [
        f"a pull takes an {each.host.name} about {each.seconds:.0f} s (assumed: {each.host.connections} layers at a "
        f"time, {each.host.connection_megabytes_per_second} MB/s each, {each.host.packed_percent}% of their size; "
        f"{each.host.unpacks} unpacked at a time, {each.host.unpack_megabytes_per_second} MB/s each)"
        for each in times
    ]
