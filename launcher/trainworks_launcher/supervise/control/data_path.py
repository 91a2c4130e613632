"""The hosts try their data path before the ranks start.

The control channel has one port. gloo, NCCL and mpirun connect every host with others on ports that
the kernel chooses, from the interface that their variables name. A firewall that lets only some
ports through, an overlay network that drops large packets, or an interface without a route, is met
only by the ranks, which wait for half an hour.

So each host listens at its data address, and the neighbours in the ring of hosts connect to it,
from theirs, and send 9,000 bytes. Both directions of each pair are tried, because only one end of a
pair connects. The other hosts also try rank 0's store: the leader listens at its port until the
ranks start.

An answer that says no (refused, no route, another host) ends the job where its ranks need the path;
silence is a warning, because the path may be slow.

=====  =========  ==================================================================================
step   direction  fields
=====  =========  ==================================================================================
offer  to leader  address, port, interface, mark: where this host listens, and what it wants to read
try    to host    peers: the offers of its neighbours and of rank 0's store, each with its host's
                  name
=====  =========  ==================================================================================
"""

from __future__ import annotations

import os
import socket
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, mapping, number, text
from trainworks_launcher.environment import network_routes
from trainworks_launcher.environment.environment import Devices
from trainworks_launcher.supervise.control import Role
from trainworks_launcher.supervise.control.messages import one_line
from trainworks_launcher.supervise.event_loop import READ, WRITE, Loop

KIND = "data path"

PAYLOAD_BYTES = 9000
"""More than a packet of any Ethernet without jumbo frames, and as much as one with them."""

SILENCE_SECONDS = 5.0
"""How long a peer may take to answer; after that its silence is a warning."""

_MARK_BYTES = 16
_READ_BYTES = 16384
_RETRY_SECONDS = 1.0


class Place(NamedTuple):
    """Where a host's data goes in and out.

    Attributes:
        address: Of this host; ``""``: any of its addresses.
        interface: Its network interface; ``""``: not known.
        why: What chose it: a variable, or this host's own name.
    """

    address: str
    interface: str
    why: str


class Store(NamedTuple):
    """Rank 0's store: the leader's TCP port, and whether the job cannot start without it."""

    port: int
    needed: bool


class Peer(NamedTuple):
    """What is tried: a host, where it listens, and the mark that it expects (16 bytes as
    hexadecimal digits).
    """

    host: str
    address: str
    port: int
    mark: str
    what: str


class DataPath:
    """One host's part in the trial."""

    def __init__(
        self, loop: Loop, own: Own, hosts: Sequence[str], role: Role, events: Events
    ) -> None:
        """Nothing is opened before ``begin``. hosts: all members of the job, the leader first."""
        self._loop = loop
        self._own = own
        self._hosts = tuple(hosts)
        self._leads = own.host == self._hosts[0]
        self._role = role
        self._events = events
        self._mark = os.urandom(_MARK_BYTES).hex()
        self._listeners: list[_Listener] = []
        self._tries: list[_Try] = []
        self._offers: dict[str, Mapping[str, Json]] = {}
        self._shared = False
        self._began = False
        self.over = False
        """Whether this host has tried everything that it was told to try."""

    def begin(self) -> None:
        """Listen, and tell the leader where; once more where the leader starts anew."""
        if not self._began:
            self._began = True
            for problem in _problems_of(self._own.place):
                self._warn(problem)
            self._listen()
        offer: dict[str, Json] = {
            "address": self._own.place.address,
            "port": self._listeners[0].port if self._listeners else 0,
            "interface": self._own.place.interface,
            "mark": self._mark,
        }
        if self._leads:
            self._offered(self._own.host, offer)
        else:
            self._role.tell(KIND, "", step="offer", **offer)

    def heard(self, host: str, message: Mapping[str, Json]) -> None:
        """Take a message of the trial."""
        if message.get("step") == "offer" and self._leads:
            self._offered(host, message)
        elif message.get("step") == "try" and not self._leads:
            self._try(_peers(message))
        elif message.get("step") == "warning" and self._leads:
            self._events.warn(one_line(message.get("text"), 1000))

    def close(self) -> None:
        """Free the ports: the ranks start."""
        for listener in self._listeners:
            listener.close()
        for one in self._tries:
            one.close()
        self._listeners, self._tries = [], []

    # --- listening --------------------------------------------------------------------------------
    def _listen(self) -> None:
        place = self._own.place
        try:
            self._listeners.append(
                _Listener(self._loop, place.address, 0, self._own.host, self._mark)
            )
        except OSError as error:
            self._warn(
                f"{self._own.host} cannot listen at {_named(place)}: {error.strerror or error}"
            )
        store = self._own.store
        if self._leads and store is not None:
            try:
                self._listeners.append(
                    _Listener(self._loop, "", store.port, self._own.host, self._mark)
                )
            except OSError as error:
                self._store_is_closed(store, error)

    def _store_is_closed(self, store: Store, error: OSError) -> None:
        problem = (
            f"port {store.port} of rank 0's store cannot be opened on {self._own.host}:"
            f" {error.strerror or error}"
        )
        advice = (
            f"free it, or set {names.MASTER_PORT_VARIABLE} to another port,"
            " from 1024 on, on every host"
        )
        if store.needed:
            self._events.fail(f"{problem}; {advice}")
        else:
            self._warn(f"{problem}; if the program uses it, {advice}")

    def _warn(self, sentence: str) -> None:
        """Say it here, and in the leader's log, which people read first."""
        self._events.warn(sentence)
        if not self._leads:
            self._role.tell(KIND, step="warning", text=sentence)

    # --- who tries whom ---------------------------------------------------------------------------
    def _offered(self, host: str, offer: Mapping[str, Json]) -> None:
        self._offers[host] = offer
        if self._shared:
            ring = self._ring()
            around = _around(ring, ring.index(host))
            for each in (host, *around):
                self._share_with(each, _around(ring, ring.index(each)))
        elif self._own.may_lose_hosts or len(self._offers) == len(self._hosts):
            self._share()

    def _share(self) -> None:
        """Tell all hosts their peers, once every host that the job still has has made its offer."""
        if self._shared or not self._began:
            return
        here = [self._own.host, *self._role.others()]
        if not all(host in self._offers for host in here):
            if self._own.may_lose_hosts:
                self._loop.after(_RETRY_SECONDS, self._share)
            return
        self._shared = True
        ring = self._ring()
        for place, host in enumerate(ring):
            self._share_with(host, _around(ring, place))

    def _ring(self) -> list[str]:
        """Return the hosts that have made an offer, in the order of the job's."""
        return [each for each in self._hosts if each in self._offers]

    def _share_with(self, host: str, around: Sequence[str]) -> None:
        """Tell a host of its neighbours, and of rank 0's store."""
        peers: list[Json] = [self._row(each, "data") for each in around]
        if host != self._own.host and self._own.store is not None and len(self._listeners) > 1:
            peers.append(
                {**self._row(self._own.host, "store"), "address": "", "port": self._own.store.port}
            )
        if host == self._own.host:
            self._try(_peers({"peers": peers}))
        else:
            self._role.tell(KIND, host, step="try", peers=peers)

    def _row(self, host: str, what: str) -> dict[str, Json]:
        offer = self._offers[host]
        # Where a host does not know its own address, the others know from where it has joined.
        address = offer.get("address") or self._role.others().get(host, "")
        return {
            "host": host,
            "what": what,
            "address": address,
            "port": offer.get("port"),
            "mark": offer.get("mark"),
        }

    # --- trying -----------------------------------------------------------------------------------
    def _try(self, peers: Sequence[Peer]) -> None:
        for peer in peers:
            there = self._role.there()
            address: Any = (peer.address, peer.port)
            if there is not None and not peer.address:
                # By the name that led to the leader; only the port is another one.
                address = (there[0], peer.port, *there[2:])
            if not (peer.port and address[0] and _is_mark(peer.mark)):
                continue  # the peer could not listen, and has said so
            source = self._own.place.address if peer.what == "data" else ""
            self._tries.append(_Try(self._loop, peer, address, source, self._tried))
        if all(one.ended for one in self._tries):
            self._finish()

    def _tried(self, one: _Try) -> None:
        if one.why:
            self._say(one)
        if all(each.ended for each in self._tries):
            self._finish()

    def _say(self, one: _Try) -> None:
        place, peer = self._own.place, one.peer
        connection = "rank 0's store on" if peer.what == "store" else "the data path to"
        where = f"{one.shown} from {_named(place)}"
        cause = f"{connection} {peer.host} does not work: {self._own.host} tried {where}: {one.why}"
        text_ = f"{cause}; {_advice(one, place)}"
        if one.refused and self._own.needs_path:
            self._events.fail(text_)
        else:
            self._warn(text_)

    def _finish(self) -> None:
        if not self.over:
            self.over = True
            self._events.done()


def _around(ring: Sequence[str], place: int) -> list[str]:
    """Return the hosts before and after one in the ring, without itself."""
    around = [ring[place - 1], ring[(place + 1) % len(ring)]]
    return [each for each in dict.fromkeys(around) if each != ring[place]]


class Own(NamedTuple):
    """What the trial has to know of this host.

    Attributes:
        host: Its name among the job's members.
        place: Where its data goes in and out.
        store: Rank 0's store; None if the mode has none.
        needs_path: Whether the ranks of the job need each other: what answers no ends the job then.
        may_lose_hosts: Whether the job may start with fewer hosts than were planned.
    """

    host: str
    place: Place
    store: Store | None
    needs_path: bool
    may_lose_hosts: bool


class Events(NamedTuple):
    """What the trial tells the supervisor.

    Attributes:
        done: This host has tried everything.
        warn: A sentence for the log.
        fail: A sentence: the job cannot start.
    """

    done: Callable[[], None]
    warn: Callable[[str], None]
    fail: Callable[[str], None]


def _named(place: Place) -> str:
    words = [word for word in (place.address, place.interface) if word]
    return f"{' on '.join(words)} ({place.why})" if words else place.why


def _advice(one: _Try, place: Place) -> str:
    variables = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    if one.connected:
        named = place.interface or "the interface"
        return f"large packets are lost on the way: lower the MTU of {named} to the network's"
    if one.peer.what == "store":
        return (
            "open the port between the hosts,"
            f" or set {names.MASTER_PORT_VARIABLE} to one that is open"
        )
    return (
        "open all TCP ports between the hosts (security group, firewall, network policy), or set"
        f" {variables} to an interface that reaches them"
    )


def _peers(message: Mapping[str, Json]) -> list[Peer]:
    """Return the peers in a message of the leader."""
    rows = message.get("peers")
    if not isinstance(rows, list):
        return []
    return [_peer_of(mapping(row)) for row in rows]


def _peer_of(fields: Mapping[str, Json]) -> Peer:
    return Peer(
        host=one_line(fields.get("host"), 255),
        address=one_line(fields.get("address"), 64),
        port=number(fields.get("port")),
        mark=text(fields.get("mark")),
        what=text(fields.get("what")),
    )


def _is_mark(mark: str) -> bool:
    try:
        return len(bytes.fromhex(mark)) == _MARK_BYTES
    except ValueError:
        return False


def place_of(variables: Mapping[str, str], devices: Devices) -> Place:
    """Return where the ranks' data goes in and out of this host, as gloo and NCCL choose it.

    Args:
        variables: The environment of the ranks.
        devices: What this host has.
    """
    order = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for variable in order[::-1] if devices.gpus else order:
        value = variables.get(variable, "").strip()
        interface = _named_interface(value, devices.interfaces)
        if interface:
            address = network_routes.address_of(interface) or network_routes.address6_of(interface)
            return Place(address, interface, f"{variable}={value}")
    if devices.own_address:
        return Place(devices.own_address, devices.routed, "this host's own name")
    return Place("", devices.routed, "the route to the leader" if devices.routed else "any address")


def _named_interface(value: str, interfaces: Sequence[str]) -> str:
    """Return the first interface that a variable names; NCCL takes beginnings of names, too."""
    if value.startswith("^"):
        return ""
    for word in value.lstrip("=").split(","):
        whole = [name for name in interfaces if name == word.strip()]
        beginning = [name for name in interfaces if word.strip() and name.startswith(word.strip())]
        if whole or beginning:
            return (whole or beginning)[0]
    return ""


def _problems_of(place: Place) -> list[str]:
    """Return what is wrong with the interface itself."""
    if not place.interface:
        return []
    named = f"the network interface {place.interface} ({place.why})"
    if network_routes.has_no_carrier(place.interface):
        return [
            (
                f"{named} has no carrier: nothing is plugged in,"
                " or the other end is down; name another one"
            )
        ]
    if not place.address:
        return [f"{named} has no address; name another one"]
    return []


class _Listener:
    """Answers the neighbours: reads a mark and the payload, and says which host this is."""

    def __init__(self, loop: Loop, address: str, port: int, host: str, mark: str) -> None:
        """Listen. Raises OSError."""
        self._loop = loop
        self._reply = f"{host}\n".encode()
        self._expected = bytes.fromhex(mark)
        self._open: dict[socket.socket, bytes] = {}
        family = (
            socket.AF_INET6
            if ":" in address or (not address and socket.has_ipv6)
            else socket.AF_INET
        )
        self._server = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if not address and family == socket.AF_INET6:
                self._server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._server.bind((address, port))
            self._server.listen(1024)
            self._server.setblocking(False)
        except OSError:
            self._server.close()
            raise
        self.port = int(self._server.getsockname()[1])
        loop.watch(self._server, READ, self._accept)

    def close(self) -> None:
        """Close the port and what has come by it."""
        for opened in list(self._open):
            self._drop(opened)
        self._loop.unwatch(self._server)
        self._server.close()

    def _accept(self, _: int) -> None:
        try:
            opened, _address = self._server.accept()
        except OSError:
            return
        opened.setblocking(False)
        self._open[opened] = b""
        self._loop.watch(opened, READ, lambda _: self._read(opened))

    def _read(self, opened: socket.socket) -> None:
        try:
            data = opened.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # The other end closes first: then no address of this port stays in TIME_WAIT here.
            self._drop(opened)
            return
        self._open[opened] += data
        whole = self._open[opened]
        if (
            whole[:_MARK_BYTES] != self._expected[: len(whole)]
            or len(whole) > _MARK_BYTES + PAYLOAD_BYTES
        ):
            self._drop(opened)
        elif len(whole) == _MARK_BYTES + PAYLOAD_BYTES:
            try:
                opened.send(self._reply)
            except OSError:
                self._drop(opened)

    def _drop(self, opened: socket.socket) -> None:
        self._loop.unwatch(opened)
        self._open.pop(opened, None)
        opened.close()


class _Try:
    """One connection to a peer.

    Attributes:
        ended: Whether the result is known.
        why: Why it does not work; ``""``: it works.
        refused: Whether something answered no.
        connected: Whether the connection was made.
        shown: The address and port, for people.
    """

    def __init__(
        self, loop: Loop, peer: Peer, address: Any, source: str, done: Callable[[_Try], None]
    ) -> None:
        """Begin. source: the address of this host that it comes from.

        ``""``: the kernel chooses.
        """
        self.peer = peer
        self.ended = self.refused = self.connected = False
        self.why = ""
        self.shown = f"{address[0]} port {peer.port}"
        self._loop = loop
        self._done = done
        self._outgoing = bytes.fromhex(peer.mark) + bytes(PAYLOAD_BYTES)
        self._answer = b""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        loop.after(SILENCE_SECONDS, lambda: self._end(_silent(self.connected)))
        try:
            if source and (":" in source) == (family == socket.AF_INET6):
                self._socket.bind((source, 0))
            self._socket.connect(address)
        except BlockingIOError:
            pass
        except OSError as error:
            self.refused = True
            why = str(error.strerror or error)
            loop.after(0.0, lambda: self._end(why))
            return
        loop.watch(self._socket, READ | WRITE, self._ready)

    def close(self) -> None:
        """Forget it."""
        if not self.ended:
            self.ended = True
            self._loop.unwatch(self._socket)
        self._socket.close()

    def _ready(self, events: int) -> None:
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.refused = not self.connected
            self._end(os.strerror(code))
            return
        try:
            if events & WRITE:
                self.connected = True
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
                if not self._outgoing:
                    self._loop.watch(self._socket, READ, self._ready)
            elif events & READ:
                self._hear(self._socket.recv(_READ_BYTES))
        except BlockingIOError:
            return
        except OSError as error:
            self.refused = not self.connected
            self._end(str(error.strerror or error))

    def _hear(self, data: bytes) -> None:
        self._answer += data
        if not data:
            self.refused = True
            self._end("another program answers there, or another host")
        elif self._answer.endswith(b"\n"):
            host = self._answer.decode("utf-8", "replace").strip()
            self.refused = host != self.peer.host
            self._end(f"it is {one_line(host, 64)}" if self.refused else "")

    def _end(self, why: str) -> None:
        if not self.ended:
            self.ended = True
            self.why = why
            self._loop.unwatch(self._socket)
            self._socket.close()
            self._done(self)


def _silent(connected: bool) -> str:
    if connected:
        return (
            f"the connection opens, and {PAYLOAD_BYTES:,} bytes do not arrive within"
            f" {SILENCE_SECONDS:g} s"
        )
    return f"no answer within {SILENCE_SECONDS:g} s"
