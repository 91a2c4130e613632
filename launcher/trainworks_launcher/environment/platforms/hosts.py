"""Plain hosts: a person, or a scheduler without a file in this folder, says
which hosts the job has. Pure.

``TRAINWORKS_HOSTS=a,b`` or ``node-[0-7]`` is the same on every host; ``TRAINWORKS_HOST=a`` is the
host's own name in it. A pod of a Kubernetes Indexed Job (or of a JobSet) need not know its name: it
is that of its completion index.
"""

from __future__ import annotations

import re

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import nearest
from trainworks_launcher.contract.json_values import without_brackets
from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, config_of, expand_nodes


def describe(sources: Sources) -> Description:
    """Return the hosts.

    The host's own name may be left out where it follows from the index or the kernel's name.
    """
    advice = (
        f"set {names.HOSTS_VARIABLE}=a,b to the same list on every host, and {names.HOST_VARIABLE}"
        " to its own name"
    )
    reader = Reader(sources.variables, "plain hosts", advice)
    listed = re.sub(r"[,\s]+", ",", without_brackets(reader.text(names.HOSTS_VARIABLE))).strip(",")
    hosts: tuple[str, ...] = ()
    try:
        hosts = expand_nodes(listed) if listed else ()
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
        reader.refuse(
            f"{own!r} is not one of {names.HOSTS_VARIABLE}={','.join(hosts)};"
            f" {nearest(own, hosts)}",
            names.HOST_VARIABLE,
        )
    return Description(
        resource_config=config_of(hosts, own) if not reader.problems else {},
        where=names.HOSTS_VARIABLE,
        problems=reader.problems,
    )
