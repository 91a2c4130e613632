"""Test the data path between the hosts before the ranks start.

The control channel has one port. gloo, NCCL and mpirun connect every host with others on ports that
the kernel chooses, from the interface that their variables name. A firewall that lets only some
ports through, an overlay network that drops large packets, or an interface without a route, would
otherwise show only in the ranks, which wait for half an hour.

So each host listens at its data address. Its neighbours in the ring of hosts connect to that
address, from theirs, and send 9,000 bytes. The test of each pair covers both directions, because
only one end of a pair connects. The other hosts also connect to rank 0's store: the leader listens
at the store's port until the ranks start.

A refusal (refused, no route, another host) ends the job if its ranks need the path. Silence is a
warning, because the path may be slow.

=====  =========  ==================================================================================
step   direction  fields
=====  =========  ==================================================================================
offer  to leader  address, port, interface, mark: where this host listens, and the mark that the
                  neighbours have to send
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
"""More than a packet of any Ethernet without jumbo frames, and one packet with them."""

SILENCE_SECONDS = 5.0
"""Limit of a peer's answer; a slower peer is a warning."""

_BACKLOG = 1024
"""Connections that may wait until they are accepted: at rank 0's store those of all hosts."""

_MARK_BYTES = 16
_READ_BYTES = 16384
_LAST_PORT = 65535
_WARNING_CHARACTERS = 1000
"""Length of another host's warning in the log."""

_RETRY_SECONDS = 1.0
"""From one look for the offers of all hosts to the next one, in a job that may lose hosts."""

# Lengths of a host's name, and of an address as text, in a message of the leader.
_HOST_CHARACTERS = 255
_ADDRESS_CHARACTERS = 64

_SHOWN_HOST_CHARACTERS = 64
"""Length of the answer of another program in the log."""


class DataInterface(NamedTuple):
    """The interface through which a host's data goes.

    Attributes:
        address: Address of this host; ``""`` for any of its addresses.
        interface: Name of the interface; ``""`` if not known.
        reason: Reason of the choice, for example ``NCCL_SOCKET_IFNAME=eth1``.
    """

    address: str
    interface: str
    reason: str


class Store(NamedTuple):
    """Rank 0's store on the leader.

    Attributes:
        port: The TCP port.
        needed: Whether the job cannot start without the store.
    """

    port: int
    needed: bool


class Peer(NamedTuple):
    """The other end of a trial.

    Attributes:
        host: The host.
        address: Address at which the host listens; ``""`` for the leader's control address.
        port: The TCP port.
        mark: The mark that the host expects: 16 bytes as hexadecimal digits.
        purpose: ``data`` or ``store``.
    """

    host: str
    address: str
    port: int
    mark: str
    purpose: str


class DataPath:
    """One host's part in the test."""

    def __init__(
        self, loop: Loop, own: LocalHost, hosts: Sequence[str], role: Role, events: Events
    ) -> None:
        """Open nothing before ``begin``.

        Args:
            loop: The loop of the run.
            own: This host.
            hosts: All members of the job, the leader first.
            role: Sends the messages.
            events: The supervisor's handlers.
        """
        self._loop = loop
        self._own = own
        self._hosts = tuple(hosts)
        self._leads = own.host == self._hosts[0]
        self._role = role
        self._events = events
        self._mark = os.urandom(_MARK_BYTES).hex()
        self._listeners: list[_Listener] = []
        self._trials: list[_Trial] = []
        self._offers: dict[str, Mapping[str, Json]] = {}  # of the leader, by host
        self._shared = False  # the hosts have their peers
        self._began = False
        self.over = False
        """Whether all trials of this host have ended."""

    def begin(self) -> None:
        """Listen at this host's data address, and send the leader an offer.

        Called again if the leader restarts: then the same offer is sent again. Problems of the
        interface are warnings in both logs.
        """
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
            self._note_offer(self._own.host, offer)
        else:
            self._role.tell(KIND, "", step="offer", **offer)

    def receive(self, host: str, message: Mapping[str, Json]) -> None:
        """Handle a message of the test; one that is not for this role is ignored.

        Args:
            host: The sender.
            message: With ``step``: ``offer``, ``try`` or ``warning``.
        """
        if message.get("step") == "offer" and self._leads:
            self._note_offer(host, message)
        elif message.get("step") == "try" and not self._leads:
            self._try(_read_peers(message))
        elif message.get("step") == "warning" and self._leads:
            self._events.warn(one_line(message.get("text"), _WARNING_CHARACTERS))

    def close(self) -> None:
        """Free the ports, which the ranks may need, and end all trials without a result."""
        for listener in self._listeners:
            listener.close()
        for trial in self._trials:
            trial.close()
        self._listeners, self._trials = [], []

    # --- listening --------------------------------------------------------------------------------
    def _listen(self) -> None:
        """Listen at the data address, and on the leader at the port of rank 0's store.

        A port that cannot be opened is a warning; that of a store that the job needs ends the job.
        """
        place = self._own.place
        try:
            self._listen_at(place.address, 0)
        except OSError as error:
            reason = error.strerror or error
            self._warn(f"{self._own.host} cannot listen at {_describe_interface(place)}: {reason}")
        store = self._own.store
        if self._leads and store is not None:
            try:
                self._listen_at("", store.port)
            except OSError as error:
                self._report_taken_store_port(store, error)

    def _listen_at(self, address: str, port: int) -> None:
        """Add a listener. Raises OSError if the port cannot be opened."""
        listener = _Listener(self._loop, address, port, self._own.host, self._mark)
        self._listeners.append(listener)

    def _report_taken_store_port(self, store: Store, error: OSError) -> None:
        """End the job if it needs the store, else warn."""
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
        """Log a warning on this host, and in the leader's log, which people read first."""
        self._events.warn(sentence)
        if not self._leads:
            self._role.tell(KIND, step="warning", text=sentence)

    # --- which host connects to which -------------------------------------------------------------
    def _note_offer(self, host: str, offer: Mapping[str, Json]) -> None:
        """Keep the offer of a host, and send the peers to all hosts when every host has made one.

        Args:
            host: The host, perhaps the leader itself.
            offer: With ``address``, ``port``, ``interface`` and ``mark``.
        """
        self._offers[host] = offer
        if self._shared:
            # A late offer changes the ring around its host only.
            ring = self._ring()
            neighbours = _neighbours(ring, ring.index(host))
            for member in (host, *neighbours):
                self._share_with(member, _neighbours(ring, ring.index(member)))
        # Most jobs wait for all hosts: then nothing is compared before the last offer.
        elif self._own.may_lose_hosts or len(self._offers) == len(self._hosts):
            self._share()

    def _share(self) -> None:
        """Send all hosts their peers, once, if every host that the job still has made an offer.

        A job that may lose hosts looks again after ``_RETRY_SECONDS``: the missing host may be
        given up by then.
        """
        if self._shared or not self._began:
            return
        present = [self._own.host, *self._role.others()]
        if not all(host in self._offers for host in present):
            if self._own.may_lose_hosts:
                self._loop.after(_RETRY_SECONDS, self._share)
            return
        self._shared = True
        ring = self._ring()
        for place, host in enumerate(ring):
            self._share_with(host, _neighbours(ring, place))

    def _ring(self) -> list[str]:
        """Return the hosts that have made an offer, in the order of the job."""
        return [host for host in self._hosts if host in self._offers]

    def _share_with(self, host: str, neighbours: Sequence[str]) -> None:
        """Send a host its peers: its neighbours, and rank 0's store.

        For the leader itself the trials begin at once.
        """
        peers: list[Json] = []
        for neighbour in neighbours:
            peers.append(self._make_peer_fields(neighbour, "data"))
        # The second listener is that of the store; it may have failed.
        is_store_open = self._own.store is not None and len(self._listeners) > 1
        if host != self._own.host and self._own.store is not None and is_store_open:
            store = self._make_peer_fields(self._own.host, "store")
            store.update({"address": "", "port": self._own.store.port})
            peers.append(store)
        if host == self._own.host:
            self._try(_read_peers({"peers": peers}))
        else:
            self._role.tell(KIND, host, step="try", peers=peers)

    def _make_peer_fields(self, host: str, purpose: str) -> dict[str, Json]:
        """Return a host as the fields of a peer in a message.

        Args:
            host: The host, which has made an offer.
            purpose: ``data`` or ``store``.
        """
        offer = self._offers[host]
        # A host that does not know its own address is reached by that of its control connection.
        address = offer.get("address") or self._role.others().get(host, "")
        return {
            "host": host,
            "what": purpose,
            "address": address,
            "port": offer.get("port"),
            "mark": offer.get("mark"),
        }

    # --- trying -----------------------------------------------------------------------------------
    def _try(self, peers: Sequence[Peer]) -> None:
        """Begin a trial with each peer; without one, the test of this host is over at once."""
        for peer in peers:
            leader_address = self._role.leader_address()
            address: Any = (peer.address, peer.port)
            if leader_address is not None and not peer.address:
                # At the leader's control address, with another port.
                address = (leader_address[0], peer.port, *leader_address[2:])
            is_complete = 0 < peer.port <= _LAST_PORT and address[0] and _is_mark(peer.mark)
            if not is_complete:
                # The peer could not listen, and has sent a warning itself.
                continue
            # The store is reached as the control channel is, not by the data interface.
            source = self._own.place.address if peer.purpose == "data" else ""
            self._trials.append(_Trial(self._loop, peer, address, source, self._note_result))
        self._finish_if_ended()

    def _note_result(self, trial: _Trial) -> None:
        """Report a trial that has failed; finish the test of this host after the last one."""
        if trial.reason:
            self._report_failure(trial)
        self._finish_if_ended()

    def _report_failure(self, trial: _Trial) -> None:
        """End the job after a refusal if its ranks need the path, else warn in both logs."""
        place, peer = self._own.place, trial.peer
        connection = "rank 0's store on" if peer.purpose == "store" else "the data path to"
        where = f"{trial.shown} from {_describe_interface(place)}"
        problem = f"{connection} {peer.host} does not work"
        tried = f"{self._own.host} tried {where}: {trial.reason}"
        sentence = f"{problem}: {tried}; {_advise(trial, place)}"
        if trial.refused and self._own.needs_path:
            self._events.fail(sentence)
        else:
            self._warn(sentence)

    def _finish_if_ended(self) -> None:
        """Tell the supervisor, once, that all trials of this host have ended."""
        if self.over or not all(trial.ended for trial in self._trials):
            return
        self.over = True
        self._events.done()


def _neighbours(ring: Sequence[str], place: int) -> list[str]:
    """Return the hosts before and after a place in the ring, without the host itself."""
    both = dict.fromkeys((ring[place - 1], ring[(place + 1) % len(ring)]))
    return [host for host in both if host != ring[place]]


class LocalHost(NamedTuple):
    """This host, for the test.

    Attributes:
        host: Its name among the job's members.
        place: The interface of its data.
        store: Rank 0's store; None if the mode has none.
        needs_path: Whether the ranks of the job need each other: a refusal ends the job then.
        may_lose_hosts: Whether the job may start with fewer hosts than were planned.
    """

    host: str
    place: DataInterface
    store: Store | None
    needs_path: bool
    may_lose_hosts: bool


class Events(NamedTuple):
    """The supervisor's handlers for the test.

    Attributes:
        done: All trials of this host have ended.
        warn: Log a sentence.
        fail: End the job, which cannot start, with a sentence.
    """

    done: Callable[[], None]
    warn: Callable[[str], None]
    fail: Callable[[str], None]


def _describe_interface(place: DataInterface) -> str:
    """Describe an interface: ``10.0.0.2 on eth1 (NCCL_SOCKET_IFNAME=eth1)``, or only the reason."""
    words = [word for word in (place.address, place.interface) if word]
    if not words:
        return place.reason
    return f"{' on '.join(words)} ({place.reason})"


def _advise(trial: _Trial, place: DataInterface) -> str:
    """Return what to do after a trial that has failed.

    Args:
        trial: The trial.
        place: The data interface of this host.
    """
    variables = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    if trial.connected:
        # The packets of the connection are small, those of the payload are not.
        named = place.interface or "the interface"
        return f"large packets are lost on the way: lower the MTU of {named} to the network's"
    if trial.peer.purpose == "store":
        return (
            "open the port between the hosts,"
            f" or set {names.MASTER_PORT_VARIABLE} to one that is open"
        )
    return (
        "open all TCP ports between the hosts (security group, firewall, network policy), or set"
        f" {variables} to an interface that reaches them"
    )


def _read_peers(message: Mapping[str, Json]) -> list[Peer]:
    """Read the peers in a message of the leader; ``[]`` if there are none, or in another form."""
    rows = message.get("peers")
    if not isinstance(rows, list):
        return []
    return [_read_peer(mapping(row)) for row in rows]


def _read_peer(fields: Mapping[str, Json]) -> Peer:
    """Read one peer; a field in another form becomes ``""`` or 0."""
    return Peer(
        host=one_line(fields.get("host"), _HOST_CHARACTERS),
        address=one_line(fields.get("address"), _ADDRESS_CHARACTERS),
        port=number(fields.get("port")),
        mark=text(fields.get("mark")),
        purpose=text(fields.get("what")),
    )


def _is_mark(mark: str) -> bool:
    """Return whether a text is 16 bytes as hexadecimal digits."""
    try:
        return len(bytes.fromhex(mark)) == _MARK_BYTES
    except ValueError:
        return False


def place_of(variables: Mapping[str, str], devices: Devices) -> DataInterface:
    """Find the interface of the ranks' data on this host, as gloo and NCCL choose it.

    That is the interface in the variable of NCCL (on a host with GPUs) or gloo, else in that of the
    other library. Without such a variable it is the one of the host's own name, then the one with
    the route to the leader.

    Args:
        variables: The environment of the ranks.
        devices: Devices of this host.

    Returns:
        The interface; with the reason ``any address`` if nothing names one.
    """
    libraries = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    if devices.gpus:
        libraries.reverse()
    for variable in libraries:
        value = variables.get(variable, "").strip()
        interface = _named_interface(value, devices.interfaces)
        if interface:
            address = network_routes.address_of(interface) or network_routes.address6_of(interface)
            return DataInterface(address, interface, f"{variable}={value}")
    if devices.own_address:
        return DataInterface(devices.own_address, devices.routed, "this host's own name")
    if devices.routed:
        return DataInterface("", devices.routed, "the route to the leader")
    return DataInterface("", devices.routed, "any address")


def _named_interface(value: str, interfaces: Sequence[str]) -> str:
    """Return the first interface of this host that a variable names; ``""`` for none.

    Args:
        value: For example ``eth1``, ``=eth1,eth2``, or ``eth`` (NCCL accepts prefixes of names).
        interfaces: Names of this host's interfaces.
    """
    if value.startswith("^"):
        # NCCL's form for all interfaces but these.
        return ""
    for word in value.lstrip("=").split(","):
        name_or_prefix = word.strip()
        if name_or_prefix in interfaces:
            return name_or_prefix
        for interface in interfaces:
            if name_or_prefix and interface.startswith(name_or_prefix):
                return interface
    return ""


def _problems_of(place: DataInterface) -> list[str]:
    """Return the problems of an interface itself, as sentences; ``[]`` for none."""
    if not place.interface:
        return []
    interface = f"the network interface {place.interface} ({place.reason})"
    if network_routes.has_no_carrier(place.interface):
        problem = "nothing is plugged in, or the other end is down; name another one"
        return [f"{interface} has no carrier: {problem}"]
    if not place.address:
        return [f"{interface} has no address; name another one"]
    return []


class _Listener:
    """Answers the neighbours: reads a mark and the payload, and sends this host's name."""

    def __init__(self, loop: Loop, address: str, port: int, host: str, mark: str) -> None:
        """Listen.

        Args:
            loop: The loop of the run.
            address: Address of this host; ``""`` for all of them.
            port: The TCP port; 0 for a free one.
            host: Name of this host, the answer to a right mark.
            mark: The mark that a neighbour has to send, as hexadecimal digits.

        Raises:
            OSError: The address or the port cannot be used.
        """
        self._loop = loop
        self._reply = f"{host}\n".encode()
        self._expected = bytes.fromhex(mark)
        self._open: dict[socket.socket, bytes] = {}
        # A kernel may have IPv6 switched off: then every address is one of IPv4.
        uses_ipv6 = ":" in address or (not address and socket.has_dualstack_ipv6())
        family = socket.AF_INET6 if uses_ipv6 else socket.AF_INET
        self._server = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if not address and family == socket.AF_INET6:
                # One socket for IPv4, too.
                self._server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._server.bind((address, port))
            self._server.listen(_BACKLOG)
            self._server.setblocking(False)
        except OSError:
            self._server.close()
            raise
        self.port = int(self._server.getsockname()[1])
        loop.watch(self._server, READ, self._accept)

    def close(self) -> None:
        """Close the port and its connections."""
        for opened in list(self._open):
            self._drop(opened)
        self._loop.unwatch(self._server)
        self._server.close()

    def _accept(self, _: int) -> None:
        """Accept one connection, and read from it in the loop."""
        try:
            opened, _address = self._server.accept()
        except OSError:
            # The other end has gone.
            return
        opened.setblocking(False)
        self._open[opened] = b""
        self._loop.watch(opened, READ, lambda _: self._read(opened))

    def _read(self, opened: socket.socket) -> None:
        """Read what a neighbour has sent, and answer when mark and payload are complete.

        A connection that begins with another mark, or sends more, is closed.
        """
        try:
            data = opened.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # The neighbour closes first: so no address of this port stays in TIME_WAIT here.
            self._drop(opened)
            return
        self._open[opened] += data
        received = self._open[opened]
        # The mark may have come in part only.
        is_foreign = received[:_MARK_BYTES] != self._expected[: len(received)]
        full_size = _MARK_BYTES + PAYLOAD_BYTES
        if is_foreign or len(received) > full_size:
            self._drop(opened)
        elif len(received) == full_size:
            try:
                opened.send(self._reply)
            except OSError:
                self._drop(opened)

    def _drop(self, opened: socket.socket) -> None:
        """Close a connection."""
        self._loop.unwatch(opened)
        self._open.pop(opened, None)
        opened.close()


class _Trial:
    """One connection to a peer.

    Attributes:
        ended: Whether the result is known.
        reason: Why the path does not work; ``""`` if it works.
        refused: Whether the network or a program answered with a refusal.
        connected: Whether the connection was made.
        shown: The address and port, for people.
    """

    def __init__(
        self, loop: Loop, peer: Peer, address: Any, source: str, done: Callable[[_Trial], None]
    ) -> None:
        """Begin to connect. Errors are results, none is raised.

        Args:
            loop: The loop of the run.
            peer: The other end.
            address: Its socket address, for example ``("10.0.0.2", 7777)``.
            source: Address of this host for the connection; ``""`` lets the kernel choose.
            done: Called once at the end with this trial; not after ``close``.
        """
        self.peer = peer
        self.ended = self.refused = self.connected = False
        self.reason = ""
        self.shown = f"{address[0]} port {peer.port}"
        self._loop = loop
        self._done = done
        self._outgoing = bytes.fromhex(peer.mark) + bytes(PAYLOAD_BYTES)
        self._reply = b""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket: socket.socket | None = None
        loop.after(SILENCE_SECONDS, lambda: self._end(_describe_silence(self.connected)))
        try:
            # Also the socket itself fails, if this host does not have the family (IPv6 is off).
            self._socket = opened = socket.socket(family, socket.SOCK_STREAM)
            opened.setblocking(False)
            if source and (":" in source) == (family == socket.AF_INET6):
                opened.bind((source, 0))
            opened.connect(address)
        except BlockingIOError:
            pass
        except OSError as error:
            self.refused = True
            reason = str(error.strerror or error)
            loop.after(0.0, lambda: self._end(reason))
            return
        loop.watch(opened, READ | WRITE, lambda events: self._ready(opened, events))

    def close(self) -> None:
        """End the trial without a result, and close the connection."""
        self.ended = True
        self._close_socket()

    def _close_socket(self) -> None:
        """Close the connection, if there is one, and watch it no more."""
        if self._socket is not None:
            self._loop.unwatch(self._socket)
            self._socket.close()
            self._socket = None

    def _ready(self, opened: socket.socket, events: int) -> None:
        """Send the mark and the payload, then read the reply; end the trial after an error.

        An error before the connection stands is a refusal.
        """
        code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.refused = not self.connected
            self._end(os.strerror(code))
            return
        try:
            if events & WRITE:
                self.connected = True
                self._outgoing = self._outgoing[opened.send(self._outgoing) :]
                if not self._outgoing:
                    # Without WRITE, for which the socket would always be ready.
                    self._loop.watch(opened, READ, lambda ready: self._ready(opened, ready))
            elif events & READ:
                self._take_reply(opened.recv(_READ_BYTES))
        except BlockingIOError:
            return
        except OSError as error:
            self.refused = not self.connected
            self._end(str(error.strerror or error))

    def _take_reply(self, data: bytes) -> None:
        """End the trial when the reply is complete: the name of the peer's host, and a newline.

        Args:
            data: The next bytes of the reply; empty if the other end has closed the connection.
        """
        self._reply += data
        if not data:
            # A listener closes the connection if the mark is not its own.
            self.refused = True
            self._end("another program answers there, or another host")
        elif self._reply.endswith(b"\n"):
            host = self._reply.decode("utf-8", "replace").strip()
            self.refused = host != self.peer.host
            reason = ""
            if self.refused:
                reason = f"it is {one_line(host, _SHOWN_HOST_CHARACTERS)}"
            self._end(reason)

    def _end(self, reason: str) -> None:
        """Close the connection and report the result, once; ``""``: the path works."""
        if not self.ended:
            self.ended = True
            self.reason = reason
            self._close_socket()
            self._done(self)


def _describe_silence(connected: bool) -> str:
    """Return the reason of a trial without an answer, as the end of a sentence."""
    if connected:
        return (
            f"the connection opens, and {PAYLOAD_BYTES:,} bytes do not arrive within"
            f" {SILENCE_SECONDS:g} s"
        )
    return f"no answer within {SILENCE_SECONDS:g} s"
