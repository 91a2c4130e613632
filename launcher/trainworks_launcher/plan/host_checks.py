"""From a job to what is checked on its host. Pure."""

from __future__ import annotations

from trainworks_launcher.checks import OFF, Checks
from trainworks_launcher.contract import names
from trainworks_launcher.contract.settings import Reader
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.job.network import Network
from trainworks_launcher.job.placement import Placement

_TEMPORARY = "/tmp"  # noqa: S108  (what tempfile uses where nothing else is said)


def checks_of(
    environment: Environment, placement: Placement, network: Network, level: str = ""
) -> Checks | None:
    """Return what is checked; None if checks are off, or another process of this host does them.

    Args:
        environment: What was read on the host.
        placement: Where the job runs.
        network: How this host reaches the others.
        level: One of ``names.CHECK_LEVELS``; default: the variable's.
    """
    level = level or Reader({}, environment.variables).word(
        names.CHECK_VARIABLE, names.CHECK_LEVELS
    )
    tasks = environment.platform.tasks
    if level == OFF or (tasks is not None and tasks.local_rank > 0):
        return None
    manifest, devices = environment.manifest, environment.devices
    row = manifest.instances.get(placement.instance_type)
    several = len(placement.hosts) > 1
    return Checks(
        gpus=devices.gpus,
        visible_gpus=devices.visible_gpus,
        row_gpus=row.gpus if row and devices.visible_gpus is None else 0,
        row_efa=row.efa_devices if row else 0,
        efa=None if devices.efa is None else len(devices.efa),
        instance_type=placement.instance_type,
        cuda=manifest.components.get("cuda", ""),
        minimum_driver=manifest.minimum_driver,
        without_cuda=bool(manifest.components)
        and not manifest.minimum_driver
        and "cuda" not in manifest.components,
        shared_memory=devices.gpus > 0,
        interface=(network.interface.partition(",")[0] or devices.routed) if several else "",
        directories=(environment.output, environment.variables.get("TMPDIR", _TEMPORARY)),
    )
