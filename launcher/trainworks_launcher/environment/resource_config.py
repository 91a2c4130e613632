"""Parses SageMaker's resource config: the job's hosts and instance groups. Pure.

For example ``{"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}``. A cluster with instance
groups has ``instance_groups`` and ``current_group_name``, too. A cluster without groups has one
group, ``homogeneousCluster``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.json_values import NOTHING, Json, kind, mapping, text, texts

HOMOGENEOUS = "homogeneousCluster"
"""Name of the only group of a cluster without groups, as in sagemaker-training."""

LOCAL = "local"
"""Instance type of a host if the platform names none, as in the SDK's local mode."""

_TEXTS = ("current_host", "current_instance_type", "current_group_name", "network_interface_name")
"""Keys of the resource config with texts."""


class Group(NamedTuple):
    """One instance group.

    Attributes:
        name: Name of the group.
        instance_type: Instance type of its hosts, in the form ``ml.FAMILY.SIZE``; "" if the
            platform does not name it.
        hosts: Names of its hosts, in order.
    """

    name: str
    instance_type: str
    hosts: tuple[str, ...]


class Hosts(NamedTuple):
    """The hosts of a job, and the one among them that runs this process.

    Attributes:
        names: All hosts, in the platform's order; () if the platform does not list the hosts.
        current: Name of the current host; "" if the platform does not name it.
        groups: The instance groups in the platform's order; () for a cluster without groups.
        current_group: Name of the current host's group; "" if the platform does not name it.
        current_type: Instance type of the current host; "" if the platform does not name it.
        interface: Network interface that the platform names, or several: ``eth0,eth1``; "" for
            none.
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
        """Return the group of a host; None for a cluster without groups, or a host in no group.

        The groups' lists of hosts decide, because they are the same on every host.
        ``current_group`` decides for the current host only if several lists have the host, or none.
        """
        groups = [group for group in self.groups if host in group.hosts]
        name = self.current_group if host == self.current else ""
        # Of the groups that list the host, the one with the current group's name; if no group
        # lists the host, the current group itself.
        for group in groups or self.groups:
            if group.name == name:
                return group
        return groups[0] if groups else None

    def instance_type_of(self, host: str) -> str:
        """Return the instance type of a host: its group's, else the current host's."""
        group = self.group_of(host)
        own = group.instance_type if group is not None else ""
        return own or self.current_type or LOCAL

    def instance_types(self, hosts: Sequence[str]) -> Mapping[str, str]:
        """Return host -> instance type. The groups are read once for all hosts."""
        by_host = {}
        for group in self.groups:
            for host in group.hosts:
                by_host[host] = group.instance_type
        default = self.current_type or LOCAL
        return {host: by_host.get(host) or default for host in hosts}

    def seen_from(self, host: str) -> Hosts:
        """Return the same hosts with another current host.

        Keys about the current host change only if the resource config has them.
        """
        document: dict[str, Json] = {**self.document, "current_host": host}
        if "current_instance_type" in document:
            document["current_instance_type"] = self.instance_type_of(host)
        group = self.group_of(host)
        if group is not None and "current_group_name" in document:
            document["current_group_name"] = group.name
        return read_hosts(document)

    def with_interface(self, name: str) -> Hosts:
        """Return the same hosts with a network interface."""
        return read_hosts({**self.document, "network_interface_name": name})


def read_hosts(config: Mapping[str, Json]) -> Hosts:
    """Return the hosts of a resource config.

    A value of a wrong type counts as absent; ``check_resource_config`` refuses it.
    """
    rows = config.get("instance_groups")
    if not isinstance(rows, list):
        rows = []
    groups = []
    for entry in rows:
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
    """Return a problem for each value of a wrong type, and for each contradiction.

    An absent key and null are the same. ``[]`` for a resource config without mistakes.
    """
    where = names.RESOURCE_CONFIG_FILE
    problems = []
    for key in _TEXTS:
        value = config.get(key)
        if value is not None and not isinstance(value, str):
            mistake = f"{key!r} is {kind(value)}, not a text"
            problems.append(Problem(mistake, where, "the platform writes a name"))
    problems += _check_hosts(config, where)
    rows = config.get("instance_groups")
    if rows is None:
        return problems
    if not isinstance(rows, list):
        mistake = f"'instance_groups' is {kind(rows)}, not a list"
        return [*problems, Problem(mistake, where, "list one object per instance group")]

    hosts = set(texts(config.get("hosts")))
    group_names: set[str] = set()
    for number, row in enumerate(rows, 1):
        place = f"{where}: instance_groups, entry {number}"
        if not isinstance(row, dict):
            mistake = f"is {kind(row)}, not an object"
            problems.append(Problem(mistake, place, "give name, type and hosts"))
            continue
        name = text(row.get("instance_group_name"))
        if not name:
            mistake = "the group has no 'instance_group_name'"
            problems.append(Problem(mistake, place, "give the group a name"))
        elif name in group_names:
            mistake = f"there is another group {name!r}"
            problems.append(Problem(mistake, place, "give each group a different name"))
        group_names.add(name)
        problems += _check_hosts(row, place)
        unknown = [host for host in texts(row.get("hosts")) if host not in hosts]
        if unknown and hosts:
            mistake = f"{unknown[0]!r} is not one of the job's hosts"
            advice = "list the hosts of all groups under 'hosts'"
            problems.append(Problem(mistake, place, advice))
    return problems


def _check_hosts(row: Mapping[str, Json], where: str) -> list[Problem]:
    """Return a problem if ``hosts`` is no list of texts.

    An empty list is checked in ``job/``, where hosts are needed.
    """
    hosts = row.get("hosts")
    if hosts is None:
        return []
    if not isinstance(hosts, list):
        mistake = f"'hosts' is {kind(hosts)}, not a list"
        return [Problem(mistake, where, "list the names of the hosts")]
    for host in hosts:
        if not isinstance(host, str):
            return [Problem(f"a host is {kind(host)}, not a name", where, "list names only")]
    return []
