"""Vertex AI: custom jobs with several worker pools. Pure.

``CLUSTER_SPEC`` has the hosts of every pool and this one's place. The first pool has one host, the
leader. Source: Vertex AI, Use distributed training, Format of CLUSTER_SPEC.
"""

from __future__ import annotations

from trainworks_launcher.contract.json_values import decode, mapping, text, texts, without_brackets
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, config_of, find_rendezvous

_ADVICE = (
    "leave CLUSTER_SPEC to Vertex AI, or set TRAINWORKS_HOSTS and TRAINWORKS_HOST on every host"
)
_POOLS = ("workerpool0", "workerpool1")
"""Pools whose hosts run one program; the others are for parameter servers and evaluators."""


def describe(sources: Sources) -> Description:
    """Return the hosts of the pools, without their ports."""
    reader = Reader(sources.variables, "Vertex AI", _ADVICE)
    said = reader.text("CLUSTER_SPEC")
    if not said:
        return Description(problems=reader.problems)
    try:
        document = mapping(decode(said))
    except ValueError as error:
        reader.refuse(f"is not JSON: {error}", "CLUSTER_SPEC")
        return Description(problems=reader.problems)
    cluster = mapping(document.get("cluster"))
    pools = {name: tuple(map(_host, texts(cluster[name]))) for name in sorted(cluster)}
    task = mapping(document.get("task"))
    pool, index = text(task.get("type")), task.get("index")
    if not {*pools} <= {*_POOLS}:
        reader.refuse(f"the pools {', '.join(pools)} may run different programs", "CLUSTER_SPEC")
    elif not isinstance(index, int) or not 0 <= index < len(pools.get(pool, ())):
        problem = (
            f"it does not have this host: task {index} of {pool!r}"
            if pool
            else "it does not say which host this is"
        )
        reader.refuse(problem, "CLUSTER_SPEC")
    if reader.problems or not isinstance(index, int):
        return Description(problems=reader.problems)
    hosts = tuple(host for listed in pools.values() for host in listed)
    return Description(
        resource_config=config_of(hosts, pools[pool][index]),
        where="CLUSTER_SPEC",
        kept=find_rendezvous(sources.variables),
    )


def _host(entry: str) -> str:
    """``host:port`` without the port."""
    alone = without_brackets(entry)
    return alone if ":" in alone.partition(":")[2] else alone.partition(":")[0]
