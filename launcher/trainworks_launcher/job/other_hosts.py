"""The environment as another host of the job would read it, as far as this host can know it. Pure.

For ``train --plan --host NAME`` and preflight. The image, the code and the hyperparameters are the
same on every host. Names are the other host's. Devices are too: those of this host if it is of the
same instance type, else what the image's instance table says; the number of CPUs is not in that
table and stays this host's.
"""

from __future__ import annotations

from types import MappingProxyType

from trainworks_launcher.contract.json_values import Json, text, texts
from trainworks_launcher.environment import resource_config
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.environment.manifest import Instance


def environment_of(environment: Environment, host: str) -> Environment:
    """Return the environment of ``host``.

    Unchanged for this host, and for a name that is none of the job's.
    """
    config = environment.resource_config
    current = text(config.get("current_host"))
    if not host or host == current or host not in texts(config.get("hosts")):
        return environment
    own = resource_config.instance_type_of(config, current)
    kind = resource_config.instance_type_of(config, host)
    group = resource_config.group_of(config, host)
    changed: dict[str, Json] = {"current_host": host}
    if "current_instance_type" in config:
        changed["current_instance_type"] = kind
    if group and "current_group_name" in config:
        changed["current_group_name"] = group.name
    devices = environment.devices
    if kind != own:
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
        counts, number = platform.tasks.counts, texts(config.get("hosts")).index(host)
        platform = platform._replace(
            tasks=platform.tasks._replace(rank=sum(counts[:number]), local_rank=0)
        )
    return environment._replace(
        platform=platform,
        resource_config=MappingProxyType({**config, **changed}),
        devices=devices,
        # A platform that names its hosts does so everywhere.
        hostname=host if environment.hostname == current else environment.hostname,
    )
