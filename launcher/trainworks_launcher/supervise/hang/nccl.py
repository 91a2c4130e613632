"""What NCCL itself says of its communicators, where its RAS service answers: from NCCL 2.24 on.

Any process of the job knows those of all hosts, so one host asks. Sources: NCCL user guide, "RAS";
NCCL's ras/client_support.cc for the words. Not tested on GPUs.
"""

from __future__ import annotations

import socket
import time

_ADDRESS = "localhost:28028"
_REPORT_BYTES = 1 << 20
_LINES = 6


def nccl_report(seconds: float, address: str = "") -> str:
    """Return RAS's report.

    ``""`` if it does not answer within so many seconds. address: what the job says of it.
    """
    deadline = time.monotonic() + seconds
    host, _, port = (address or _ADDRESS).rpartition(":")
    said = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as connection:
            connection.sendall(b"verbose status\n")
            while len(said) < _REPORT_BYTES:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                chunk = connection.recv(65536)
                if not chunk:
                    break
                said += chunk
    except (OSError, ValueError, OverflowError):
        pass
    return said.decode("utf-8", "replace")


def remarks(report: str) -> list[str]:
    """Return the first lines below the report's headings "Errors" and
    "Warnings", without empty ones.
    """
    lines, inside = report.splitlines(), False
    found: list[str] = []
    for line, below in zip(lines, [*lines[1:], ""]):
        if below and set(below) == {"="}:
            inside = line.strip() in ("Errors", "Warnings")
        elif inside and line.strip() and set(line) != {"="}:
            found.append(line.strip())
    return found[:_LINES]
