"""EFA: what a host's network fabric needs, decided by its devices. Pure.

Devices present on the host decide. Where devices cannot be seen (planning for another host, or on a laptop) the
manifest's instance table is the fallback. A host without EFA gets none of these variables: with FI_PROVIDER=efa and no
device, libfabric finds no provider at all and the job hangs or dies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Mapping, Sequence

from trainworks_launcher.manifest import Manifest

NCCL_PLUGIN = "aws-ofi-nccl"
"""The component that lets NCCL use libfabric, and with it EFA."""


@dataclass(frozen=True)
class Fabric:
    """The choice. efa: use it. variables: to set; reasons: (variable or fact, why). warnings: for the person."""

    efa: bool = False
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    reasons: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


def choose_fabric(
    manifest: Manifest, devices: Sequence[str] | None, instance_type: str, hosts: int, inherited: Mapping[str, str]
) -> Fabric:
    """Decide for one host.

    devices: its EFA devices, None if they cannot be known. inherited: the container's environment; what it already sets
    is the user's choice.
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
            warnings.append(f"{origin}: traffic between hosts goes over TCP; give the container the EFA devices")
    else:
        return Fabric()
    if not efa:
        return Fabric(warnings=tuple(warnings))
    wanted: dict[str, tuple[str, str]] = {
        "FI_PROVIDER": ("efa", "libfabric is to use EFA and not its TCP provider"),
        "RDMAV_FORK_SAFE": ("1", "data loaders fork; without it a fork may corrupt memory registered with the device"),
    }
    if row and row.efa_rdma:
        wanted["FI_EFA_USE_DEVICE_RDMA"] = ("1", f"{instance_type} can read device memory of another host directly")
    warnings.extend(
        f"this host has EFA, but the image has no {NCCL_PLUGIN}: {missing.cost}"
        for missing in manifest.missing
        if missing.component == NCCL_PLUGIN and hosts > 1
    )
    variables = {name: value for name, (value, _) in wanted.items() if name not in inherited}
    reasons = [("EFA", origin)]
    reasons += [(name, why) for name, (_, why) in wanted.items() if name in variables]
    reasons += [(name, "kept as the container's environment has it") for name in wanted if name not in variables]
    return Fabric(True, MappingProxyType(variables), tuple(reasons), tuple(warnings))
