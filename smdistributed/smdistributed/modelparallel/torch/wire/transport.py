"""Connections between the ranks of a job, and messages with tensors over them.

torch.distributed has no receive from any source and ends a receive by a timeout. The pipeline needs the first and must
not have the second, so its messages have TCP connections of their own:

* `connect` finds the address of this host that reaches the master, publishes it in the job's store, and makes one
  connection for each pair of ranks and link. Both ends present half of a random token from the store, before anything
  is unpickled. Who reaches the store can read the token: it is trusted, as by torch.distributed.
* `Transport` is one link, a mesh. A message is a picklable header with tensors. Tensors travel as raw bytes from the
  sender's memory to the receiver's.

CUDA tensors go by NCCL if the link has a `payload` (transport_nccl.py), else through host memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import ipaddress
import os
import pickle
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from .inbox import Inbox
from .nested import dumps

START_SECONDS = 300.0
"""How long a rank waits for the others when a job starts."""

HELLO_SECONDS = 5.0
"""How long an accepted connection may take to show the token."""

_HALF = 32
_HELLO = struct.Struct(f"<{_HALF}s16sI")
"""First half of the token, name of the link, rank that connects. The answer is the second half of the token."""

_SIZES = struct.Struct("<I")
_BUFFER = 1 << 16


class StartError(RuntimeError):
    """The ranks of a job cannot reach each other."""


# ---- start of a job ------------------------------------------------------------------------------------------------


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
        links: For each link (at most 16 ASCII characters) the global ranks that this rank is connected with.
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
                    found[name][peer] = _call(store.get(f"address/{peer}").decode(), peer, name, rank, token, end)
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
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(address)  # UDP: sends nothing, and asks the routing table
                    return str(probe.getsockname()[0])
                except OSError as error:
                    reason = error
    except OSError as error:
        reason = error
    raise StartError(
        f"cannot find the way to the master: {host} ({reason})\nSet MASTER_ADDR to a host that all ranks reach."
    )


def _meeting_address(store: Store, rank: int, world: int, master: tuple[str, int], end: float, timeout: float) -> str:
    """Return the address at which this rank can be reached by all others.

    The master's own host often has its name as a loopback address. That serves a job on one host only. In a job on
    several hosts such ranks take the address that leads to a rank elsewhere.
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


def _wait(store: Store, kind: str, ranks: Sequence[int] | range, end: float, timeout: float) -> None:
    try:
        store.wait([f"{kind}/{rank}" for rank in ranks], timedelta(seconds=max(end - time.monotonic(), 0.001)))
    except RuntimeError as error:
        missing = [rank for rank in ranks if not store.check([f"{kind}/{rank}"])]
        if not missing:
            raise
        raise StartError(_missing(missing, "joined", None, timeout)) from error


def _missing(ranks: Sequence[int], what: str, rank: int | None, timeout: float) -> str:
    names = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
    return (
        f"the job did not start: rank{'s' if len(ranks) > 1 else ''} {names} had not {what} "
        f"{'the job' if rank is None else f'rank {rank}'} after {timeout:g} s\n"
        "Look at the output of these ranks, and check that the hosts reach each other on all TCP ports."
    )


def _call(address: str, peer: int, link: str, rank: int, token: bytes, end: float) -> socket.socket:
    host, port = address.split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=max(end - time.monotonic(), 0.001))
        connection.sendall(_HELLO.pack(token[:_HALF], link.encode(), rank))
        answer = b""
        while len(answer) < _HALF:
            part = connection.recv(_HALF - len(answer))
            if not part:
                raise ConnectionError("the connection was closed")
            answer += part
    except OSError as error:
        raise StartError(
            f"rank {rank} cannot connect with rank {peer}: {host} port {port} ({error})\n"
            "Check that the hosts reach each other on all TCP ports."
        ) from error
    if not hmac.compare_digest(answer, token[_HALF:]):
        connection.close()
        raise StartError(f"rank {rank} cannot connect with rank {peer}: {host} port {port} is another program")
    return connection


class _Door(threading.Thread):
    """Accepts the peers that are wanted. Strangers are dropped, and do not delay the others."""

    def __init__(self, listener: socket.socket, token: bytes, wanted: set[tuple[str, int]], end: float) -> None:
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
            for guest in [guest for guest, (_, until) in guests.items() if until < time.monotonic()]:
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
    for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 8000)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    # A forked child, a worker of a DataLoader for example, must not keep the connection of a killed rank open.
    os.register_at_fork(after_in_child=connection.close)


# ---- messages ------------------------------------------------------------------------------------------------------


class Gone:
    """What a link puts into the inbox when a peer's connection ends.

    Attributes:
        reason: The system's words.
    """

    def __init__(self, reason: str) -> None:
        """Note the end of a connection."""
        self.reason = reason


class Payload(Protocol):
    """Carries the CUDA tensors of a link."""

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, in this order."""

    def receive(self, peer: int, descriptions: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[torch.Tensor]:
        """Receive the next tensors of a peer, in the order of its headers."""

    def arrived(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Make the current stream wait for received tensors. Called by the thread that uses them."""


Item = tuple["Transport", int, Any, "list[torch.Tensor | None]"]
"""A link, the peer's rank in it, the message, its tensors."""

_C: Any = torch._C  # noqa: SLF001  torch has no public names for the stacks of modes of a thread

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Transport:
    """One link: connections with all other ranks of a group.

    Attributes:
        me: Rank of this process in the group.
        n: Number of ranks of the group.
        members: Global ranks of the group.
        inbox: Messages of all peers, in the order in which they arrived.
        bytes_sent: Bytes of tensors sent.
        msgs_sent: Messages sent.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        connections: Mapping[int, socket.socket],
        kind: str = "pp_rank",
        inbox: Inbox[Item] | None = None,
        payload: Payload | None = None,
    ) -> None:
        """Start to read from all connections.

        Args:
            rank: Global rank of this process.
            members: Global ranks of the group.
            connections: Sockets by global rank.
            kind: What a rank within the group is called.
            inbox: Where messages go; two links may share one.
            payload: Carries CUDA tensors; without it they go through host memory.
        """
        self.members, self.kind = tuple(members), kind
        self.me, self.n = self.members.index(rank), len(self.members)
        # NCCL receives on threads of their own: a receive sets the thread's GPU.
        self.inbox: Inbox[Item] = inbox or Inbox(_without_modes if payload is None else None)
        self.payload = payload
        self.bytes_sent = self.msgs_sent = 0
        self._sockets = {self.members.index(peer): connection for peer, connection in connections.items()}
        self.closed = False
        for peer, connection in self._sockets.items():
            self.inbox.add(_Source(self, peer, connection), f"smp-reader-{peer}")

    def name(self, peer: int) -> str:
        """Return words for a rank of the group."""
        return f"rank {self.members[peer]} ({self.kind} {peer})"

    def send(
        self, peer: int, message: object, tensors: Sequence[torch.Tensor | None] = (), *, hidden: bool = False
    ) -> None:
        """Send a message. Only one thread may send at a time.

        Args:
            peer: Rank in the group, another than `me`.
            message: Anything that pickle knows.
            tensors: Dense tensors, or None for one that is missing.
            hidden: Tensors may be in the message itself. They arrive as constants.

        Raises:
            OSError: The connection is lost.
            TypeError: A tensor is in the message itself, or something that pickle does not know.
        """
        descriptions: list[tuple[str, tuple[int, ...], bool] | None] = []
        parts: list[Any] = [b""]
        kept: list[torch.Tensor] = []
        device: list[torch.Tensor] = []
        total = 0
        for tensor in tensors:
            if tensor is None:
                descriptions.append(None)
                continue
            tensor = tensor.detach()
            if tensor.is_conj() or tensor.is_neg():
                tensor = tensor.resolve_conj().resolve_neg()
            tensor = tensor.contiguous()
            on_device = tensor.is_cuda
            descriptions.append((str(tensor.dtype), tuple(tensor.shape), on_device))
            if on_device and self.payload is not None:
                device.append(tensor)
                continue
            if on_device:
                tensor = tensor.cpu()
            size = tensor.numel() * tensor.element_size()
            if size:
                kept.append(tensor)
                parts.append(_memory(tensor, size))
                total += size
        head = pickle.dumps((message, descriptions), 5) if hidden else dumps((message, descriptions))
        parts[0] = _SIZES.pack(len(head)) + head
        _send_all(self._sockets[peer], parts, len(parts[0]) + total)
        if device and self.payload is not None:
            self.payload.send(peer, device)
        self.bytes_sent += total
        self.msgs_sent += 1

    def close(self) -> None:
        """End all connections and reader threads."""
        self.closed = True
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.inbox.wait_for_end({connection.fileno() for connection in self._sockets.values()}, 1)
        for connection in self._sockets.values():
            connection.close()

    def tensors(
        self, peer: int, stream: _Stream, descriptions: Sequence[tuple[str, tuple[int, ...], bool] | None]
    ) -> list[torch.Tensor | None]:
        """Read the tensors of a message."""
        tensors: list[torch.Tensor | None] = []
        late: list[int] = []
        for description in descriptions:
            if description is None:
                tensors.append(None)
                continue
            name, shape, on_device = description
            if on_device and self.payload is not None:
                late.append(len(tensors))
                tensors.append(None)
                continue
            tensor = torch.empty(shape, dtype=_DTYPES[name])
            size = tensor.numel() * tensor.element_size()
            if size:
                stream.fill(_memory(tensor, size))
            tensors.append(tensor.cuda() if on_device else tensor)
        if late and self.payload is not None:
            wanted = [description for description in descriptions if description is not None and description[2]]
            received = self.payload.receive(peer, [(_DTYPES[name], shape) for name, shape, _ in wanted])
            for index, tensor in zip(late, received, strict=True):
                tensors[index] = tensor
        return tensors


def _without_modes() -> bool:
    """Return whether this thread makes plain tensors. Those of a message may belong to other modes than its own."""
    return (
        not torch.is_inference_mode_enabled()
        and _C._len_torch_function_stack() == 0  # noqa: SLF001
        and _C._len_torch_dispatch_stack() == 0  # noqa: SLF001
    )


class _Source:
    """A connection of a link, for its inbox."""

    def __init__(self, link: Transport, peer: int, connection: socket.socket) -> None:
        self.link, self.peer = link, peer
        self.stream = _Stream(connection)

    def fileno(self) -> int:
        return self.stream.connection.fileno()

    def buffered(self) -> bool:
        return self.stream.start < self.stream.end

    def read(self) -> tuple[Item | None, bool]:
        """Read one message, or the end of the connection."""
        link, stream = self.link, self.stream
        try:
            message, descriptions = pickle.loads(stream.take(*_SIZES.unpack(stream.take(_SIZES.size))))  # noqa: S301  a rank of this job
            return (link, self.peer, message, link.tensors(self.peer, stream, descriptions)), True
        except (EOFError, OSError) as error:
            gone = None if link.closed else Gone(str(error) or "the connection was closed")
        except Exception as error:  # noqa: BLE001  a reader that ends without a word would leave the step waiting
            gone = Gone(f"its message cannot be read: {type(error).__name__}: {error}")
        except BaseException:  # Ctrl-C in the thread that waits: the rest of the message would be taken for another
            link.inbox.put((link, self.peer, Gone("the reading of a message was interrupted"), []))
            raise
        return (link, self.peer, gone, []) if gone else None, False


class _Stream:
    """Reads exact numbers of bytes with few system calls."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.view = memoryview(bytearray(_BUFFER))
        self.start = self.end = 0

    def take(self, count: int) -> memoryview:
        """Return the next bytes; they are valid until the next call."""
        if count > len(self.view):
            large = memoryview(bytearray(count))
            self.fill(large)
            return large
        if len(self.view) - self.start < count:
            left = bytes(self.view[self.start : self.end])
            self.view[: len(left)] = left
            self.start, self.end = 0, len(left)
        while self.end - self.start < count:
            got = self.connection.recv_into(self.view[self.end :])
            if not got:
                raise EOFError
            self.end += got
        found = self.view[self.start : self.start + count]
        self.start += count
        if self.start == self.end:
            self.start = self.end = 0
        return found

    def fill(self, target: memoryview) -> None:
        """Read into memory: first what is here already, then from the system straight to its place."""
        ready = min(self.end - self.start, len(target))
        if ready:
            target[:ready] = self.view[self.start : self.start + ready]
            self.start += ready
            if self.start == self.end:
                self.start = self.end = 0
        while ready < len(target):
            got = self.connection.recv_into(target[ready:])
            if not got:
                raise EOFError
            ready += got


def _memory(tensor: torch.Tensor, size: int) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy. The tensor must outlive them."""
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _send_all(connection: socket.socket, parts: list[Any], total: int) -> None:
    sent = connection.sendmsg(parts[:512])
    while sent < total:
        total -= sent
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        parts[0] = memoryview(parts[0])[sent:]
        sent = connection.sendmsg(parts[:512])
