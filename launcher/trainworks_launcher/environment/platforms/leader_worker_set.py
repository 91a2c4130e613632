"""LeaderWorkerSet: a leader pod and its worker pods; every pod has the leader's address. Pure.

The names of the pods follow from the leader's: ``NAME.SERVICE``, ``NAME-1.SERVICE``. Source:
kubernetes-sigs/lws, pkg/utils/pod/pod_utils.go, AddLWSVariables.
"""

from __future__ import annotations

from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, find_rendezvous, make_config

_ADVICE = (
    "LeaderWorkerSet sets them in every pod:"
    " do not set or unset them, or set TRAINWORKS_HOSTS on every host"
)


def describe(sources: Sources) -> Description:
    """Return the pods of the group, the leader first."""
    reader = Reader(sources.variables, "LeaderWorkerSet", _ADVICE)
    count = reader.integer("LWS_GROUP_SIZE", least=1)
    index = reader.index("LWS_WORKER_INDEX", count=count)
    address = ""
    if count > 1 or reader.problems:
        address = reader.address("LWS_LEADER_ADDRESS")
    if reader.problems:
        return Description(problems=reader.problems)
    if count == 1:
        return Description(where="LWS_GROUP_SIZE", kept=find_rendezvous(sources.variables))
    name, dot, domain = address.partition(".")
    workers = [f"{name}-{number}{dot}{domain}" for number in range(1, count)]
    hosts = (address, *workers)
    return Description(
        resource_config=make_config(hosts, hosts[index]),
        where="LWS_GROUP_SIZE",
        kept=find_rendezvous(sources.variables),
    )
