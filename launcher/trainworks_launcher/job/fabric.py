"""EFA: what a host's network fabric needs, decided by its devices. Pure.

Devices present on the host decide. Where devices cannot be seen (planning for another host, or on a
laptop) the manifest's instance table is the fallback. A host without EFA gets none of these
variables: with FI_PROVIDER=efa and no device, libfabric finds no provider at all and the job hangs
or dies. Which variables, is a matter of the image's versions: its manifest lists them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Iterator, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.environment.environment import Devices
from trainworks_launcher.environment.manifest import GENERIC_FABRIC, Instance, Manifest

LOCKED_BYTES = 128 << 20
"""Less memory that may be locked is far from what libfabric registers for one process.

Source: EC2 user guide, Get started with EFA, which asks for no limit at all.
"""

_PROVIDER = "FI_PROVIDER"


class Fabric(NamedTuple):
    """What is used between hosts.

    Attributes:
        efa: Whether EFA is used.
        variables: Variables to set.
        reasons: Variable or fact, and why.
        warnings: Lines for the log.
        unusable: Variable -> why a value of it that the user has set is left out.
    """

    efa: bool = False
    variables: Mapping[str, str] = MappingProxyType({})
    reasons: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    unusable: Mapping[str, str] = MappingProxyType({})

    def why_left_out(self, name: str, value: str) -> str:
        """Return why a variable with a value that a user chose is left out.

        ``""`` if it is kept.
        """
        given = value.strip().lower()
        kept = given != "efa" if name == _PROVIDER else given in ("", "0")
        return "" if kept else self.unusable.get(name, "")


def choose_fabric(
    manifest: Manifest,
    devices: Devices,
    instance_type: str,
    hosts: int,
    inherited: Mapping[str, str],
) -> Fabric:
    """Decide for one host.

    Args:
        manifest: The image's manifest.
        devices: What the host has; its EFA devices are None if they cannot be known.
        instance_type: Instance type of the host.
        hosts: Number of hosts of the distribution.
        inherited: The container's environment; a value in it is the user's
            choice, if this host can keep it.
    """
    row = manifest.instances.get(instance_type)
    has_efa = row is not None and row.efa
    if devices.efa is None:
        if not has_efa:
            return Fabric()
        origin = f"the image's instance table says that {instance_type} has EFA"
    elif devices.efa:
        origin = f"EFA devices on this host: {', '.join(devices.efa)}"
        locked = devices.locked_memory
        if locked is not None and locked < LOCKED_BYTES:
            warning = (
                f"{origin}, but only {locked >> 10} KiB of memory may be locked: traffic between"
                " hosts goes over TCP; start the container with --ulimit memlock=-1 (Slurm: ulimit"
                " -l unlimited)"
            )
            return _without("this container cannot use EFA", inherited, [warning])
    elif devices.closed_efa:
        closed = ", ".join(devices.closed_efa)
        warning = (
            f"this host has EFA ({closed}), but the container can open none of its"
            " devices: traffic between hosts goes over TCP; pass /dev/infiniband into the"
            " container, and the right to open it"
        )
        return _without("this container cannot use EFA", inherited, [warning])
    elif has_efa:
        warning = (
            f"{instance_type} has EFA, but no EFA device is in this container: traffic between"
            " hosts goes over TCP; pass the EFA devices into the container"
        )
        warnings = [warning] if hosts > 1 else []
        return _without("this container cannot use EFA", inherited, warnings)
    else:
        return _without("this host has no EFA device", inherited)
    return _with_efa(manifest, instance_type, hosts, inherited, origin)


def _with_efa(
    manifest: Manifest,
    instance_type: str,
    hosts: int,
    inherited: Mapping[str, str],
    origin: str,
) -> Fabric:
    """Return the fabric of a host that uses EFA. origin: how it is known that the host has EFA."""
    row = manifest.instances.get(instance_type)
    has_rdma = row is not None and row.efa_rdma
    variables: dict[str, str] = {}
    reasons = [("EFA", origin)]
    for variable in manifest.fabric:
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
        costs = [missing.cost for missing in manifest.missing if missing.component == plugin]
        warnings = [f"this host has EFA, but the image has no {plugin}: {cost}" for cost in costs]
    unusable = MappingProxyType(dict(_without_rdma(manifest, row, instance_type)))
    made = Fabric(True, MappingProxyType(variables), tuple(reasons), unusable=unusable)
    return made._replace(warnings=(*warnings, *_left_out(made, inherited)))


def _without(why: str, inherited: Mapping[str, str], warnings: Sequence[str] = ()) -> Fabric:
    """Return the fabric of a host without EFA: libfabric finds no provider at
    all if it is told to use EFA.
    """
    made = Fabric(unusable=MappingProxyType({_PROVIDER: why}))
    return made._replace(warnings=(*warnings, *_left_out(made, inherited)))


def _without_rdma(
    manifest: Manifest, row: Instance | None, instance_type: str
) -> Iterator[tuple[str, str]]:
    """Yield variables that make libfabric abort where the devices do not read
    remote memory, and why.
    """
    if row is not None and row.efa and not row.efa_rdma:
        for variable in (*GENERIC_FABRIC, *manifest.fabric):
            if variable.rdma:
                yield (
                    variable.name,
                    (
                        f"the EFA devices of {instance_type} do"
                        " not read remote memory: libfabric aborts"
                    ),
                )


def _left_out(made: Fabric, inherited: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each variable of the container that is left out."""
    for name in made.unusable:
        value = inherited.get(name, "")
        why = made.why_left_out(name, value)
        if why:
            yield f"left out {name}={value}: {why}"
