"""Become a program of a job with Ray, after a wait for the part of Ray that the program needs.

Run as ``python3 -I ray_node.py LEADER PORT SECONDS WHAT -- PROGRAM...``. Ray's head listens at
LEADER and PORT. WHAT is the kind of PROGRAM:

``head``     ``ray start --head``: gets this host's own address, at which the others reach Ray.
``worker``   ``ray start --address``: starts when the head listens; Ray itself would print each try.
a number     the job's program, on the leader: starts when Ray has so many hosts, and finds Ray by
             RAY_ADDRESS. Run by the Python that has Ray.

The limit is SECONDS. The launcher, not this program, watches the head and the workers.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time

_ADDRESS_VARIABLE = "RAY_ADDRESS"
_BETWEEN_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_STATE_OF_ALIVE = 0
"""State of a host of Ray that runs (gcs.proto, GcsNodeInfo.ALIVE)."""

_ANYWHERE = ("192.0.2.1", 9)
"""An address of documentation (RFC 5737). Connecting a datagram socket sends nothing, and shows the
route.
"""


def main(arguments: list[str]) -> int:
    """Wait for the part of Ray that the program needs, and become the program.

    Returns only if that fails, with a line on standard error: 64 for wrong words, 66 after the
    limit, 126 or 127 as a shell.

    Args:
        arguments: LEADER, PORT, SECONDS, WHAT, ``--`` and the program with its arguments.
    """
    if len(arguments) < 6 or arguments[4] != "--":
        sys.stderr.write(
            "usage: ray_node.py LEADER PORT SECONDS head|worker|HOSTS -- PROGRAM [ARGUMENT...]\n"
        )
        return 64
    leader, port, limit = arguments[0], int(arguments[1]), arguments[2]
    # WHAT: head, worker, or the number of hosts for which the program on the leader waits.
    kind, program = arguments[3], arguments[5:]
    deadline, env = time.monotonic() + float(limit), dict(os.environ)
    if kind == "head":
        own = own_address(leader)
        if own:
            program.append(f"--node-ip-address={own}")
    elif kind == "worker":
        error = _wait_for_port(leader, port, deadline)
        if error:
            return _too_late(
                f"Ray's head on {leader}, port {port}, cannot be reached within {limit} s: {error}"
            )
    else:
        own = own_address(leader) or leader
        required, present = int(kind), 0
        error = _wait_for_port(own, port, deadline)
        if not error:
            present = _wait_for_hosts(f"{own}:{port}", required, deadline)
        if present < required:
            reason = f": {error}" if error else ""
            return _too_late(f"{present} of {kind} hosts joined Ray within {limit} s{reason}")
        env[_ADDRESS_VARIABLE] = f"{own}:{port}"
    try:
        os.execvpe(program[0], program, env)
    except OSError as error:
        sys.stderr.write(f"trainworks: cannot start {program[0]!r}: {error.strerror or error}\n")
        return 126 if isinstance(error, PermissionError) else 127


def own_address(name: str) -> str:
    """Return this host's IPv4 address by its name, else by its route to other hosts.

    An address of loopback, or of another host, does not count.

    Args:
        name: This host's name in the job.

    Returns:
        For example ``10.0.0.1``; ``""`` if none is known: then Ray chooses an address.
    """
    addresses: list[str] = []
    # UnicodeError: a part of the name is empty or too long.
    with contextlib.suppress(OSError, UnicodeError):
        rows = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_DGRAM)
        addresses += [str(row[4][0]) for row in rows]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ANYWHERE)
        addresses.append(str(probe.getsockname()[0]))
    for address in addresses:
        if not address.startswith("127.") and _is_own(address):
            return address
    return ""


def _is_own(address: str) -> bool:
    """Return whether an IPv4 address is this host's: the kernel binds only those."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def _wait_for_port(host: str, port: int, deadline: float) -> str:
    """Wait until a program listens at a port.

    Args:
        host: Name or address.
        port: The TCP port.
        deadline: Monotonic clock.

    Returns:
        ``""``; after the deadline the reason of the last failure.
    """
    while True:
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
            return ""
        except (OSError, UnicodeError) as error:
            # A UnicodeError (a part of the name is empty or too long) has no strerror.
            reason = str(getattr(error, "strerror", "") or error)
        if time.monotonic() + _BETWEEN_SECONDS > deadline:
            return reason
        select.select((), (), (), _BETWEEN_SECONDS)


def _wait_for_hosts(address: str, required: int, deadline: float) -> int:
    """Wait until Ray has so many hosts; return the number of hosts that it has.

    Args:
        address: Ray's head, for example ``10.0.0.1:6379``.
        required: The number of hosts.
        deadline: End of the wait (monotonic clock).
    """
    # A connection by ray.init() would take seconds, and register a job.
    from ray._raylet import GcsClient

    client = GcsClient(address=address)
    while True:
        alive = 0
        for row in client.get_all_node_info().values():
            if row.state == _STATE_OF_ALIVE:
                alive += 1
        if alive >= required or time.monotonic() + _BETWEEN_SECONDS > deadline:
            return alive
        select.select((), (), (), _BETWEEN_SECONDS)


def _too_late(message: str) -> int:
    """Print a line on standard error; return 66."""
    sys.stderr.write(f"trainworks: {message}\n")
    return 66


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
