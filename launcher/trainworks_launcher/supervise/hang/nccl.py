"""Ask NCCL's RAS service for its report on the communicators: since NCCL 2.24.

Any process of the job knows the communicators of all hosts, so one host asks. Sources: NCCL user
guide, "RAS"; NCCL's ras/client_support.cc for the words. Not tested on GPUs.
"""

from __future__ import annotations

import socket
import time

_ADDRESS = "localhost:28028"
_REPORT_BYTES = 1 << 20
_READ_BYTES = 65536
_LEAST_WAIT = 0.01  # seconds
_REMARKS = 6
"""Lines of the report that are shown."""


def nccl_report(seconds: float, address: str = "") -> str:
    """Request the report of NCCL's RAS over TCP, and wait for it, bounded. Blocks the thread.

    Args:
        seconds: Limit of the wait.
        address: For example ``localhost:28028``; ``""`` for NCCL's default.

    Returns:
        The report, as far as it came; ``""`` without an answer.
    """
    deadline = time.monotonic() + seconds
    host, _, port = (address or _ADDRESS).rpartition(":")
    report = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as connection:
            connection.sendall(b"verbose status\n")
            while len(report) < _REPORT_BYTES:
                # At least a moment: 0 would mean not to wait at all, and is refused if negative.
                connection.settimeout(max(_LEAST_WAIT, deadline - time.monotonic()))
                chunk = connection.recv(_READ_BYTES)
                if not chunk:
                    break
                report += chunk
    except (OSError, ValueError, OverflowError):
        pass
    return report.decode("utf-8", "replace")


def remarks(report: str) -> list[str]:
    """Return the lines below the headings "Errors" and "Warnings" of RAS's report.

    Empty lines are left out, and only the first six are returned; ``[]`` for none.
    """
    lines = report.splitlines()
    is_in_section = False
    section_lines: list[str] = []
    for line, below in zip(lines, [*lines[1:], ""]):
        # A heading stands above a line of equals signs.
        if below and set(below) == {"="}:
            is_in_section = line.strip() in ("Errors", "Warnings")
        elif is_in_section and line.strip() and set(line) != {"="}:
            section_lines.append(line.strip())
    return section_lines[:_REMARKS]
