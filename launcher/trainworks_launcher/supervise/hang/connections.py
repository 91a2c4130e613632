"""Count the bytes through TCP connections of some processes: a download into memory reads no file.

The kernel lists all connections of this network namespace (sock_diag(7)). Other programs may share
the namespace, so only connections of the processes count. Sources: Linux,
include/uapi/linux/inet_diag.h and tcp.h.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from typing import Iterable, Iterator, Mapping

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_AND_DUMP = 0x301  # NLM_F_REQUEST and NLM_F_DUMP: all connections, not one
_DONE, _ERROR = 3, 2  # NLMSG_DONE, NLMSG_ERROR: kinds of the last answer
_INFO = 2  # INET_DIAG_INFO: the attribute with the tcp_info
_ANY_STATE = 0xFFF  # a bit for each state of a TCP connection
_ANSWER_SECONDS = 1.0
_ANSWER_BYTES = 1 << 16
_ALIGNMENT = 4  # NLMSG_ALIGNTO, RTA_ALIGNTO
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length with this header, kind
_INODE = struct.Struct("=I")
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, kind, flags, number, port
_QUESTION = struct.Struct("=BBBBI48x")  # inet_diag_req_v2: family, protocol, extensions, states
_MESSAGE_BYTES, _INODE_AT = 72, 68  # inet_diag_msg
_BYTES = struct.Struct("=QQ")
_BYTES_AT = 120  # tcp_info: tcpi_bytes_acked, tcpi_bytes_received; Linux 4.1
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def bytes_of(pids: Iterable[int]) -> Mapping[int, int]:
    """Return inode -> bytes sent and received, of each TCP connection of some processes.

    Connections that cannot be read are left out; {} if the kernel refuses.
    """
    inodes = {inode for pid in pids for inode in inodes_of(pid)}
    if not inodes:
        return {}
    totals: dict[int, int] = {}
    with contextlib.suppress(OSError, struct.error):
        for family in (socket.AF_INET, socket.AF_INET6):
            rows = _connections(family)
            totals.update((inode, count) for inode, count in rows if inode in inodes)
    return totals


def inodes_of(pid: int) -> Iterator[int]:
    """Yield the inode of each socket that a process holds; none if the process is gone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208  (names, not paths)
            with contextlib.suppress(OSError):
                link = _SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{name}"))
                if link:
                    yield int(link[1])


def _connections(family: int) -> Iterator[tuple[int, int]]:
    """Yield (inode, bytes) of every TCP connection of this network namespace.

    Args:
        family: ``socket.AF_INET`` or ``socket.AF_INET6``.

    Raises:
        OSError: The kernel refuses, or does not answer within a second.
    """
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ANY_STATE)
    header = _HEADER.pack(
        _HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 1, 0
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        kernel.send(header + question)
        while True:
            data = kernel.recv(_ANSWER_BYTES)
            while len(data) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return
                yield _parse_connection(data[_HEADER.size : length])
                data = data[_align(length) :]


def _parse_connection(message: bytes) -> tuple[int, int]:
    """Parse one answer of the kernel: an inet_diag_msg, then attributes.

    Returns:
        (inode, bytes); 0 bytes if the kernel does not count. Raises struct.error if it is cut off.
    """
    (inode,) = _INODE.unpack_from(message, _INODE_AT)
    place = _MESSAGE_BYTES
    while place + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, place)
        # Older kernels have a shorter tcp_info, without the two counters.
        if kind == _INFO and length >= _ATTRIBUTE.size + _BYTES_AT + _BYTES.size:
            return inode, sum(_BYTES.unpack_from(message, place + _ATTRIBUTE.size + _BYTES_AT))
        # A length below that of the header is malformed, and would not end the loop.
        place += max(_ATTRIBUTE.size, _align(length))
    return inode, 0


def _align(length: int) -> int:
    """Round a length up: the next message, or attribute, begins at a multiple of four bytes."""
    return (length + _ALIGNMENT - 1) & ~(_ALIGNMENT - 1)
