"""Send messages with tensors between the ranks of a job, over connections of their own
(connect.py).

The pipeline cannot use torch.distributed: its receives end by a timeout, and NCCL has no receive
from any source. `Transport` is one link: a mesh of connections between the ranks of a group. A
message is a picklable header with tensors. Tensors travel as raw bytes from the memory of the
sender to the memory of the receiver.

A link may have a `payload`, for example NCCL (payload.py). The payload carries the tensors on its
device, and all other tensors go through host memory.
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
"""The size of the pickled header, which stands before it."""
_BUFFER = 1 << 16
"""Bytes that are read by one system call at most, unless a message is larger."""
_MOST_PARTS = 512
"""Number of buffers that are sent by one system call at most; Linux allows 1024."""


class PeerLost(NamedTuple):
    """The message in the inbox after the connection of a peer has ended.

    Attributes:
        reason: The system's own words.
    """

    reason: str


Item = tuple["Transport", int, Any, "list[torch.Tensor | None]"]
"""A received message: the link, the sender's rank in the link, the message, its tensors."""

_C: Any = torch._C  # noqa: SLF001  torch has no public names for the stacks of modes of a thread

_HOST, _GPU, _CARRIED = range(3)
"""How a tensor travels: as bytes for a CPU, as bytes for a GPU, by the payload."""


class _Description(NamedTuple):
    """A tensor of a message, as the header describes it.

    Attributes:
        dtype: Name of its type, such as "torch.float32".
        shape: Its shape.
        strides: Its strides, if the elements are in another order than in a contiguous tensor;
            else None.
        way: How the tensor travels: `_HOST`, `_GPU` or `_CARRIED`.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    way: int

    def empty(self) -> torch.Tensor:
        """Return a new tensor of this type and shape, with undefined values."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=_DTYPES[self.dtype])
        return torch.empty_strided(self.shape, self.strides, dtype=_DTYPES[self.dtype])


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class LinkGroup(NamedTuple):
    """The ranks that one link connects.

    Attributes:
        rank: Global rank of this process.
        members: Global ranks of the group.
        kind: Name for a rank of the group, such as "pp_rank".
    """

    rank: int
    members: Sequence[int]
    kind: str = "pp_rank"


class Transport:
    """One link: connections with all other ranks of a group.

    Attributes:
        rank: Rank of this process in the group, from 0.
        size: Number of ranks of the group.
        members: Global ranks of the group.
        kind: Name for a rank of the group, such as "pp_rank".
        inbox: Messages of all peers, in the order in which they arrived.
        payload: Carries tensors that do not go through host memory, or None.
        device: This rank's GPU, or None.
        bytes_sent: Bytes of tensors that were sent through host memory.
        closed: Whether `close` was called.
    """

    def __init__(
        self,
        group: LinkGroup,
        connections: Mapping[int, socket.socket],
        inbox: Inbox[Item] | None = None,
        payload: GroupPayload | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Start to read from all connections.

        The inbox gets a reader thread; with a payload, each connection gets one. The link owns the
        sockets: `close` closes them.

        Args:
            group: The ranks that the link connects.
            connections: Global rank of a peer -> the socket.
            inbox: Where messages go; two links may share one. None: an own one.
            payload: The transport of tensors on GPUs, such as NCCL (payload.py); None: all tensors
                go through host memory, by TCP.
            device: This rank's GPU.

        Raises:
            ValueError: The rank, or a peer with a connection, is not among the members.
        """
        self.members, self.kind = tuple(group.members), group.kind
        self.rank, self.size = self.members.index(group.rank), len(self.members)
        if inbox is None:
            # With a payload each peer has a reader thread: a receive must be posted as soon as its
            # header is here, even while this rank computes.
            inbox = Inbox(_makes_plain_tensors if payload is None else None)
        self.inbox: Inbox[Item] = inbox
        self.payload, self.device = payload, device
        self.bytes_sent = 0
        self._sockets = {
            self.members.index(peer): connection for peer, connection in connections.items()
        }
        self.closed = False
        for peer, connection in self._sockets.items():
            self.inbox.add(_Source(self, peer, connection), f"smp-reader-{peer}")

    def name(self, peer: int) -> str:
        """Return words for a rank of the group, such as "rank 3 (pp_rank 1)"."""
        return f"rank {self.members[peer]} ({self.kind} {peer})"

    def send(self, peer: int, message: object, tensors: Sequence[torch.Tensor | None] = ()) -> None:
        """Send a message. Only one thread may send at a time.

        The call returns when the operating system has taken all bytes; the receiver may not have
        read them. A tensor on a GPU is copied to host memory, or the payload launches its send.
        `bytes_sent` counts the others.

        Args:
            peer: Rank in the group, not `rank`.
            message: Any object that can be pickled.
            tensors: Dense tensors; None for a missing one.

        Raises:
            OSError: The connection is lost. A part of the message may have gone.
            TypeError: A tensor is nested, sparse, or on the device meta. Nothing was sent.
            Exception: The message cannot be pickled, with a class that depends on the object; or
                the payload's backend failed.
        """
        # Hot: one pass over the tensors, without copies of their memory.
        descriptions: list[_Description | None] = []
        parts: list[Any] = [b""]  # the header comes first
        alive: list[torch.Tensor] = []  # the memory of the parts, until they are sent
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
                alive.append(tensor)
                parts.append(_memory(tensor, size))
                total += size
        head = pickle.dumps((message, descriptions), 5)
        parts[0] = _SIZES.pack(len(head)) + head
        if carried and self.payload is not None:
            # Before the header, so that the receive which the header causes waits only briefly.
            self.payload.send(peer, carried)
        _send_all(self._sockets[peer], parts, len(parts[0]) + total)
        self.bytes_sent += total

    def close(self) -> None:
        """End all connections and reader threads, and the payload. Messages in the inbox stay.

        An error of a connection is passed over. The readers are waited for at most a second.
        """
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
        """Make received tensors ready for use in the present thread: its stream waits for them."""
        if self.payload is not None:
            self.payload.arrived(tensors)

    def tensors(
        self, peer: int, stream: _Stream, descriptions: Sequence[_Description | None]
    ) -> list[torch.Tensor | None]:
        """Read the tensors of a message, which follow its header, and return them.

        The payload is the link's own transport for tensors on GPUs, such as NCCL (payload.py): it
        receives the tensors that it *carries*, which do not come by this connection. Such a tensor
        may still be on the way: `arrived` makes it ready. All others have their values, and are on
        the CPU or on this rank's GPU, as on the sender.

        Args:
            peer: Rank of the sender in the group.
            stream: The connection.
            descriptions: The tensors, as the header describes them; None for a missing one.

        Returns:
            A list with one entry for each description: a new tensor, or None for a missing one.

        Raises:
            EOFError: The connection was closed within the message.
            OSError: The socket cannot be read, for example because the peer has reset the
                connection.
            KeyError: A type of a description is unknown to this release of torch.
            RuntimeError: There is no memory for a tensor, or the payload's backend failed.
        """
        tensors: list[torch.Tensor | None] = []
        carried: list[int] = []  # numbers of the tensors that the payload receives
        receives: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]] = []
        for description in descriptions:
            if description is None:
                tensors.append(None)
                continue
            if description.way == _CARRIED:
                carried.append(len(tensors))
                dtype = _DTYPES[description.dtype]
                receives.append((dtype, description.shape, description.strides))
                tensors.append(None)
                continue
            tensor = description.empty()
            size = tensor.numel() * tensor.element_size()
            if size:
                stream.fill(_memory(tensor, size))
            if description.way == _GPU and self.device is not None:
                tensor = tensor.to(self.device)
            tensors.append(tensor)
        if carried and self.payload is not None:
            received = self.payload.receive(peer, receives)
            for index, tensor in zip(carried, received, strict=True):
                tensors[index] = tensor
        return tensors


def _makes_plain_tensors() -> bool:
    """Return whether new tensors of this thread are plain, without the effect of a mode.

    A message may be for a context with other modes than the present one.
    """
    return (
        not torch.is_inference_mode_enabled()
        and _C._len_torch_function_stack() == 0  # noqa: SLF001
        and _C._len_torch_dispatch_stack() == 0  # noqa: SLF001
    )


class _Source:
    """A connection of a link, as its inbox reads it.

    Attributes:
        link: The link.
        peer: Rank of the sender in the link.
        stream: The connection with a buffer.
    """

    def __init__(self, link: Transport, peer: int, connection: socket.socket) -> None:
        self.link, self.peer = link, peer
        self.stream = _Stream(connection)

    def fileno(self) -> int:
        """Return the file descriptor of the connection."""
        return self.stream.connection.fileno()

    def buffered(self) -> bool:
        """Return whether a part of the next message has been read already."""
        return self.stream.start < self.stream.end

    def read(self) -> tuple[Item | None, bool]:
        """Read one message from the connection, and wait for its end. An error is a message, too.

        The tensors are received with that, by way of the payload, too. The connection is not closed
        after an error, but must not be read any more.

        Returns:
            (item, True) after a message: the item is (link, rank of the sender, message, tensors).
            (item, False) with `PeerLost` as the message if the connection has ended, cannot be
            read, or brought a message that cannot be read: one that cannot be unpickled, or with
            tensors that cannot be made. (None, False) if the connection has ended because this rank
            closed the link.

        Raises:
            BaseException: An interrupt of the reading thread, such as KeyboardInterrupt of Ctrl-C.
                A `PeerLost` is put into the inbox before, because the rest of the message is lost.
        """
        link, peer, stream = self.link, self.peer, self.stream
        try:
            (size,) = _SIZES.unpack(stream.take(_SIZES.size))
            message, descriptions = pickle.loads(stream.take(size))  # noqa: S301  from a rank of this job
            tensors = link.tensors(peer, stream, descriptions)
            return (link, peer, message, tensors), True
        except (EOFError, OSError) as error:
            if link.closed:
                return None, False
            lost = PeerLost(str(error) or "the connection was closed")
        except Exception as error:  # noqa: BLE001  without a message in the inbox the step would wait for ever
            lost = PeerLost(f"its message cannot be read: {type(error).__name__}: {error}")
        except BaseException:
            # Ctrl-C in the thread that waits. The rest of the message cannot be read any more: it
            # would be taken for a new message.
            lost = PeerLost("the reading of a message was interrupted")
            link.inbox.put((link, peer, lost, []))
            raise
        return (link, peer, lost, []), False


class _Stream:
    """A connection with a buffer, from which exact numbers of bytes are read.

    Hot: small messages are read with one system call, large tensors without a copy.

    Attributes:
        connection: The socket.
        view: The buffer.
        start: Index of the first byte in the buffer that is not read yet.
        end: Index after the last byte in the buffer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.view = memoryview(bytearray(_BUFFER))
        self.start = self.end = 0

    def take(self, count: int) -> memoryview:
        """Return the next bytes of the connection. They are valid until the next call.

        A count above the size of the buffer is read into new memory.

        Args:
            count: Number of bytes.

        Raises:
            EOFError: The connection was closed before that many bytes came.
            OSError: The socket cannot be read.
        """
        if count > len(self.view):
            large = memoryview(bytearray(count))
            self.fill(large)
            return large
        if len(self.view) - self.start < count:
            # No room after the unread bytes: move them to the beginning.
            unread = bytes(self.view[self.start : self.end])
            self.view[: len(unread)] = unread
            self.start, self.end = 0, len(unread)
        while self.end - self.start < count:
            received = self.connection.recv_into(self.view[self.end :])
            if not received:
                raise EOFError
            self.end += received
        taken = self.view[self.start : self.start + count]
        self.start += count
        if self.start == self.end:
            self.start = self.end = 0
        return taken

    def fill(self, target: memoryview) -> None:
        """Read until a memory is full: first from the buffer, then from the system without a copy.

        Args:
            target: The memory, which is written. After an error a part of it may be.

        Raises:
            EOFError: The connection was closed before.
            OSError: The socket cannot be read.
        """
        ready = min(self.end - self.start, len(target))
        if ready:
            target[:ready] = self.view[self.start : self.start + ready]
            self.start += ready
            if self.start == self.end:
                self.start = self.end = 0
        while ready < len(target):
            received = self.connection.recv_into(target[ready:])
            if not received:
                raise EOFError
            ready += received


def _check_memory(tensor: torch.Tensor) -> None:
    """Refuse a tensor without one memory for its elements.

    Raises:
        TypeError: The tensor is nested, sparse, or on the device meta.
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
    """Return the strides of a tensor that fills its memory in another order than a contiguous one.

    None for a contiguous tensor, and for one that does not fill its memory. ``channels_last``
    images and transposed matrices have such strides. The receiver gets the same layout, because
    modules read it, and kernels are chosen by it.

    The tensor is not copied.
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

    The tensor must live longer than the result.
    """
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _send_all(connection: socket.socket, parts: list[Any], total: int) -> None:
    """Send buffers one after another.

    The call waits until the operating system has taken all bytes.

    Args:
        connection: The socket.
        parts: The buffers. The list is changed.
        total: Sum of their sizes in bytes.

    Raises:
        OSError: The connection is lost. A part may have gone.
    """
    sent = connection.sendmsg(parts[:_MOST_PARTS])
    while sent < total:
        # The kernel took a part only: drop the buffers that are sent, and cut the next one.
        total -= sent
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        parts[0] = memoryview(parts[0])[sent:]
        sent = connection.sendmsg(parts[:_MOST_PARTS])
