"""Choose the checks of a host before the start, by its job. Pure."""

from __future__ import annotations

from trainworks_launcher.checks import OFF, Checks
from trainworks_launcher.contract import names
from trainworks_launcher.contract.settings import Reader
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.job.network import Network
from trainworks_launcher.job.placement import Placement

_TEMPORARY = "/tmp"  # noqa: S108  (tempfile's default)


def checks_of(
    environment: Environment, placement: Placement, network: Network, level: str = ""
) -> Checks | None:
    """Return the expected devices of the host, which trainworks_launcher/checks compares.

    None if checks are off, or if another process of this host checks.

    Args:
        environment: The environment of the host.
        placement: The hosts and processes of the job.
        network: The network of the host.
        level: One of ``names.CHECK_LEVELS``; default: the variable's.
    """
    if not level:
        reader = Reader({}, environment.variables)
        level = reader.word(names.CHECK_VARIABLE, names.CHECK_LEVELS)
    tasks = environment.platform.tasks
    is_later_task = tasks is not None and tasks.local_rank > 0
    if level == OFF or is_later_task:
        return None
    manifest, devices = environment.manifest, environment.devices
    # The row of the image's instance table says what the host should have; the devices say what
    # the launcher has seen.
    row = manifest.instances.get(placement.instance_type)
    row_gpus = row_efa = 0
    if row is not None:
        row_efa = row.efa_devices
    # CUDA_VISIBLE_DEVICES may hide some of the instance type's GPUs.
    if row is not None and devices.visible_gpus is None:
        row_gpus = row.gpus
    efa = None  # number of EFA devices; None if not known
    if devices.efa is not None:
        efa = len(devices.efa)
    interface = ""  # the interface towards the other hosts; "" for none to check
    if len(placement.hosts) > 1:
        interface = network.interface.partition(",")[0] or devices.routed
    has_cuda = bool(manifest.minimum_driver) or "cuda" in manifest.components
    return Checks(
        gpus=devices.gpus,
        visible_gpus=devices.visible_gpus,
        row_gpus=row_gpus,
        row_efa=row_efa,
        efa=efa,
        instance_type=placement.instance_type,
        cuda=manifest.components.get("cuda", ""),
        minimum_driver=manifest.minimum_driver,
        without_cuda=bool(manifest.components) and not has_cuda,
        shared_memory=devices.gpus > 0,
        interface=interface,
        directories=(environment.output, environment.variables.get("TMPDIR", _TEMPORARY)),
    )
