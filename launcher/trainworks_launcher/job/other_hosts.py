"""The environment as another host of the job would read it, as far as this host can know it. Pure.

For ``train --plan --host NAME`` and preflight. The image, the code and the hyperparameters are the
same on every host. Names are the other host's. Devices are too: those of this host if it is of the
same instance type, else what the image's instance table says; the number of CPUs is not in that
table and stays this host's.
"""

from __future__ import annotations

from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.environment.manifest import Instance


def environment_of(environment: Environment, host: str) -> Environment:
    """Return the environment of ``host``.

    Unchanged for this host, and for a name that is none of the job's.
    """
    hosts = environment.hosts
    if not host or host == hosts.current or host not in hosts.names:
        return environment
    kind = hosts.instance_type_of(host)
    devices = environment.devices
    if kind != hosts.instance_type_of(hosts.current):
        row = environment.manifest.instances.get(kind, Instance())
        devices = devices._replace(
            gpus=row.gpus,
            visible_gpus=None,
            neuron_devices=min(row.neuron_cores, 1),
            efa=None,
            closed_efa=(),
            gpu_nodes=(),
        )
    platform = environment.platform
    if platform.tasks is not None:  # its first task
        counts, number = platform.tasks.counts, hosts.names.index(host)
        platform = platform._replace(
            tasks=platform.tasks._replace(rank=sum(counts[:number]), local_rank=0)
        )
    return environment._replace(
        platform=platform,
        hosts=hosts.seen_from(host),
        devices=devices,
        # A platform that names its hosts does so everywhere.
        hostname=host if environment.hostname == hosts.current else environment.hostname,
    )
