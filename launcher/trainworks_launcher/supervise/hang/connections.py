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
_REQUEST_AND_DUMP = 0x301
_DONE, _ERROR = 3, 2
_INFO = 2  # INET_DIAG_INFO
_ANY_STATE = 0xFFF
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
        kernel.settimeout(1.0)
        kernel.send(header + question)
        while True:
            data = kernel.recv(1 << 16)
            while len(data) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return
                yield _parse_connection(data[_HEADER.size : length])
                # The next message begins at a multiple of four bytes.
                data = data[(length + 3) & ~3 :]


def _parse_connection(message: bytes) -> tuple[int, int]:
    """Parse one answer of the kernel: an inet_diag_msg, then attributes.

    Returns:
        (inode, bytes); 0 bytes if the kernel does not count. Raises struct.error if it is cut off.
    """
    (inode,) = struct.unpack_from("=I", message, _INODE_AT)
    place = _MESSAGE_BYTES
    while place + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, place)
        # Older kernels have a shorter tcp_info, without the two counters.
        if kind == _INFO and length >= 4 + _BYTES_AT + _BYTES.size:
            return inode, sum(_BYTES.unpack_from(message, place + 4 + _BYTES_AT))
        # A length below 4 is malformed, and would not end the loop.
        place += max(4, (length + 3) & ~3)
    return inode, 0
