"""Plain hosts: a person, or a scheduler without a file in this folder, names the hosts. Pure.

``TRAINWORKS_HOSTS=a,b`` or ``node-[0-7]`` is the same on every host; ``TRAINWORKS_HOST=a`` is the
host's own name in that list. A pod of a Kubernetes Indexed Job (or of a JobSet) need not set its
name: its completion index is its place in the list.
"""

from __future__ import annotations

import re

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import nearest
from trainworks_launcher.contract.json_values import without_brackets
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, expand_nodes, make_config


def describe(sources: Sources) -> Description:
    """Return the hosts of TRAINWORKS_HOSTS.

    TRAINWORKS_HOST may be missing if the completion index or the kernel's host name tells the
    host's own name. Nothing is raised: ``problems`` has the variables that are missing or wrong.
    """
    advice = (
        f"set {names.HOSTS_VARIABLE}=a,b to the same list on every host, and {names.HOST_VARIABLE}"
        " to its own name"
    )
    reader = Reader(sources.variables, "plain hosts", advice)
    value = without_brackets(reader.text(names.HOSTS_VARIABLE))
    listed = re.sub(r"[,\s]+", ",", value).strip(",")
    hosts: tuple[str, ...] = ()
    if listed:
        try:
            hosts = expand_nodes(listed)
        except ValueError as error:
            reader.refuse(str(error), names.HOSTS_VARIABLE)

    own = without_brackets(reader.optional(names.HOST_VARIABLE))
    if not own and hosts and reader.optional(names.INDEX_VARIABLE):
        own = hosts[reader.integer(names.INDEX_VARIABLE, most=len(hosts) - 1)]
    if not own and sources.hostname in hosts:
        own = sources.hostname
    elif not own:
        reader.missing.append(names.HOST_VARIABLE)
    elif hosts and own not in hosts:
        listed = ",".join(hosts)
        reader.refuse(
            f"{own!r} is not one of {names.HOSTS_VARIABLE}={listed}; {nearest(own, hosts)}",
            names.HOST_VARIABLE,
        )
    if reader.problems:
        return Description(where=names.HOSTS_VARIABLE, problems=reader.problems)
    return Description(resource_config=make_config(hosts, own), where=names.HOSTS_VARIABLE)
