"""EFA: what a host's network fabric needs, decided by its devices. Pure.

Devices present on the host decide. Where devices cannot be seen (planning for another host, or on a laptop) the
manifest's instance table is the fallback. A host without EFA gets none of these variables: with FI_PROVIDER=efa and no
device, libfabric finds no provider at all and the job hangs or dies. Which variables, is a matter of the image's
versions: its manifest lists them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.manifest import Manifest

NCCL_PLUGIN = "aws-ofi-nccl"
"""The component that lets NCCL use libfabric, and with it EFA."""


class Fabric(NamedTuple):
    """What is used between hosts.

    Attributes:
        efa: Whether EFA is used.
        variables: Variables to set.
        reasons: Variable or fact, and why.
        warnings: Lines for the log.
    """

    efa: bool = False
    variables: Mapping[str, str] = MappingProxyType({})
    reasons: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


def choose_fabric(
    manifest: Manifest, devices: Sequence[str] | None, instance_type: str, hosts: int, inherited: Mapping[str, str]
) -> Fabric:
    """Decide for one host.

    Args:
        manifest: The image's manifest.
        devices: EFA devices of the host; None if they cannot be known.
        instance_type: Instance type of the host.
        hosts: Number of hosts of the distribution.
        inherited: The container's environment; a value in it is the user's choice.
    """
    row = manifest.instances.get(instance_type)
    warnings = []
    efa = True
    if devices is None:
        if not row or not row.efa:
            return Fabric()
        origin = f"the image's instance table says that {instance_type} has EFA"
    elif devices:
        origin = f"EFA devices on this host: {', '.join(devices)}"
    elif row and row.efa:
        efa = False
        origin = f"{instance_type} has EFA, but no EFA device is in this container"
        if hosts > 1:
            warnings.append(f"{origin}: traffic between hosts goes over TCP; pass the EFA devices into the container")
    else:
        return Fabric()
    if not efa:
        return Fabric(warnings=tuple(warnings))
    wanted = [variable for variable in manifest.fabric if not variable.rdma or (row and row.efa_rdma)]
    warnings.extend(
        f"this host has EFA, but the image has no {NCCL_PLUGIN}: {missing.cost}"
        for missing in manifest.missing
        if missing.component == NCCL_PLUGIN and hosts > 1
    )
    variables = {variable.name: variable.value for variable in wanted if variable.name not in inherited}
    kept = "kept as the container's environment has it"
    reasons = [("EFA", origin)]
    reasons += [(variable.name, variable.why if variable.name in variables else kept) for variable in wanted]
    return Fabric(True, MappingProxyType(variables), tuple(reasons), tuple(warnings))
