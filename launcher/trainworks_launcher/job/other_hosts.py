"""Derive the environment of another host of the job from this host's. Pure.

For ``train --plan --host NAME`` and for trainworks_preflight. The image, the code and the
hyperparameters are the same on every host; the names are the other host's. The devices are this
host's if both hosts have the same instance type, else those in the image's instance table. The
number of CPUs is always this host's, because the table has no CPUs.
"""

from __future__ import annotations

from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.environment.manifest import Instance


def environment_of(environment: Environment, host: str) -> Environment:
    """Return the environment of a host.

    The same environment for this host, and for an unknown name, which placement.py refuses.
    """
    hosts = environment.hosts
    if not host or host == hosts.current or host not in hosts.names:
        return environment
    instance_type = hosts.instance_type_of(host)
    devices = environment.devices
    if instance_type != hosts.instance_type_of(hosts.current):
        row = environment.manifest.instances.get(instance_type, Instance())
        # None, and empty tuples: what cannot be known of a host of another type.
        devices = devices._replace(
            gpus=row.gpus,
            visible_gpus=None,
            neuron_devices=min(row.neuron_cores, 1),
            efa=None,
            closed_efa=(),
            gpu_nodes=(),
        )
    platform = environment.platform
    if platform.tasks is not None:
        # The first task of the host stands for all of its tasks.
        host_rank = hosts.names.index(host)
        rank = sum(platform.tasks.counts[:host_rank])
        platform = platform._replace(tasks=platform.tasks._replace(rank=rank, local_rank=0))
    hostname = environment.hostname
    if hostname == hosts.current:
        # The kernel's hostname is the host's name in the job on every host of such a platform.
        hostname = host
    return environment._replace(
        platform=platform,
        hosts=hosts.seen_from(host),
        devices=devices,
        hostname=hostname,
    )
