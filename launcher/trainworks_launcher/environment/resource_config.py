"""The job's hosts and instance groups, as the resource config has them. Pure.

The platform describes a cluster by ``hosts`` and ``current_host``, and, where it has instance
groups, by ``instance_groups`` and ``current_group_name``. A cluster without groups has one that is
called ``homogeneousCluster``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.json_values import NOTHING, Json, kind, mapping, text, texts

HOMOGENEOUS = "homogeneousCluster"
"""The platform's name of the only group of a cluster without groups (as sagemaker-training)."""

LOCAL = "local"
"""Instance type of a host whose platform names none: what the SDK's local mode says."""

_TEXTS = ("current_host", "current_instance_type", "current_group_name", "network_interface_name")


class Group(NamedTuple):
    """One instance group: its name, the instance type of its hosts ("" if not
    given), its hosts in order.
    """

    name: str
    instance_type: str
    hosts: tuple[str, ...]


class Hosts(NamedTuple):
    """The hosts of a job, as seen from one of them.

    Attributes:
        names: All hosts, in the platform's order; () if the platform does not list them.
        current: The host from which they are seen; "" if the platform does not name it.
        groups: The instance groups in the platform's order; () for a cluster without groups.
        current_group: Name of the current host's group; "" if the platform does not name it.
        current_type: Instance type of the current host; "" if the platform does not name it.
        interface: The network interface that the platform names, or several with commas between
            them; "" for none.
        document: The resource config itself, for the script; empty if there is none.
    """

    names: tuple[str, ...] = ()
    current: str = ""
    groups: tuple[Group, ...] = ()
    current_group: str = ""
    current_type: str = ""
    interface: str = ""
    document: Mapping[str, Json] = NOTHING

    def group_of(self, host: str) -> Group | None:
        """Return the group of a host.

        None for a cluster without groups, or a host that is in none.

        ``current_group`` decides for the current host only if it is one of the groups and does not
        contradict them: the lists of hosts are the same on every host, the name is not.
        """
        holding = [group for group in self.groups if host in group.hosts]
        named = self.current_group if host == self.current else ""
        for group in holding or self.groups:
            if group.name == named:
                return group
        return holding[0] if holding else None

    def instance_type_of(self, host: str) -> str:
        """Return the instance type of a host: its group's, else the current one."""
        group = self.group_of(host)
        own = group.instance_type if group is not None else ""
        return own or self.current_type or LOCAL

    def instance_types(self, hosts: Sequence[str]) -> Mapping[str, str]:
        """Return the instance type of each host. The groups are read once for all hosts."""
        by_host = {}
        for group in self.groups:
            for host in group.hosts:
                by_host[host] = group.instance_type
        default = self.current_type or LOCAL
        return {host: by_host.get(host) or default for host in hosts}

    def seen_from(self, host: str) -> Hosts:
        """Return the same hosts as another one of them sees them.

        Of what the platform says of the current host, only that changes which is there.
        """
        document: dict[str, Json] = {**self.document, "current_host": host}
        if "current_instance_type" in document:
            document["current_instance_type"] = self.instance_type_of(host)
        group = self.group_of(host)
        if group is not None and "current_group_name" in document:
            document["current_group_name"] = group.name
        return read_hosts(document)

    def with_interface(self, name: str) -> Hosts:
        """Return the same hosts where the platform names a network interface."""
        return read_hosts({**self.document, "network_interface_name": name})


def read_hosts(config: Mapping[str, Json]) -> Hosts:
    """Return the hosts of a resource config.

    A value of a wrong type counts as absent; ``check_resource_config`` refuses it.
    """
    listed = config.get("instance_groups")
    groups = []
    for entry in listed if isinstance(listed, list) else []:
        row = mapping(entry)
        name = text(row.get("instance_group_name"))
        instance_type = text(row.get("instance_type"))
        groups.append(Group(name, instance_type, texts(row.get("hosts"))))
    return Hosts(
        names=texts(config.get("hosts")),
        current=text(config.get("current_host")),
        groups=tuple(groups),
        current_group=text(config.get("current_group_name")),
        current_type=text(config.get("current_instance_type")),
        interface=text(config.get("network_interface_name")),
        document=MappingProxyType(dict(config)),
    )


def check_resource_config(config: Mapping[str, Json]) -> list[Problem]:
    """Return what is of the wrong type, or does not fit together, in the resource config.

    Absent and null are the same.
    """
    where = names.RESOURCE_CONFIG_FILE
    problems = [
        Problem(
            f"{name!r} is {kind(config[name])}, not a text", where, "the platform writes a name"
        )
        for name in _TEXTS
        if config.get(name) is not None and not isinstance(config[name], str)
    ]
    problems += _check_hosts(config, where)
    listed = config.get("instance_groups")
    if listed is None:
        return problems
    if not isinstance(listed, list):
        advice = "list one object per instance group"
        return [
            *problems,
            Problem(f"'instance_groups' is {kind(listed)}, not a list", where, advice),
        ]
    known = set(texts(config.get("hosts")))
    names_seen: set[str] = set()
    for number, row in enumerate(listed, 1):
        place = f"{where}: instance_groups, entry {number}"
        if not isinstance(row, dict):
            problems.append(
                Problem(f"is {kind(row)}, not an object", place, "give name, type and hosts")
            )
            continue
        name = text(row.get("instance_group_name"))
        if not name:
            problems.append(
                Problem("the group has no 'instance_group_name'", place, "give the group a name")
            )
        elif name in names_seen:
            problems.append(
                Problem(
                    f"there is another group {name!r}", place, "give each group a different name"
                )
            )
        names_seen.add(name)
        problems += _check_hosts(row, place)
        strangers = [host for host in texts(row.get("hosts")) if host not in known]
        if strangers and known:
            advice = "list the hosts of all groups under 'hosts'"
            problems.append(
                Problem(f"{strangers[0]!r} is not one of the job's hosts", place, advice)
            )
    return problems


def _check_hosts(row: Mapping[str, Json], where: str) -> list[Problem]:
    """Return what is wrong with the type of ``hosts``.

    That it must not be empty is checked where hosts are needed.
    """
    hosts = row.get("hosts")
    if hosts is None:
        return []
    if not isinstance(hosts, list):
        return [
            Problem(f"'hosts' is {kind(hosts)}, not a list", where, "list the names of the hosts")
        ]
    wrong = [host for host in hosts if not isinstance(host, str)]
    return (
        [Problem(f"a host is {kind(wrong[0])}, not a name", where, "list names only")]
        if wrong
        else []
    )
