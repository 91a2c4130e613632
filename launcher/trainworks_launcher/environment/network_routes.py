"""How this host reaches the leader: its interfaces, its routes and its
addresses, as the kernel has them.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
from typing import NamedTuple, Sequence

from trainworks_launcher.contract import files, names
from trainworks_launcher.environment import platforms
from trainworks_launcher.environment.devices import names_in

_SIOCGIFADDR = 0x8915  # netdevice(7)


class Network(NamedTuple):
    """How this host reaches the leader; the fields of ``Devices`` of these names."""

    reaching: str = ""
    own_address: str = ""
    routed: str = ""
    own_route: str = ""


def look_up_network(
    platform: platforms.Description, own_name: str, interfaces: Sequence[str]
) -> Network:
    """Look up how this host of several reaches the leader, and where its own name leads."""
    hosts = platform.hosts
    given = hosts.interface
    first, second = hosts.names[:2]
    leader = platform.leader_address or first
    # The leader's own programs look for rank 0's store by the leader's name, too.
    leads = hosts.current == first
    way = _way_from_leader(leader, second) if leads else interface_that_reaches(leader, second)
    routed = "" if way == "lo" else way
    own_route = ""
    if leads and routed and not _leads_here(leader):
        own_route = address_of(routed) or address6_of(routed)
    reaching = own_address = ""
    if given and given not in interfaces:
        reaching = way
    elif not given:
        own_address = address_of_name(own_name)
        if routed and own_address != address_of(routed):
            reaching = routed
    return Network(reaching, own_address, routed, own_route)


def free_port() -> int:
    """Return a TCP port of the loopback interface that no program listens on.

    0 if there is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((names.LOOPBACK, 0))
        except OSError:
            return 0
        return int(probe.getsockname()[1])


def network_interfaces() -> tuple[str, ...]:
    """Sorted names of this host's network interfaces."""
    return names_in("/sys/class/net")


def interface_that_reaches(*hosts: str) -> str:
    """Return the interface that routes to the first of the hosts, else the one
    of the default route, else ``""``.

    A host reaches itself by the loopback interface where its own name is one of 127.0.0.0/8: where
    more hosts are given, loopback is the last resort.
    """
    found = [name for name in map(_interface_towards, hosts) if name]
    if len(hosts) == 1 and found:
        return found[0]
    return (
        next((name for name in found if name != "lo"), "")
        or default_route_interface()
        or (found or [""])[0]
    )


def _way_from_leader(leader: str, other: str) -> str:
    """Return the interface by which the leader reaches another host.

    Its own name says nothing of that: an address of its own always leads to the
    interface that has it.
    """
    found = _interface_towards(other)
    if found in ("", "lo"):  # its name is not known yet: pods get theirs when they run
        found = default_route_interface()
    return found or interface_that_reaches(leader, other)


def _interface_towards(host: str) -> str:
    """Return the interface by which packets to a host leave, "" if its name is not known.

    A connected datagram socket sends nothing; it only makes the kernel choose a source address.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))
                address = str(probe.getsockname()[0])
        except (OSError, TypeError, ValueError):  # the last two: not even the form of a host name
            continue
        if family == socket.AF_INET6:  # 32 hexadecimal digits, proc(5), net/if_inet6
            digits = socket.inet_pton(family, address.partition("%")[0]).hex()
            rows = map(str.split, files.text_of("/proc/net/if_inet6").splitlines())
            return next((row[-1] for row in rows if row[0] == digits), "")
        if address.startswith("127."):
            return "lo"
        return next((name for name in network_interfaces() if address_of(name) == address), "")
    return ""


def _leads_here(name: str) -> bool:
    """Return whether a name leads to an address of this host: the kernel binds no other one."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError):
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def address_of_name(name: str) -> str:
    """Return the IPv4 address that a name leads to, "" if it leads to none."""
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError, ValueError):
        return ""


def address_of(interface: str) -> str | None:
    """Return the first IPv4 address of an interface; None if it has none."""
    request = interface.encode()[:15].ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def default_route_interface() -> str:
    """Return the interface of the kernel's default route (proc(5), net/route),
    "" if there is none.
    """
    rows = map(str.split, files.text_of("/proc/net/route").splitlines()[1:])
    return next((row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"), "")


def has_no_carrier(interface: str) -> bool:
    """Return whether the kernel says that nothing is plugged in, or the other
    end is down (sysfs-class-net).
    """
    return bool(interface) and files.text_of(f"/sys/class/net/{interface}/carrier").strip() == "0"


def address6_of(interface: str) -> str:
    """Return the first global IPv6 address of an interface (proc(5), net/if_inet6).

    ``""`` if it has none.
    """
    for row in map(str.split, files.text_of("/proc/net/if_inet6").splitlines()):
        is_global = len(row) > 5 and row[3] == "00"
        if is_global and row[-1] == interface:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))
    return ""
