"""How the hosts of a job talk to each other: interface, fabric, ports, time limits. Pure."""

from __future__ import annotations

from typing import NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.settings import Reader
from trainworks_launcher.environment.environment import Devices, Environment
from trainworks_launcher.job.fabric import Fabric, choose_fabric
from trainworks_launcher.job.placement import Placement, is_type_of_this_host


class Limits(NamedTuple):
    """Bounded waits of a job, all in seconds.

    Attributes:
        stop_grace: From a stop signal to KILL; None: the platform sends KILL. See
            ``names.STOP_GRACE_VARIABLE``.
        join: For all hosts to join the leader; see ``names.JOIN_LIMIT_SECONDS``.
        prepare: For a host to fetch code and install requirements; see
            ``names.PREPARE_LIMIT_SECONDS``.
        heartbeat: Of silence until a host counts as lost; see ``names.HEARTBEAT_LIMIT_SECONDS``.
        hang: Without progress of any rank; 0: it is not looked at. See
            ``names.HANG_LIMIT_SECONDS``.
    """

    stop_grace: float | None = None
    join: float = names.JOIN_LIMIT_SECONDS
    prepare: float = names.PREPARE_LIMIT_SECONDS
    heartbeat: float = names.HEARTBEAT_LIMIT_SECONDS
    hang: float = names.HANG_LIMIT_SECONDS


class Network(NamedTuple):
    """How this host reaches the other hosts of its job.

    Attributes:
        interface: Network interface to use; ``""`` if none is known.
        interface_why: Where ``interface`` comes from.
        fabric: EFA, or what is used instead.
        control_port: The leader's TCP port of the control channel.
        master_port: TCP port of rank 0's store.
        limits: Bounded waits.
        warnings: Lines to print before the start.
    """

    interface: str
    interface_why: str
    fabric: Fabric
    control_port: int
    master_port: int
    limits: Limits
    warnings: tuple[str, ...] = ()


def read_network(environment: Environment, placement: Placement) -> tuple[Network, list[Problem]]:
    """Read the network of one host.

    Args:
        environment: That host's environment.
        placement: Where the job runs.

    Returns:
        The network, and what is wrong with the settings it comes from.
    """
    reader = Reader({}, environment.variables)
    interface, interface_why = _interface(environment, reader)
    reader.warnings += _absent(environment)
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
    hang = reader.seconds(names.HANG_LIMIT_VARIABLE, names.HANG_LIMIT_SECONDS)
    if reader.word(names.HANG_VARIABLE, names.HANG_ACTIONS) == "off":
        hang = 0.0
    if placement.served and hang:
        # No launcher is where the ranks are: a job whose ranks print nothing
        # would look like one that hangs.
        hang = 0.0
        if environment.variables.get(names.HANG_VARIABLE, "").strip():
            reader.warnings.append(
                f"{names.HANG_VARIABLE} has no effect:"
                " no launcher runs on the hosts that have the ranks"
            )
    # One host has its own free port: two jobs on one machine must not meet at the default.
    default_port = platform.master_port or environment.devices.free_port or names.MASTER_PORT
    network = Network(
        interface=interface,
        interface_why=interface_why,
        fabric=fabric,
        master_port=reader.port(names.MASTER_PORT_VARIABLE, default_port),
        control_port=reader.port(
            names.CONTROL_PORT_VARIABLE, platform.control_port or names.CONTROL_PORT
        ),
        limits=Limits(
            stop_grace=_stop_grace(environment, reader),
            join=reader.seconds(names.JOIN_LIMIT_VARIABLE, names.JOIN_LIMIT_SECONDS),
            prepare=reader.seconds(names.PREPARE_LIMIT_VARIABLE, names.PREPARE_LIMIT_SECONDS),
            heartbeat=reader.seconds(names.HEARTBEAT_LIMIT_VARIABLE, names.HEARTBEAT_LIMIT_SECONDS),
            hang=hang,
        ),
        warnings=(*reader.warnings, *fabric.warnings),
    )
    if network.master_port == network.control_port:
        where = f"variables {names.MASTER_PORT_VARIABLE} and {names.CONTROL_PORT_VARIABLE}"
        reader.refuse(f"both are port {network.master_port}", where, "give them different ports")
    return network, reader.problems


def _stop_grace(environment: Environment, reader: Reader) -> float | None:
    """Return the seconds from a stop signal to our KILL.

    None where the platform, or the engine, sends KILL itself.
    """
    asked = reader.variables.get(names.STOP_GRACE_VARIABLE, "").strip()
    if not asked and (environment.contained or environment.platform.ends_jobs):
        return None
    return reader.seconds(names.STOP_GRACE_VARIABLE, names.STOP_SECONDS)


def _absent(environment: Environment) -> list[str]:
    """Return a line for each interface that a person has set for NCCL or gloo,
    and that this host does not have.

    NCCL takes beginnings of names, ``=`` before a whole one, and ``^`` before those to leave out
    (NCCL's page of environment variables); gloo takes whole names.
    """
    has, found = environment.devices.interfaces, []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.variables.get(variable, "").strip()
        whole = value.startswith("=") or variable.startswith("GLOO")
        words = tuple(word.strip() for word in value.lstrip("=").split(",") if word.strip())
        meant = [name for name in has if (name in words if whole else name.startswith(words))]
        if has and words and not meant and not value.startswith("^"):
            found.append(
                f"{variable}={value}: this host has no such network interface; it has"
                f" {', '.join(has)}"
            )
    return found


def _interface(environment: Environment, reader: Reader) -> tuple[str, str]:
    """Choose the network interface: the given one if it exists, else the one
    that routes to the leader.

    Where none is given programs find it by the host's own name (gloo does): one is chosen only if
    that leads elsewhere.

    Several may be given, separated by commas, as NCCL, gloo and Open MPI take them.

    Returns:
        The interface and where it comes from; both ``""`` if none is known. A
        replacement is a warning.
    """
    given = environment.hosts.interface
    devices = environment.devices
    if not given:
        leads = (
            f"this host's own name leads to {devices.own_address or 'no address'},"
            " which is no address of it"
        )
        return devices.reaching, f"routes to the leader; {leads}" if devices.reaching else ""
    present = [name for name in given.split(",") if name in devices.interfaces]
    if present == given.split(",") or not devices.interfaces:
        return given, "network_interface_name of the platform"
    if present:
        reader.warnings.append(
            f"of the network interfaces {given!r} only {', '.join(present)} exist(s)"
            " on this host: using that"
        )
        return ",".join(present), f"what exists of the platform's {given!r}"
    if not devices.reaching:
        reader.warnings.append(
            f"the network interface {given!r} does not exist on this host (it has"
            f" {', '.join(devices.interfaces)}), and none routes to the leader: the programs choose"
            " one themselves"
        )
        return "", ""
    reader.warnings.append(
        f"the network interface {given!r} does not exist on this host; using {devices.reaching!r},"
        " which routes to the leader"
    )
    return (
        devices.reaching,
        f"routes to the leader; the platform's {given!r} does not exist on this host",
    )
