"""The start of the connections between the ranks of a job.

`connect` finds the address of this host that reaches the master, publishes it in the job's store,
and makes one connection for each pair of ranks and link. Both ends present half of a random token
from the store, before anything is unpickled. Who reaches the store can read the token: it is
trusted, as by torch.distributed.
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
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

START_SECONDS = 300.0
"""How long a rank waits for the others when a job starts."""

HELLO_SECONDS = 5.0
"""How long an accepted connection may take to show the token."""

_HALF = 32
_HELLO = struct.Struct(f"<{_HALF}s16sI")
"""First half of the token, name of the link, rank that connects.

The answer is the second half of the token.
"""


class StartError(RuntimeError):
    """The ranks of a job cannot reach each other."""


def connect(
    store: Store,
    rank: int,
    world: int,
    links: Mapping[str, Sequence[int]],
    *,
    master: tuple[str, int],
    timeout: float = START_SECONDS,
) -> dict[str, dict[int, socket.socket]]:
    """Connect this rank with its peers. Collective: every rank of the job calls it once.

    Args:
        store: The job's key-value store.
        rank: Global rank of this process.
        world: Number of ranks.
        links: For each link (at most 16 ASCII characters) the global ranks that
            this rank is connected with.
        master: Host and port of the master, as the job's environment names them.
        timeout: Seconds until the start is given up.

    Returns:
        For each link one socket for each peer.

    Raises:
        StartError: Ranks are missing after `timeout`, or an address cannot be reached.
    """
    end = time.monotonic() + timeout
    store = PrefixStore("smp/transport", store)
    if rank == 0:
        store.set("token", secrets.token_hex(2 * _HALF))
    host = _meeting_address(store, rank, world, master, end, timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(max(world, 16))
        store.set(f"address/{rank}", f"{host} {listener.getsockname()[1]}")
        token = bytes.fromhex(store.get("token").decode())
        wanted = {(name, peer) for name, peers in links.items() for peer in peers if peer > rank}
        door = _Door(listener, token, wanted, end)
        door.start()
        found: dict[str, dict[int, socket.socket]] = {name: {} for name in links}
        try:
            for name, peers in links.items():
                for peer in sorted(peer for peer in peers if peer < rank):
                    _wait(store, "address", [peer], end, timeout)
                    found[name][peer] = _call(
                        store.get(f"address/{peer}").decode(), peer, name, rank, token, end
                    )
        finally:
            door.join()
    for (name, peer), connection in door.accepted.items():
        found[name][peer] = connection
    if door.wanted:
        missing = sorted({peer for _, peer in door.wanted})
        raise StartError(_missing(missing, "connected with", rank, timeout))
    for connections in found.values():
        for connection in connections.values():
            _tune(connection)
    return found


def own_address(host: str, port: int) -> str:
    """Return this machine's address on the way to a host.

    Raises:
        StartError: The name cannot be resolved, or no route leads there.
    """
    reason: OSError | None = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(address)  # UDP: sends nothing, and asks the routing table
                    return str(probe.getsockname()[0])
                except OSError as error:
                    reason = error
    except OSError as error:
        reason = error
    raise StartError(
        f"cannot find the way to the master: {host} ({reason})\n"
        "Set MASTER_ADDR to a host that all ranks reach."
    )


def _meeting_address(
    store: Store, rank: int, world: int, master: tuple[str, int], end: float, timeout: float
) -> str:
    """Return the address at which this rank can be reached by all others.

    The master's own host often has its name as a loopback address. That serves a job on one host
    only. In a job on several hosts such ranks take the address that leads to a rank elsewhere.
    """
    mine = own_address(*master)
    store.set(f"candidate/{rank}", mine)
    _wait(store, "candidate", range(world), end, timeout)
    if ipaddress.ip_address(mine).is_loopback:
        for peer in range(world):
            other = store.get(f"candidate/{peer}").decode()
            if not ipaddress.ip_address(other).is_loopback:
                return own_address(other, master[1])
    return mine


def _wait(
    store: Store, kind: str, ranks: Sequence[int] | range, end: float, timeout: float
) -> None:
    try:
        store.wait(
            [f"{kind}/{rank}" for rank in ranks],
            timedelta(seconds=max(end - time.monotonic(), 0.001)),
        )
    except RuntimeError as error:
        missing = [rank for rank in ranks if not store.check([f"{kind}/{rank}"])]
        if not missing:
            raise
        raise StartError(_missing(missing, "joined", None, timeout)) from error


def _missing(ranks: Sequence[int], what: str, rank: int | None, timeout: float) -> str:
    names = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
    return (
        f"the job did not start: rank{'s' if len(ranks) > 1 else ''} {names} had not"
        f" {what} {'the job' if rank is None else f'rank {rank}'} after {timeout:g} s\n"
        "Look at the output of these ranks,"
        " and check that the hosts reach each other on all TCP ports."
    )


def _call(address: str, peer: int, link: str, rank: int, token: bytes, end: float) -> socket.socket:
    host, port = address.split()
    try:
        connection = socket.create_connection(
            (host, int(port)), timeout=max(end - time.monotonic(), 0.001)
        )
        connection.sendall(_HELLO.pack(token[:_HALF], link.encode(), rank))
        answer = exactly(connection, _HALF)
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


def exactly(connection: socket.socket, count: int) -> bytes:
    """Return the next bytes of a connection.

    Raises:
        ConnectionError: It ended before.
    """
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


class _Door(threading.Thread):
    """Accepts the peers that are wanted. Strangers are dropped, and do not delay the others."""

    def __init__(
        self, listener: socket.socket, token: bytes, wanted: set[tuple[str, int]], end: float
    ) -> None:
        super().__init__(name="smp-door", daemon=True)
        self.listener, self.token, self.wanted, self.end = listener, token, wanted, end
        self.accepted: dict[tuple[str, int], socket.socket] = {}

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        self.listener.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ)
        guests: dict[socket.socket, tuple[bytes, float]] = {}
        while self.wanted and (left := self.end - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 1.0)):
                if key.fileobj is self.listener:
                    with contextlib.suppress(OSError):
                        guest, _ = self.listener.accept()
                        guest.setblocking(False)
                        guests[guest] = (b"", time.monotonic() + HELLO_SECONDS)
                        selector.register(guest, selectors.EVENT_READ)
                    continue
                guest = key.fileobj  # type: ignore[assignment]
                said, until = guests[guest]
                try:
                    part = guest.recv(_HELLO.size - len(said))
                except OSError:
                    part = b""
                said += part
                guests[guest] = (said, until)
                if part and len(said) < _HELLO.size:
                    continue
                selector.unregister(guest)
                del guests[guest]
                if not part or not self._admit(guest, said):
                    guest.close()
            for guest in [
                guest for guest, (_, until) in guests.items() if until < time.monotonic()
            ]:
                selector.unregister(guest)
                del guests[guest]
                guest.close()
        for guest in guests:
            guest.close()
        selector.close()

    def _admit(self, guest: socket.socket, said: bytes) -> bool:
        shown, name, rank = _HELLO.unpack(said)
        if not hmac.compare_digest(shown, self.token[:_HALF]):
            return False
        peer = (name.rstrip(b"\0").decode(errors="replace"), rank)
        if peer not in self.wanted:
            return False
        try:
            guest.setblocking(True)
            guest.sendall(self.token[_HALF:])
        except OSError:
            return False
        self.wanted.discard(peer)
        self.accepted[peer] = guest
        return True


def _tune(connection: socket.socket) -> None:
    """Send at once, and notice a host that is gone within about ten seconds."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 4),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 8000),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    # A forked child, a worker of a DataLoader for example, must not keep the
    # connection of a killed rank open.
    os.register_at_fork(after_in_child=connection.close)
