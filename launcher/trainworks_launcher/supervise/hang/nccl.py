"""What NCCL itself says of its communicators, where its RAS service answers.

Source: NCCL user guide, "RAS" (NCCL 2.24 and newer): a text protocol on TCP port 28028 of loopback. Not tested on GPUs.
"""

from __future__ import annotations

import socket
import time

_ADDRESS = ("127.0.0.1", 28028)
_REPORT_BYTES = 1 << 20


def nccl_report(seconds: float) -> str:
    """Return RAS's report; ``""`` if it does not answer within so many seconds."""
    deadline = time.monotonic() + seconds
    said = b""
    try:
        with socket.create_connection(_ADDRESS, timeout=seconds) as connection:
            connection.sendall(b"verbose status\n")
            while len(said) < _REPORT_BYTES:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                chunk = connection.recv(65536)
                if not chunk:
                    break
                said += chunk
    except OSError:
        pass
    return said.decode("utf-8", "replace")
