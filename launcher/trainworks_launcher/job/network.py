"""Choose the network interface, the fabric, the ports and the time limits of a job. Pure."""

from __future__ import annotations

from typing import NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.settings import Reader
from trainworks_launcher.environment.environment import Devices, Environment
from trainworks_launcher.job.fabric import Fabric, choose_fabric
from trainworks_launcher.job.placement import Placement, is_type_of_this_host


class Limits(NamedTuple):
    """Time limits of a job, all in seconds. ``contract.names`` explains each of them.

    Attributes:
        stop_grace: From a stop signal to KILL (STOP_GRACE_VARIABLE); None: the platform sends KILL.
        join: For all hosts to join the leader (JOIN_LIMIT_SECONDS).
        prepare: For a host to fetch code and install requirements (PREPARE_LIMIT_SECONDS).
        heartbeat: Without a message of a host, until the host counts as lost
            (HEARTBEAT_LIMIT_SECONDS).
        hang: Without progress of any rank, until the job counts as hanging (HANG_LIMIT_SECONDS);
            0: never.
    """

    stop_grace: float | None = None
    join: float = names.JOIN_LIMIT_SECONDS
    prepare: float = names.PREPARE_LIMIT_SECONDS
    heartbeat: float = names.HEARTBEAT_LIMIT_SECONDS
    hang: float = names.HANG_LIMIT_SECONDS


class Network(NamedTuple):
    """How this host reaches the other hosts of its job.

    Attributes:
        interface: Network interface for NCCL, gloo and MPI, such as ``eth0``; ``""`` if unknown.
        interface_why: Reason for the interface, such as ``network_interface_name of the platform``.
        fabric: EFA, or TCP with the reason.
        control_port: The leader's TCP port of the control channel.
        master_port: TCP port of rank 0's store, MASTER_PORT of torch.
        limits: Time limits.
        warnings: Lines to print before the start.
    """

    interface: str
    interface_why: str
    fabric: Fabric
    control_port: int
    master_port: int
    limits: Limits
    warnings: tuple[str, ...] = ()


class _Interface(NamedTuple):
    """A network interface.

    Attributes:
        name: Such as ``eth0``, or several separated by commas; ``""`` if unknown.
        why: Reason for the choice.
    """

    name: str
    why: str


_NO_INTERFACE = _Interface("", "")


def read_network(environment: Environment, placement: Placement) -> tuple[Network, list[Problem]]:
    """Choose the network of one host.

    Args:
        environment: The environment of that host.
        placement: The hosts and processes of the job.

    Returns:
        The network, and its problems; a wrong value is replaced by its default. Nothing is raised.
    """
    reader = Reader({}, environment.variables)
    interface = _choose_interface(environment, reader)
    reader.warnings += _warn_of_absent_interfaces(environment)
    devices = Devices(efa=None)
    if is_type_of_this_host(environment, placement.instance_type):
        devices = environment.devices
    fabric = choose_fabric(
        environment.manifest,
        devices,
        placement.instance_type,
        len(placement.distribution_hosts),
        environment.variables,
    )
    platform = environment.platform
    hang = _hang_limit(placement, reader)
    # A job of one host takes a free port, because two such jobs may run on one machine.
    default_port = platform.master_port or environment.devices.free_port or names.MASTER_PORT
    master_port = reader.port(names.MASTER_PORT_VARIABLE, default_port)
    default_port = platform.control_port or names.CONTROL_PORT
    control_port = reader.port(names.CONTROL_PORT_VARIABLE, default_port)
    limits = Limits(
        stop_grace=_stop_grace(environment, reader),
        join=reader.seconds(names.JOIN_LIMIT_VARIABLE, names.JOIN_LIMIT_SECONDS),
        prepare=reader.seconds(names.PREPARE_LIMIT_VARIABLE, names.PREPARE_LIMIT_SECONDS),
        heartbeat=reader.seconds(names.HEARTBEAT_LIMIT_VARIABLE, names.HEARTBEAT_LIMIT_SECONDS),
        hang=hang,
    )
    if master_port == control_port:
        where = f"variables {names.MASTER_PORT_VARIABLE} and {names.CONTROL_PORT_VARIABLE}"
        reader.refuse(f"both are port {master_port}", where, "give them different ports")
    network = Network(
        interface=interface.name,
        interface_why=interface.why,
        fabric=fabric,
        control_port=control_port,
        master_port=master_port,
        limits=limits,
        warnings=(*reader.warnings, *fabric.warnings),
    )
    return network, reader.problems


def _hang_limit(placement: Placement, reader: Reader) -> float:
    """Return the seconds without progress after which a job counts as hanging; 0: never.

    The reader gets a problem for a wrong value, and a warning where the variable has no effect.
    """
    limit = reader.seconds(names.HANG_LIMIT_VARIABLE, names.HANG_LIMIT_SECONDS)
    if reader.word(names.HANG_VARIABLE, names.HANG_ACTIONS) == "off":
        return 0.0
    if not placement.has_ssh_workers:
        return limit
    # The hosts of the ranks have no launcher that sees the progress of ranks, so that a job which
    # prints nothing would look like a job that hangs.
    if reader.variables.get(names.HANG_VARIABLE, "").strip():
        reader.warnings.append(
            f"{names.HANG_VARIABLE} has no effect:"
            " no launcher runs on the hosts that have the ranks"
        )
    return 0.0


def _stop_grace(environment: Environment, reader: Reader) -> float | None:
    """Return the seconds from a stop signal to the launcher's KILL.

    None where the platform or the container engine sends KILL.
    """
    is_set = bool(reader.variables.get(names.STOP_GRACE_VARIABLE, "").strip())
    if not is_set and (environment.contained or environment.platform.ends_jobs):
        return None
    return reader.seconds(names.STOP_GRACE_VARIABLE, names.STOP_SECONDS)


def _warn_of_absent_interfaces(environment: Environment) -> list[str]:
    """Warn of an interface in a variable of NCCL or gloo that this host does not have."""
    interfaces = environment.devices.interfaces
    warnings: list[str] = []
    if not interfaces:
        return warnings
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.variables.get(variable, "").strip()
        # NCCL reads a name without "=" as the beginning of names; gloo reads whole names.
        is_whole_name = value.startswith("=") or variable.startswith("GLOO")
        if not _has_interface(interfaces, value, is_whole_name):
            warnings.append(
                f"{variable}={value}: this host has no such network interface; it has"
                f" {', '.join(interfaces)}"
            )
    return warnings


def _has_interface(interfaces: tuple[str, ...], value: str, is_whole_name: bool) -> bool:
    """Return whether one of the interfaces fits the value of NCCL_SOCKET_IFNAME.

    NCCL reads ``eth`` as the beginning of a name, ``=eth0`` as a whole name, and ``^docker`` as the
    beginning of a name to leave out; source: NCCL's page of environment variables. gloo reads whole
    names.
    """
    words = [word.strip() for word in value.lstrip("=").split(",")]
    wanted = tuple(word for word in words if word)
    if not wanted or value.startswith("^"):
        return True
    if is_whole_name:
        return not set(wanted).isdisjoint(interfaces)
    return any(name.startswith(wanted) for name in interfaces)


def _choose_interface(environment: Environment, reader: Reader) -> _Interface:
    """Choose the network interface: the platform's, else the one that routes to the leader.

    The platform may name several interfaces, such as ``eth0,eth1``, as NCCL, gloo and Open MPI read
    the list. Without the platform's choice gloo uses the address of the host's own name, so that an
    interface is needed only if this name has no address of this host (``Devices.reaching``).

    The reader gets a warning if another interface than the platform's is chosen.
    """
    requested = environment.hosts.interface
    devices = environment.devices
    if not requested:
        if not devices.reaching:
            return _NO_INTERFACE
        own_name = "no address"
        if devices.own_address:
            own_name = f"{devices.own_address}, which is not an address of this host"
        why = f"routes to the leader; this host's own name leads to {own_name}"
        return _Interface(devices.reaching, why)
    requested_names = requested.split(",")
    present = [name for name in requested_names if name in devices.interfaces]
    if present == requested_names or not devices.interfaces:
        return _Interface(requested, "network_interface_name of the platform")
    if present:
        reader.warnings.append(
            f"of the network interfaces {requested!r} only {', '.join(present)} exist(s)"
            " on this host: using that"
        )
        return _Interface(",".join(present), f"what exists of the platform's {requested!r}")
    if not devices.reaching:
        reader.warnings.append(
            f"the network interface {requested!r} does not exist on this host (it has"
            f" {', '.join(devices.interfaces)}), and none routes to the leader: the programs choose"
            " one themselves"
        )
        return _NO_INTERFACE
    reader.warnings.append(
        f"the network interface {requested!r} does not exist on this host;"
        f" using {devices.reaching!r}, which routes to the leader"
    )
    why = f"routes to the leader; the platform's {requested!r} does not exist on this host"
    return _Interface(devices.reaching, why)
