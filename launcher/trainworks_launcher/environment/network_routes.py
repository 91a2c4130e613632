"""Looks up how this host reaches the leader: by which interface, and at which address."""

from __future__ import annotations

import contextlib
import fcntl
import socket
from typing import NamedTuple, Sequence

from trainworks_launcher.contract import files, names
from trainworks_launcher.environment import platforms
from trainworks_launcher.environment.devices import list_names

_SIOCGIFADDR = 0x8915
"""Request for the IPv4 address of an interface (netdevice(7))."""

# struct ifreq (netdevice(7)): the name of the interface, at most 15 bytes and NUL; from byte 16 a
# struct sockaddr_in, with the address in its bytes 4 to 7.
_IFREQ_BYTES = 40
_IFREQ_NAME_BYTES = 15
_IFREQ_ADDRESS = slice(20, 24)

# Places of columns in proc(5), net/route and net/if_inet6.
_ROUTE_INTERFACE, _ROUTE_DESTINATION, _ROUTE_MASK = 0, 1, 7
_INET6_ADDRESS, _INET6_SCOPE, _INET6_INTERFACE = 0, 3, 5

_DISCARD_PORT = 9
"""Any port: no packet is sent."""


class Network(NamedTuple):
    """The route to the leader.

    The fields have the names and meanings of those of ``Devices`` in ``environment.py``.
    """

    reaching: str = ""
    own_address: str = ""
    routed: str = ""
    own_route: str = ""


def look_up_network(
    platform: platforms.Description, own_name: str, interfaces: Sequence[str]
) -> Network:
    """Look up how this host of several reaches the leader, and the address of its own name.

    Args:
        platform: The platform, with two hosts or more.
        own_name: Name that gethostname() returns to a program of the job.
        interfaces: Names of this host's network interfaces.
    """
    hosts = platform.hosts
    first, second = hosts.names[:2]
    leader = platform.leader_address or first
    # The leader asks for the way to another host, any other host for the way to the leader.
    is_leader = hosts.current == first
    if is_leader:
        interface = _interface_from_leader(leader, second)
    else:
        interface = interface_that_reaches(leader, second)
    routed = "" if interface == "lo" else interface

    own_route = ""
    # The ranks on the leader look up rank 0's store by the leader's name, as those of other hosts.
    if is_leader and routed and not _is_own_name(leader):
        own_route = address_of(routed) or address6_of(routed)

    # An interface has to be named to the programs in two cases: the platform's does not exist, or
    # the address of the host's own name, which gloo uses, belongs to another interface.
    reaching = own_address = ""
    if hosts.interface and hosts.interface not in interfaces:
        reaching = interface
    elif not hosts.interface:
        own_address = address_of_name(own_name)
        if routed and own_address != address_of(routed):
            reaching = routed
    return Network(reaching, own_address, routed, own_route)


def free_port() -> int:
    """Return a TCP port of the loopback interface on which no program listens; 0 for none.

    The port is not kept: another program may take it meanwhile.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((names.LOOPBACK, 0))
        except OSError:
            return 0
        return int(probe.getsockname()[1])


def network_interfaces() -> tuple[str, ...]:
    """Return the sorted names of this host's network interfaces: ``("eth0", "lo")``."""
    return list_names("/sys/class/net")


def interface_that_reaches(*hosts: str) -> str:
    """Return the interface that routes to the hosts, for example ``eth0``.

    The first host with a known address counts, else the default route; ``""`` for neither. Of
    several hosts one may be this host, with an address in 127.0.0.0/8: then loopback is the last
    resort.
    """
    towards = [name for name in map(_interface_towards, hosts) if name]
    if len(hosts) == 1 and towards:
        return towards[0]
    for name in towards:
        if name != "lo":
            return name
    default = default_route_interface()
    if default:
        return default
    return towards[0] if towards else ""


def _interface_from_leader(leader: str, other: str) -> str:
    """Return the interface by which the leader reaches another host.

    The route to the leader's own name does not show the interface: the kernel routes a host's own
    addresses to the interfaces that have them.
    """
    interface = _interface_towards(other)
    if interface in ("", "lo"):  # DNS does not know the other pod's name before it runs
        interface = default_route_interface()
    return interface or interface_that_reaches(leader, other)


def _interface_towards(host: str) -> str:
    """Return the interface by which packets to a host leave, by IPv4 or else by IPv6.

    "" if its name does not resolve, if there is no route, and if no interface has the source
    address. To connect a datagram socket sends no packet: the kernel chooses a source address.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, _DISCARD_PORT))
                address = str(probe.getsockname()[0])
        except (OSError, TypeError, ValueError):  # the last two: a malformed name
            continue
        if family == socket.AF_INET6:
            return _interface_of_ipv6(address)
        if address.startswith("127."):
            return "lo"
        for name in network_interfaces():
            if address_of(name) == address:
                return name
        return ""
    return ""


def _interface_of_ipv6(address: str) -> str:
    """Return the interface that has an IPv6 address (``fe80::1%eth0``); "" if none has it.

    /proc/net/if_inet6 has the address as 32 hexadecimal digits, and the interface last (proc(5)).
    """
    without_zone, _, _ = address.partition("%")
    digits = socket.inet_pton(socket.AF_INET6, without_zone).hex()
    for row in map(str.split, files.text_of("/proc/net/if_inet6").splitlines()):
        if row[_INET6_ADDRESS] == digits:
            return row[_INET6_INTERFACE]
    return ""


def _is_own_name(name: str) -> bool:
    """Return whether a name leads to an address of this host. The kernel binds no other address."""
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError):
        return False
    for family, kind, _, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def address_of_name(name: str) -> str:
    """Return the IPv4 address of a name; "" if the name does not resolve."""
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError, ValueError):
        return ""


def address_of(interface: str) -> str | None:
    """Return the first IPv4 address of an interface; None if the interface has none."""
    request = interface.encode()[:_IFREQ_NAME_BYTES].ljust(_IFREQ_BYTES, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[_IFREQ_ADDRESS])


def default_route_interface() -> str:
    """Return the interface of the kernel's default route; "" if there is none.

    Source: proc(5), net/route: the first column is the interface; the destination and the mask of
    the default route are 00000000.
    """
    rows = map(str.split, files.text_of("/proc/net/route").splitlines()[1:])
    for row in rows:
        is_complete = len(row) > _ROUTE_MASK
        if is_complete and row[_ROUTE_DESTINATION] == row[_ROUTE_MASK] == "00000000":
            return row[_ROUTE_INTERFACE]
    return ""


def has_no_carrier(interface: str) -> bool:
    """Return whether the cable is unplugged, or the other end is down (sysfs-class-net)."""
    if not interface:
        return False
    return files.text_of(f"/sys/class/net/{interface}/carrier").strip() == "0"


def address6_of(interface: str) -> str:
    """Return the first global IPv6 address of an interface; "" if the interface has none.

    Source: proc(5), net/if_inet6: the fourth column is the scope, 00 for a global address.
    """
    for row in map(str.split, files.text_of("/proc/net/if_inet6").splitlines()):
        is_global = len(row) > _INET6_INTERFACE and row[_INET6_SCOPE] == "00"
        if is_global and row[_INET6_INTERFACE] == interface:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[_INET6_ADDRESS]))
    return ""
