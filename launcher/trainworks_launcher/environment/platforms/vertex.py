"""Vertex AI: custom jobs with several worker pools. Pure.

``CLUSTER_SPEC`` has the hosts of every pool, and this host's pool and index:
``{"cluster": {"workerpool0": ["a:2222"]}, "task": {"type": "workerpool0", "index": 0}}``. The first
pool has one host, the leader. Source: Vertex AI, Use distributed training, Format of CLUSTER_SPEC.
"""

from __future__ import annotations

from trainworks_launcher.contract.json_values import decode, mapping, text, texts, without_brackets
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, find_rendezvous, make_config

_ADVICE = (
    "leave CLUSTER_SPEC to Vertex AI, or set TRAINWORKS_HOSTS and TRAINWORKS_HOST on every host"
)
_POOLS = ("workerpool0", "workerpool1")
"""Pools of hosts that run one program; the others are for parameter servers and evaluators."""


def describe(sources: Sources) -> Description:
    """Return the hosts of the pools, without their ports; the first one is the leader.

    Nothing is raised: ``problems`` has what is missing or wrong in CLUSTER_SPEC.
    """
    reader = Reader(sources.variables, "Vertex AI", _ADVICE)
    spec = reader.text("CLUSTER_SPEC")
    if not spec:
        return Description(problems=reader.problems)
    try:
        document = mapping(decode(spec))
    except ValueError as error:
        reader.refuse(f"is not JSON: {error}", "CLUSTER_SPEC")
        return Description(problems=reader.problems)
    cluster = mapping(document.get("cluster"))
    pools: dict[str, list[str]] = {}
    hosts: list[str] = []
    for name in sorted(cluster):
        pools[name] = [_without_port(entry) for entry in texts(cluster[name])]
        hosts += pools[name]
    task = mapping(document.get("task"))
    pool, index = text(task.get("type")), task.get("index")
    if not {*pools} <= {*_POOLS}:
        reader.refuse(f"the pools {', '.join(pools)} may run different programs", "CLUSTER_SPEC")
    elif not isinstance(index, int) or not 0 <= index < len(pools.get(pool, ())):
        problem = "it does not say which host this is"
        if pool:
            problem = f"it does not have this host: task {index} of {pool!r}"
        reader.refuse(problem, "CLUSTER_SPEC")
    if reader.problems or not isinstance(index, int):
        return Description(problems=reader.problems)
    return Description(
        resource_config=make_config(hosts, pools[pool][index]),
        where="CLUSTER_SPEC",
        kept=find_rendezvous(sources.variables),
    )


def _without_port(entry: str) -> str:
    """Return the host of ``host:port`` or ``[fd00::1]:port``."""
    address = without_brackets(entry)
    if address.count(":") > 1:  # an IPv6 address
        return address
    return address.partition(":")[0]
