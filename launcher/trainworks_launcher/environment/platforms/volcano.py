"""Volcano: pods of a Job with the plugins svc and env. Pure.

A variable ``VC_TASK_HOSTS`` for each task, for example ``VC_WORKER_HOSTS``, has the hosts of the
task; ``VC_TASK_INDEX`` is this pod's index in its own task. Sources: volcano-sh/volcano,
pkg/controllers/job/plugins/svc/svc.go and env/env.go.
"""

from __future__ import annotations

import re
from typing import Mapping, Sequence

from trainworks_launcher.environment.platforms import Description, Sources
from trainworks_launcher.environment.platforms.common import Reader, find_rendezvous, make_config

_ADVICE = (
    "give the job Volcano's plugins svc and env,"
    " or set TRAINWORKS_HOSTS and TRAINWORKS_HOST on every host"
)
_LEADER, _OTHERS = "MASTER", "WORKER"
"""Tasks with pods that run one program, in the words of Volcano's plugin for PyTorch."""


def describe(sources: Sources) -> Description:
    """Return the pods, the master's first.

    This pod is found by its host name, else by its index if the job has one task. Nothing is
    raised: ``problems`` has the variables that are missing or wrong.
    """
    variables = sources.variables
    reader = Reader(variables, "Volcano", _ADVICE)
    hosts_of = _read_tasks(reader, variables)
    hosts: list[str] = []
    # False is less than True: the master's task comes first.
    for task in sorted(hosts_of, key=lambda task: task != _LEADER):
        hosts += hosts_of[task]
    where = [f"VC_{task}_HOSTS" for task in hosts_of]
    _check_rendezvous(reader, hosts, where)
    own = ""
    for host in hosts:
        if _pod(host) == _pod(sources.hostname):
            own = host
            break
    if not own and len(hosts_of) == 1:
        index = reader.integer("VC_TASK_INDEX", "VK_TASK_INDEX", most=len(hosts) - 1)
        own = hosts[index]
    elif not own and hosts:
        reader.refuse(f"the host name {sources.hostname!r} is none of {', '.join(hosts)}", *where)
    if reader.problems:
        return Description(problems=reader.problems)
    return Description(
        resource_config=make_config(hosts, own),
        where=", ".join(where),
        kept=find_rendezvous(variables),
    )


def _read_tasks(reader: Reader, variables: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    """Return task -> hosts, for example ``{"MASTER": ["a"], "WORKER": ["b", "c"]}``.

    Contradictions become problems of the reader.
    """
    tasks = set()
    for name in variables:
        match = re.fullmatch("VC_(.+)_(HOSTS|NUM)", name)
        if match:
            tasks.add(match.group(1))
    hosts_of: dict[str, list[str]] = {}
    # Without any such variable the reader notes VC_WORKER_HOSTS as missing.
    for task in sorted(tasks) or [_OTHERS]:
        listed = reader.text(f"VC_{task}_HOSTS")
        number = reader.optional(f"VC_{task}_NUM")
        if not listed:
            continue
        hosts = re.split(r"[,\s]+", listed)
        hosts_of[task] = hosts
        if number and number != str(len(hosts)):
            reader.refuse(
                f"{len(hosts)} host(s), and the task has {number}",
                f"VC_{task}_HOSTS",
                f"VC_{task}_NUM",
            )
    if len(hosts_of) > 1 and {*hosts_of} != {_LEADER, _OTHERS}:
        where = [f"VC_{task}_HOSTS" for task in hosts_of]
        reader.refuse(f"the tasks {', '.join(hosts_of)} may run different programs", *where)
    return hosts_of


def _check_rendezvous(reader: Reader, hosts: Sequence[str], where: Sequence[str]) -> None:
    """Compare the hosts with MASTER_ADDR and WORLD_SIZE, which Volcano's plugin for PyTorch sets.

    Contradictions become problems of the reader.

    Args:
        reader: Reader of the variables.
        hosts: The pods, the master's first.
        where: Names of the variables that have the pods.
    """
    if not hosts:
        return
    leader, world = reader.optional("MASTER_ADDR"), reader.optional("WORLD_SIZE")
    if leader and _pod(leader) != _pod(hosts[0]):
        reader.refuse(
            f"the leader {leader!r} is not the first of {', '.join(hosts)}", "MASTER_ADDR", *where
        )
    if not world.isdecimal():
        return
    # WORLD_SIZE may count the pods, or ranks, with the same number on each of several pods.
    is_multiple = int(world) % len(hosts) == 0
    is_more_than_one_pod = len(hosts) == 1 and int(world) > 1
    if not is_multiple or is_more_than_one_pod:
        reader.refuse(f"WORLD_SIZE={world}, and {len(hosts)} host(s)", "WORLD_SIZE", *where)


def _pod(host: str) -> str:
    """Return the name of a pod, without its domain."""
    return host.partition(".")[0]
