"""The job's hosts and instance groups, as the resource config has them. Pure.

The platform describes a cluster by ``hosts`` and ``current_host``, and, where it has instance
groups, by ``instance_groups`` and ``current_group_name``. A cluster without groups has one that is
called ``homogeneousCluster``.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.json_values import Json, kind, mapping, text, texts

HOMOGENEOUS = "homogeneousCluster"
"""The platform's name of the only group of a cluster without groups (as sagemaker-training)."""

_TEXTS = ("current_host", "current_instance_type", "current_group_name", "network_interface_name")


class Group(NamedTuple):
    """One instance group: its name, the instance type of its hosts ("" if not
    given), its hosts in order.
    """

    name: str
    instance_type: str
    hosts: tuple[str, ...]


def instance_groups(config: Mapping[str, Json]) -> tuple[Group, ...]:
    """Return the groups in the platform's order; empty for a cluster without groups."""
    listed = config.get("instance_groups")
    rows = [mapping(row) for row in listed] if isinstance(listed, list) else []
    return tuple(
        Group(
            text(row.get("instance_group_name")),
            text(row.get("instance_type")),
            texts(row.get("hosts")),
        )
        for row in rows
    )


def group_of(config: Mapping[str, Json], host: str) -> Group | None:
    """Return the group that ``host`` is in.

    None for a cluster without groups, or a host that is in none.

    ``current_group_name`` decides for the current host only if it is one of the groups and does not
    contradict them: the lists of hosts are the same on every host, the name is not.
    """
    groups = instance_groups(config)
    holding = [group for group in groups if host in group.hosts]
    said = (
        text(config.get("current_group_name")) if host == text(config.get("current_host")) else ""
    )
    for group in holding or groups:
        if group.name == said:
            return group
    return holding[0] if holding else None


def instance_type_of(config: Mapping[str, Json], host: str) -> str:
    """Return the instance type of a host: its group's, else the current one.

    "local" is what the SDK's local mode says.
    """
    group = group_of(config, host)
    return (
        (group.instance_type if group else "")
        or text(config.get("current_instance_type"))
        or "local"
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
