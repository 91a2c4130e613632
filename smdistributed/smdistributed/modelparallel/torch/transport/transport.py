"""Messages with tensors between the ranks of a job, over connections of their own (connect.py).

torch.distributed ends a receive by a timeout, and NCCL has no receive from any source. The pipeline
must not have the first, and needs the second. `Transport` is one link, a mesh. A message is a
picklable header with tensors. Tensors travel as raw bytes from the sender's memory to the
receiver's.

Tensors that the link's `payload` carries go its way, by NCCL for example (payload.py), all others
through host memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .inbox import Inbox
from .payload import GroupPayload

_SIZES = struct.Struct("<I")
_BUFFER = 1 << 16


class PeerLost(NamedTuple):
    """What a link puts into the inbox when a peer's connection ends, with the system's words."""

    reason: str


Item = tuple["Transport", int, Any, "list[torch.Tensor | None]"]
"""A link, the peer's rank in it, the message, its tensors."""

_C: Any = torch._C  # noqa: SLF001  torch has no public names for the stacks of modes of a thread

_HOST, _GPU, _CARRIED = range(3)
"""How a tensor travels: as bytes for a CPU, as bytes for a GPU, by the payload."""


class _Description(NamedTuple):
    """A tensor of a message, as its header has it.

    Attributes:
        dtype: Name of its type.
        shape: Its shape.
        strides: Its strides, if its elements fill their memory in another order
            than a contiguous tensor's.
        way: How it travels.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    way: int

    def empty(self) -> torch.Tensor:
        """Return a tensor of this kind, whose elements are undefined."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=_DTYPES[self.dtype])
        return torch.empty_strided(self.shape, self.strides, dtype=_DTYPES[self.dtype])


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Transport:
    """One link: connections with all other ranks of a group.

    Attributes:
        me: Rank of this process in the group.
        n: Number of ranks of the group.
        members: Global ranks of the group.
        inbox: Messages of all peers, in the order in which they arrived.
        bytes_sent: Bytes of tensors sent.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        connections: Mapping[int, socket.socket],
        kind: str = "pp_rank",
        inbox: Inbox[Item] | None = None,
        payload: GroupPayload | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Start to read from all connections.

        Args:
            rank: Global rank of this process.
            members: Global ranks of the group.
            connections: Sockets by global rank.
            kind: What a rank within the group is called.
            inbox: Where messages go; two links may share one.
            payload: Carries tensors; without it all go through host memory.
            device: This rank's GPU.
        """
        self.members, self.kind = tuple(members), kind
        self.me, self.n = self.members.index(rank), len(self.members)
        # A receive is posted as soon as its header is there, whatever this rank
        # does: each peer has a thread.
        self.inbox: Inbox[Item] = inbox or Inbox(_without_modes if payload is None else None)
        self.payload, self.device = payload, device
        self.bytes_sent = 0
        self._sockets = {
            self.members.index(peer): connection for peer, connection in connections.items()
        }
        self.closed = False
        for peer, connection in self._sockets.items():
            self.inbox.add(_Source(self, peer, connection), f"smp-reader-{peer}")

    def name(self, peer: int) -> str:
        """Return words for a rank of the group."""
        return f"rank {self.members[peer]} ({self.kind} {peer})"

    def send(self, peer: int, message: object, tensors: Sequence[torch.Tensor | None] = ()) -> None:
        """Send a message. Only one thread may send at a time.

        Args:
            peer: Rank in the group, another than `me`.
            message: Anything that pickle knows.
            tensors: Dense tensors, or None for one that is missing.

        Raises:
            OSError: The connection is lost.
            TypeError: A tensor is no dense one.
            Exception: What pickle says of something that it does not know.
        """
        descriptions: list[_Description | None] = []
        parts: list[Any] = [b""]
        kept: list[torch.Tensor] = []
        carried: list[torch.Tensor] = []
        total = 0
        for tensor in tensors:
            if tensor is None:
                descriptions.append(None)
                continue
            tensor = tensor.detach()
            _check_memory(tensor)
            if tensor.is_conj() or tensor.is_neg():
                tensor = tensor.resolve_conj().resolve_neg()
            strides = dense_strides(tensor)
            if strides is None:
                tensor = tensor.contiguous()
            way = _GPU if tensor.is_cuda else _HOST
            if self.payload is not None and self.payload.carries(tensor):
                way = _CARRIED
                carried.append(tensor)
            descriptions.append(_Description(str(tensor.dtype), tuple(tensor.shape), strides, way))
            if way == _CARRIED:
                continue
            if way == _GPU:
                tensor = tensor.cpu()
            size = tensor.numel() * tensor.element_size()
            if size:
                kept.append(tensor)
                parts.append(_memory(tensor, size))
                total += size
        head = pickle.dumps((message, descriptions), 5)
        parts[0] = _SIZES.pack(len(head)) + head
        if carried and self.payload is not None:
            # Before the header: the receive that this posts never waits for long.
            self.payload.send(peer, carried)
        _send_all(self._sockets[peer], parts, len(parts[0]) + total)
        self.bytes_sent += total

    def close(self) -> None:
        """End all connections and reader threads."""
        self.closed = True
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.inbox.wait_for_end({connection.fileno() for connection in self._sockets.values()}, 1)
        for connection in self._sockets.values():
            connection.close()
        if self.payload is not None:
            self.payload.close()

    def arrived(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Make received tensors ready for the thread that calls this, and uses them."""
        if self.payload is not None:
            self.payload.arrived(tensors)

    def tensors(
        self, peer: int, stream: _Stream, descriptions: Sequence[_Description | None]
    ) -> list[torch.Tensor | None]:
        """Read the tensors of a message."""
        tensors: list[torch.Tensor | None] = []
        late: list[int] = []
        for description in descriptions:
            if description is None:
                tensors.append(None)
                continue
            if description.way == _CARRIED:
                late.append(len(tensors))
                tensors.append(None)
                continue
            tensor = description.empty()
            size = tensor.numel() * tensor.element_size()
            if size:
                stream.fill(_memory(tensor, size))
            if description.way == _GPU and self.device is not None:
                tensor = tensor.to(self.device)
            tensors.append(tensor)
        if late and self.payload is not None:
            wanted = [each for each in descriptions if each is not None and each.way == _CARRIED]
            received = self.payload.receive(
                peer, [(_DTYPES[each.dtype], each.shape, each.strides) for each in wanted]
            )
            for index, tensor in zip(late, received, strict=True):
                tensors[index] = tensor
        return tensors


def _without_modes() -> bool:
    """Return whether this thread makes plain tensors.

    Those of a message may belong to other modes than its own.
    """
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
            pickled = stream.take(*_SIZES.unpack(stream.take(_SIZES.size)))
            message, descriptions = pickle.loads(pickled)  # noqa: S301  from a rank of this job
            return (link, self.peer, message, link.tensors(self.peer, stream, descriptions)), True
        except (EOFError, OSError) as error:
            gone = None if link.closed else PeerLost(str(error) or "the connection was closed")
        except Exception as error:  # noqa: BLE001  a reader that ends without a word would leave the step waiting
            gone = PeerLost(f"its message cannot be read: {type(error).__name__}: {error}")
        except BaseException:
            # Ctrl-C in the thread that waits: the rest of the message would be taken for another.
            link.inbox.put(
                (link, self.peer, PeerLost("the reading of a message was interrupted"), [])
            )
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
        """Read into memory: first what is here already, then from the system
        straight to its place.
        """
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


def _check_memory(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose elements are not in one memory.

    Raises:
        TypeError: It is nested, sparse, or has no memory at all.
    """
    if tensor.is_nested:
        raise TypeError("a nested tensor has no memory of its own. Pass its values() and offsets()")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a tensor of layout {tensor.layout} is several tensors. Pass its indices and values"
        )
    if tensor.is_meta:
        raise TypeError("a tensor on the device meta has no values")


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor that fills its memory in another order
    than a contiguous one, else None.

    ``channels_last`` images and transposed matrices are such. Modules read the
    layout, and kernels are chosen by it.
    """
    if tensor.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tuple(tensor.stride())


def _memory(tensor: torch.Tensor, size: int) -> memoryview:
    """Return the bytes of a CPU tensor that fills its memory, without a copy.

    The tensor must outlive them.
    """
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _send_all(connection: socket.socket, parts: list[Any], total: int) -> None:
    sent = connection.sendmsg(parts[:512])
    while sent < total:
        total -= sent
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        parts[0] = memoryview(parts[0])[sent:]
        sent = connection.sendmsg(parts[:512])
