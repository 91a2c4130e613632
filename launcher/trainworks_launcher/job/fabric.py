"""Choose EFA or TCP between the hosts, and the variables of EFA. Pure.

The devices of the host decide. Where devices cannot be seen (in a plan for another host, or on a
laptop) the instance table of the image's manifest decides. A host without EFA gets no variable of
EFA: with FI_PROVIDER=efa and no device, libfabric finds no provider, and the job hangs or dies. The
manifest lists the variables, because they depend on the versions in the image.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.environment.environment import Devices
from trainworks_launcher.environment.manifest import GENERIC_FABRIC, Instance, Manifest

LOCKED_BYTES = 128 << 20
"""Minimum of lockable memory (memlock) for EFA; libfabric registers much more for one process.

Source: EC2 user guide, Get started with EFA, which requires memlock unlimited.
"""

_PROVIDER_VARIABLE = "FI_PROVIDER"
_CANNOT_USE = "this container cannot use EFA"


class Fabric(NamedTuple):
    """The network fabric between the hosts.

    Attributes:
        efa: Whether EFA is used; else TCP.
        variables: Variables to set, such as ``FI_PROVIDER``.
        reasons: Pairs of a variable, or ``EFA``, and its reason.
        warnings: Lines for the log.
        unusable: Variable -> reason why this host cannot have a value that the user has set.
    """

    efa: bool = False
    variables: Mapping[str, str] = MappingProxyType({})
    reasons: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    unusable: Mapping[str, str] = MappingProxyType({})

    def why_left_out(self, name: str, value: str) -> str:
        """Return the reason why a user's value of a variable is left out; ``""`` if it is kept.

        Only values that ask for EFA are left out. ``FI_PROVIDER=tcp`` and a switch with value ``0``
        are always kept.
        """
        word = value.strip().lower()
        if name == _PROVIDER_VARIABLE:
            uses_efa = word == "efa"
        else:
            uses_efa = word not in ("", "0")
        if not uses_efa:
            return ""
        return self.unusable.get(name, "")


def choose_fabric(
    manifest: Manifest,
    devices: Devices,
    instance_type: str,
    hosts: int,
    inherited: Mapping[str, str],
) -> Fabric:
    """Choose the fabric of one host.

    Args:
        manifest: The image's manifest.
        devices: The devices of the host; ``devices.efa`` is None for unknown EFA devices.
        instance_type: Instance type of the host.
        hosts: Number of hosts of the distribution.
        inherited: The container's environment. Its values are the user's choice, and are kept on a
            host that can have these values.
    """
    row = manifest.instances.get(instance_type)
    has_efa = row is not None and row.efa
    # The devices come first; where they cannot be seen, the instance table decides.
    if devices.efa is None:
        if not has_efa:
            return Fabric()
        evidence = f"the image's instance table says that {instance_type} has EFA"
        return _with_efa(manifest, instance_type, hosts, inherited, evidence)
    if devices.efa:
        evidence = f"EFA devices on this host: {', '.join(devices.efa)}"
        locked = devices.locked_memory  # bytes; None for no limit
        if locked is None or locked >= LOCKED_BYTES:
            return _with_efa(manifest, instance_type, hosts, inherited, evidence)
        warning = (
            f"{evidence}, but only {locked >> 10} KiB of memory may be locked: traffic between"
            " hosts goes over TCP; start the container with --ulimit memlock=-1 (Slurm: ulimit"
            " -l unlimited)"
        )
        return _without(_CANNOT_USE, inherited, [warning])
    if devices.closed_efa:
        closed = ", ".join(devices.closed_efa)
        warning = (
            f"this host has EFA ({closed}), but the container can open none of its"
            " devices: traffic between hosts goes over TCP; pass /dev/infiniband into the"
            " container, and the right to open it"
        )
        return _without(_CANNOT_USE, inherited, [warning])
    if not has_efa:
        return _without("this host has no EFA device", inherited)
    warnings = []
    if hosts > 1:
        warnings.append(
            f"{instance_type} has EFA, but no EFA device is in this container: traffic between"
            " hosts goes over TCP; pass the EFA devices into the container"
        )
    return _without(_CANNOT_USE, inherited, warnings)


def _with_efa(
    manifest: Manifest,
    instance_type: str,
    hosts: int,
    inherited: Mapping[str, str],
    evidence: str,
) -> Fabric:
    """Return the fabric of a host with EFA: the manifest's variables that the user has not set.

    evidence: the reason for EFA, such as ``EFA devices on this host: rdmap0s6``. The other
    arguments are those of ``choose_fabric``.
    """
    row = manifest.instances.get(instance_type)
    has_rdma = row is not None and row.efa_rdma
    variables: dict[str, str] = {}
    reasons = [("EFA", evidence)]
    for variable in manifest.fabric:
        # A variable for RDMA read is only for hosts with that: libfabric aborts on others.
        if variable.rdma and not has_rdma:
            continue
        if variable.name in inherited:
            reasons.append((variable.name, "kept as the container's environment has it"))
        else:
            variables[variable.name] = variable.value
            reasons.append((variable.name, variable.why))
    warnings = []
    if hosts > 1:
        plugin = names.NCCL_PLUGIN
        for missing in manifest.missing:
            if missing.component == plugin:
                warnings.append(f"this host has EFA, but the image has no {plugin}: {missing.cost}")
    unusable = _unusable_without_rdma(manifest, row, instance_type)
    fabric = Fabric(True, MappingProxyType(variables), tuple(reasons), unusable=unusable)
    return fabric._replace(warnings=(*warnings, *_warn_of_left_out(fabric, inherited)))


def _without(why: str, inherited: Mapping[str, str], warnings: Sequence[str] = ()) -> Fabric:
    """Return the fabric of a host without EFA, which leaves FI_PROVIDER=efa of the user out.

    why: the reason, such as ``this host has no EFA device``.
    """
    fabric = Fabric(unusable=MappingProxyType({_PROVIDER_VARIABLE: why}))
    return fabric._replace(warnings=(*warnings, *_warn_of_left_out(fabric, inherited)))


def _unusable_without_rdma(
    manifest: Manifest, row: Instance | None, instance_type: str
) -> Mapping[str, str]:
    """Return the variables of RDMA, with the reason, if the EFA devices have no RDMA read.

    libfabric would abort the job with such a variable.
    """
    unusable: dict[str, str] = {}
    if row is None or not row.efa or row.efa_rdma:
        return unusable
    why = f"the EFA devices of {instance_type} do not read remote memory: libfabric aborts"
    for variable in (*GENERIC_FABRIC, *manifest.fabric):
        if variable.rdma:
            unusable[variable.name] = why
    return MappingProxyType(unusable)


def _warn_of_left_out(fabric: Fabric, inherited: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable of the container that is left out."""
    warnings = []
    for name in fabric.unusable:
        value = inherited.get(name, "")
        why = fabric.why_left_out(name, value)
        if why:
            warnings.append(f"left out {name}={value}: {why}")
    return warnings
