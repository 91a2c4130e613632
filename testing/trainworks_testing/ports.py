"""A TCP port for a server that has to be told one."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port without a listener, below those that the kernel gives to connections.

    A port of the kernel's own choice would often be taken again by some connection before the
    server listens on it.
    """
    lowest = max(20_000, int(_CONNECTIONS.read_text().split()[0]))
    while True:
        # Not `random`: Hypothesis seeds it, and two test processes would get the same numbers.
        port = 10_000 + secrets.randbelow(lowest - 10_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
