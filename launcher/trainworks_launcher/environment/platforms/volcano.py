"""Volcano: pods of a Job with the plugins svc and env. Pure.

``VC_TASK_HOSTS`` (``VC_WORKER_HOSTS``) has the hosts of each task, ``VC_TASK_INDEX`` this pod's
index in its own one. Sources: volcano-sh/volcano, pkg/controllers/job/plugins/svc/svc.go and
env/env.go.
"""

from __future__ import annotations

import re
from typing import Mapping, Sequence

from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, config_of, find_rendezvous

_ADVICE = (
    "give the job Volcano's plugins svc and env,"
    " or set TRAINWORKS_HOSTS and TRAINWORKS_HOST on every host"
)
_LEADER, _OTHERS = "MASTER", "WORKER"
"""Tasks whose pods run one program, as Volcano's plugin for PyTorch calls them."""


def describe(sources: Sources) -> Description:
    """Return the pods. Which one this is, says its host name, else its index in the only task."""
    variables = sources.variables
    reader = Reader(variables, "Volcano", _ADVICE)
    listed = _tasks(reader, variables)
    hosts = tuple(
        host for task in sorted(listed, key=lambda task: task != _LEADER) for host in listed[task]
    )
    where = tuple(f"VC_{task}_HOSTS" for task in listed)
    _check_rendezvous(reader, hosts, where)
    own = next((host for host in hosts if _pod(host) == _pod(sources.hostname)), "")
    if not own and len(listed) == 1:
        index = reader.integer("VC_TASK_INDEX", "VK_TASK_INDEX", most=len(hosts) - 1)
        own = hosts[index]
    elif not own and hosts:
        reader.refuse(f"the host name {sources.hostname!r} is none of {', '.join(hosts)}", *where)
    if reader.problems:
        return Description(problems=reader.problems)
    return Description(
        resource_config=config_of(hosts, own),
        where=", ".join(where),
        kept=find_rendezvous(variables),
    )


def _tasks(reader: Reader, variables: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    """Return the hosts of each task; what does not fit together is noted."""
    named = {
        match.group(1) for name in variables if (match := re.fullmatch("VC_(.+)_(HOSTS|NUM)", name))
    }
    listed: dict[str, tuple[str, ...]] = {}
    for task in sorted(named) or ["WORKER"]:
        hosts = tuple(re.split(r"[,\s]+", reader.text(f"VC_{task}_HOSTS")))
        number = reader.optional(f"VC_{task}_NUM")
        if hosts != ("",):
            listed[task] = hosts
        if number and hosts != ("",) and number != str(len(hosts)):
            reader.refuse(
                f"{len(hosts)} host(s), and the task has {number}",
                f"VC_{task}_HOSTS",
                f"VC_{task}_NUM",
            )
    if len(listed) > 1 and {*listed} != {_LEADER, _OTHERS}:
        reader.refuse(
            f"the tasks {', '.join(listed)} may run different programs",
            *(f"VC_{task}_HOSTS" for task in listed),
        )
    return listed


def _check_rendezvous(reader: Reader, hosts: Sequence[str], where: Sequence[str]) -> None:
    """Compare the hosts with what Volcano's plugin for PyTorch says, or a person."""
    leader, world = reader.optional("MASTER_ADDR"), reader.optional("WORLD_SIZE")
    if leader and hosts and _pod(leader) != _pod(hosts[0]):
        reader.refuse(
            f"the leader {leader!r} is not the first of {', '.join(hosts)}", "MASTER_ADDR", *where
        )
    if hosts and world.isdecimal() and (int(world) % len(hosts) or len(hosts) == 1 < int(world)):
        reader.refuse(f"WORLD_SIZE={world}, and {len(hosts)} host(s)", "WORLD_SIZE", *where)


def _pod(host: str) -> str:
    """Return the name of a pod, without its domain."""
    return host.partition(".")[0]
