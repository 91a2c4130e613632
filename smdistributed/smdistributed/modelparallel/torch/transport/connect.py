"""Connect the ranks of a job with each other, at its start.

`connect` finds the address of this host on the way to the master, publishes the address in the
job's store, and makes one connection for each pair of ranks and link. Both ends present half of a
random token from the store, before anything is unpickled. Every process that reaches the store can
read the token: the store is trusted, as by torch.distributed.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

START_SECONDS = 300.0
"""Seconds that a rank waits for the others when a job starts."""

HELLO_SECONDS = 5.0
"""Seconds that an accepted connection may take to send the token."""

_LOOK_SECONDS = 1.0
"""Longest time between two looks for connections that take too long, and for a cancelled start."""

_MOST_NAMED_RANKS = 20
"""Number of missing ranks that an error names at most."""

_HALF = 32
"""Bytes of half a token."""

_HELLO = struct.Struct(f"<{_HALF}s16sI")
"""First half of the token, name of the link, rank that connects.

The answer is the second half of the token.
"""


class StartError(RuntimeError):
    """The ranks of a job cannot reach each other."""


class Rendezvous(NamedTuple):
    """Where the ranks of a job meet.

    Attributes:
        store: The job's key-value store.
        world: Number of ranks.
        master: Host and port of the master, from the job's environment.
    """

    store: Store
    world: int
    master: tuple[str, int]


def connect(
    rendezvous: Rendezvous,
    rank: int,
    links: Mapping[str, Sequence[int]],
    timeout: float = START_SECONDS,
) -> dict[str, dict[int, socket.socket]]:
    """Connect this rank with its peers. Collective: every rank of the job calls this once.

    The address of this rank is written to the job's store, and by rank 0 a new token. The listening
    socket is closed at the end. In a forked child the sockets are closed.

    Args:
        rendezvous: Where the ranks meet.
        rank: Global rank of this process.
        links: Name of a link (at most 16 ASCII characters) -> global ranks that this rank is
            connected with.
        timeout: Seconds after which the start fails.

    Returns:
        Name of a link -> global rank of a peer -> connected socket, without a time limit. The
        caller closes the sockets.

    Raises:
        StartError: Ranks are missing after `timeout`, an address cannot be reached, or another
            program answers at it.
        RuntimeError: The store cannot be used.
        OSError: This host cannot listen at its address.
    """
    end = time.monotonic() + timeout
    # Names of the store: "token", and "candidate/RANK" and "address/RANK" of each rank.
    store = PrefixStore("smp/transport", rendezvous.store)
    if rank == 0:
        store.set("token", secrets.token_hex(2 * _HALF))
    start = _Start(store, rank, end, timeout)
    host = _reachable_address(start, rendezvous.world, rendezvous.master)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(max(rendezvous.world, 16))
        store.set(f"address/{rank}", f"{host} {listener.getsockname()[1]}")
        token = bytes.fromhex(store.get("token").decode())
        # Of two ranks the higher one connects, and the lower one accepts.
        expected: set[tuple[str, int]] = set()
        for name, peers in links.items():
            expected.update((name, peer) for peer in peers if peer > rank)
        acceptor = _Acceptor(listener, token, expected, end)
        acceptor.start()
        sockets: dict[str, dict[int, socket.socket]] = {name: {} for name in links}
        try:
            for name, peers in links.items():
                for peer in sorted(peer for peer in peers if peer < rank):
                    start.wait("address", [peer])
                    sockets[name][peer] = _connect_with(start, peer, name, token)
        except BaseException:
            # The job does not start: this error need not wait for the higher ranks.
            acceptor.cancel()
            raise
        finally:
            acceptor.join()
    for (name, peer), connection in acceptor.accepted.items():
        sockets[name][peer] = connection
    if acceptor.expected:
        missing = sorted({peer for _, peer in acceptor.expected})
        raise StartError(_missing(missing, f"connected with rank {rank}", timeout))
    for connections in sockets.values():
        for connection in connections.values():
            _tune(connection)
    return sockets


@dataclass(frozen=True)
class _Start:
    """The start of a job on this rank.

    Attributes:
        store: The job's key-value store.
        rank: Global rank of this process.
        end: Time at which the start fails, as of `time.monotonic`.
        timeout: Seconds from the beginning to this time.
    """

    store: Store
    rank: int
    end: float
    timeout: float

    @property
    def seconds_left(self) -> float:
        """Seconds until the start fails; never 0, which would mean no limit."""
        return max(self.end - time.monotonic(), 0.001)

    def wait(self, kind: str, ranks: Sequence[int] | range) -> None:
        """Wait until each of some ranks has an entry in the store. Nothing is written.

        Args:
            kind: The kind of the entries, "candidate" or "address".
            ranks: The ranks.

        Raises:
            StartError: Ranks are missing at the end of the start.
            RuntimeError: The store cannot be used.
        """
        keys = [f"{kind}/{rank}" for rank in ranks]
        try:
            self.store.wait(keys, timedelta(seconds=self.seconds_left))
        except RuntimeError as error:
            missing = [rank for rank in ranks if not self.store.check([f"{kind}/{rank}"])]
            if not missing:
                raise
            raise StartError(_missing(missing, "joined the job", self.timeout)) from error


def own_address(host: str, port: int) -> str:
    """Return the IP address of this host on the way to another one. Nothing is sent there.

    Args:
        host: Name or address of the other host.
        port: A port of it.

    Returns:
        The first one with a route, as text, such as "10.0.0.7".

    Raises:
        StartError: The name cannot be resolved, or no route leads to the host.
    """
    reason: OSError | None = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(address)  # UDP: reads the routing table, and sends nothing
                    return str(probe.getsockname()[0])
                except OSError as error:
                    reason = error
    except OSError as error:
        reason = error
    raise StartError(
        f"cannot find the way to the master: {host} ({reason})\n"
        "Set MASTER_ADDR to a host that all ranks reach."
    )


def _reachable_address(start: _Start, world: int, master: tuple[str, int]) -> str:
    """Return the address at which all other ranks can reach this rank.

    Every rank stores its candidate, and waits for those of all others. On the master's own host
    its name is often a loopback address, which only works for a job on one host. In a job on
    several hosts the ranks of this host take their address on the way to a rank of another host.

    Args:
        start: The start of this rank.
        world: Number of ranks.
        master: Host and port of the master.

    Raises:
        StartError: Ranks are missing, or the master cannot be reached.
        RuntimeError: The store cannot be used.
    """
    candidate = own_address(*master)
    start.store.set(f"candidate/{start.rank}", candidate)
    start.wait("candidate", range(world))
    if ipaddress.ip_address(candidate).is_loopback:
        for peer in range(world):
            other = start.store.get(f"candidate/{peer}").decode()
            if not ipaddress.ip_address(other).is_loopback:
                return own_address(other, master[1])
    return candidate


def _missing(ranks: Sequence[int], action: str, timeout: float) -> str:
    """Return the text of an error about ranks that are missing.

    Args:
        ranks: The ranks.
        action: The action that is missing, such as "joined the job".
        timeout: Seconds that this rank has waited.
    """
    names = ", ".join(map(str, ranks[:_MOST_NAMED_RANKS]))
    if len(ranks) > _MOST_NAMED_RANKS:
        names += ", ..."
    noun = "ranks" if len(ranks) > 1 else "rank"
    return (
        f"the job did not start: {noun} {names} had not {action} after {timeout:g} s\n"
        "Look at the output of these ranks,"
        " and check that the hosts reach each other on all TCP ports."
    )


def _connect_with(start: _Start, peer: int, link: str, token: bytes) -> socket.socket:
    """Connect with a lower rank, and return the socket after both ends have shown their token.

    The call waits for the other end until the start fails.

    Args:
        start: The start of this rank.
        peer: Global rank of the other end. Its address is in the store.
        link: Name of the link, at most 16 ASCII characters.
        token: The token of the job.

    Raises:
        StartError: The rank cannot be reached, the connection was closed, or another program is at
            its address.
        RuntimeError: The store cannot be used.
    """
    rank = start.rank
    host, port = start.store.get(f"address/{peer}").decode().split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=start.seconds_left)
        connection.sendall(_HELLO.pack(token[:_HALF], link.encode(), rank))
        answer = exactly(connection, _HALF, end=start.end)
    except OSError as error:
        raise StartError(
            f"rank {rank} cannot connect with rank {peer}: {host} port {port} ({error})\n"
            "Check that the hosts reach each other on all TCP ports."
        ) from error
    if not hmac.compare_digest(answer, token[_HALF:]):
        connection.close()
        raise StartError(
            f"rank {rank} cannot connect with rank {peer}: {host} port {port} is another program"
        )
    return connection


def exactly(connection: socket.socket, count: int, end: float | None = None) -> bytes:
    """Read an exact number of bytes from a connection, and return them.

    Args:
        connection: The connection.
        count: Number of bytes.
        end: Time at which to give up, as of `time.monotonic`. The socket's limit is changed for
            it. None: each part of the bytes may take as long as the socket's limit.

    Raises:
        TimeoutError: The bytes are not there at `end`.
        ConnectionError: The connection ended before.
        OSError: The connection cannot be read.
    """
    data = b""
    while len(data) < count:
        if end is not None:
            # A limit of 0 would mean not to wait at all, for bytes that are there, too.
            connection.settimeout(max(end - time.monotonic(), 0.001))
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


class _Acceptor(threading.Thread):
    """Accepts the connections of the expected peers.

    Other connections are closed. They do not delay the peers, because all hellos are read at the
    same time.

    Attributes:
        expected: (name of a link, global rank) of peers that have not connected yet.
        accepted: The same of connected peers -> the socket.
    """

    def __init__(
        self, listener: socket.socket, token: bytes, expected: set[tuple[str, int]], end: float
    ) -> None:
        super().__init__(name="smp-door", daemon=True)
        self.listener, self.token, self.expected, self.end = listener, token, expected, end
        self.accepted: dict[tuple[str, int], socket.socket] = {}
        self._pending: dict[socket.socket, _PendingHello] = {}
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        """Let the thread end within `_LOOK_SECONDS`, whether or not peers are missing."""
        self._is_cancelled.set()

    def run(self) -> None:
        """Accept connections until all peers are here, or the time is over. The thread's body.

        Accepted peers are moved from `expected` to `accepted`. Connections without a complete hello
        are closed at the end.

        Raises:
            OSError: The listening socket cannot be watched.
        """
        self.listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while self.expected and not self._is_cancelled.is_set():
                seconds_left = self.end - time.monotonic()
                if seconds_left <= 0:
                    break
                for key, _ in selector.select(min(seconds_left, _LOOK_SECONDS)):
                    if key.fileobj is self.listener:
                        self._accept(selector)
                    else:
                        self._read_hello(selector, key.fileobj)  # type: ignore[arg-type]
                now = time.monotonic()
                for connection, hello in list(self._pending.items()):
                    if hello.deadline < now:
                        self._forget(selector, connection)
                        connection.close()
            for connection in self._pending:
                connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        """Accept a connection, and begin to read its hello.

        An error of the connection is passed over.
        """
        # The other end may have gone meanwhile.
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            self._pending[connection] = _PendingHello(time.monotonic() + HELLO_SECONDS)
            selector.register(connection, selectors.EVENT_READ)

    def _read_hello(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        """Read a part of a hello, and admit or close the connection after the last part.

        An error of the connection closes it, and is not raised.
        """
        hello = self._pending[connection]
        try:
            part = connection.recv(_HELLO.size - len(hello.data))
        except OSError:
            part = b""
        hello.data += part
        if part and len(hello.data) < _HELLO.size:
            return
        self._forget(selector, connection)
        if not part or not self._admit(connection, hello.data):
            connection.close()

    def _forget(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        """Stop to wait for a hello. The connection stays open."""
        selector.unregister(connection)
        del self._pending[connection]

    def _admit(self, connection: socket.socket, hello: bytes) -> bool:
        """Check a hello, and answer with the other half of the token.

        The connection becomes one of the accepted ones.

        It is made blocking for that. An error of the connection is not raised.

        Args:
            connection: The connection.
            hello: Its first bytes, as many as `_HELLO` has.

        Returns:
            Whether the connection is of an expected peer, and has got the answer.
        """
        token_half, name, rank = _HELLO.unpack(hello)
        if not hmac.compare_digest(token_half, self.token[:_HALF]):
            return False
        peer = (name.rstrip(b"\0").decode(errors="replace"), rank)
        if peer not in self.expected:
            return False
        try:
            connection.setblocking(True)
            connection.sendall(self.token[_HALF:])
        except OSError:
            return False
        self.expected.discard(peer)
        self.accepted[peer] = connection
        return True


@dataclass
class _PendingHello:
    """A hello that is not read completely.

    Attributes:
        deadline: Time at which the connection is closed, as of `time.monotonic`.
        data: The bytes so far.
    """

    deadline: float
    data: bytes = b""


_KEEPALIVE_OPTIONS = {
    "TCP_KEEPIDLE": 4,  # seconds of silence before the first probe
    "TCP_KEEPINTVL": 2,  # seconds between two probes
    "TCP_KEEPCNT": 2,  # probes without an answer
    "TCP_USER_TIMEOUT": 8000,  # milliseconds in which sent data must be acknowledged
}


def _tune(connection: socket.socket) -> None:
    """Set the options of a socket: wait without limit, send at once, and notice a lost host within
    about ten seconds. The socket is closed in forked children.

    Raises:
        OSError: The system refuses an option.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE_OPTIONS.items():
        # Not all systems have each option.
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    # A forked child, a worker of a DataLoader for example, must not keep the
    # connection of a killed rank open.
    os.register_at_fork(after_in_child=connection.close)
