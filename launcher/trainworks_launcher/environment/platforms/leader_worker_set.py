"""LeaderWorkerSet: a leader pod and its workers, of which every pod knows the leader's address.

Pure.

Source: kubernetes-sigs/lws, pkg/utils/pod/pod_utils.go, AddLWSVariables; the
leader's name gives those of the pods.
"""

from __future__ import annotations

from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, config_of, find_rendezvous

_ADVICE = (
    "LeaderWorkerSet sets them in every pod:"
    " do not set or unset them, or set TRAINWORKS_HOSTS on every host"
)


def describe(sources: Sources) -> Description:
    """Return the pods of the group, the leader first."""
    reader = Reader(sources.variables, "LeaderWorkerSet", _ADVICE)
    count = reader.integer("LWS_GROUP_SIZE", least=1)
    index = reader.index("LWS_WORKER_INDEX", count=count)
    address = reader.address("LWS_LEADER_ADDRESS") if count > 1 or reader.problems else ""
    if reader.problems:
        return Description(problems=reader.problems)
    if count == 1:
        return Description(where="LWS_GROUP_SIZE", kept=find_rendezvous(sources.variables))
    name, dot, domain = address.partition(".")
    hosts = (address, *(f"{name}-{number}{dot}{domain}" for number in range(1, count)))
    return Description(
        resource_config=config_of(hosts, hosts[index]),
        where="LWS_GROUP_SIZE",
        kept=find_rendezvous(sources.variables),
    )
