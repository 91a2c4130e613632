"""Becomes a program of a job with Ray, once what that needs is there: Ray's
head, its workers, or all of its hosts.

Run as ``python3 -I ray_node.py LEADER PORT SECONDS WHAT -- PROGRAM...``. LEADER and PORT are where
Ray's head listens. WHAT is what PROGRAM is:

``head``     ``ray start --head``: it is told this host's own address, the one by which the others
             reach it.
``worker``   ``ray start --address``: starts when the head listens; Ray itself would print each try.
a number     the job's program, on the leader: starts when Ray has so many hosts, and finds it by
             RAY_ADDRESS. Run by the Python that has Ray.

The limit is SECONDS. What happens to the head and the workers meanwhile is not
watched here: the launcher does that.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time

_ADDRESS = "RAY_ADDRESS"
_BETWEEN_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_ANYWHERE = ("192.0.2.1", 9)
"""An address of documentation (RFC 5737): to connect a datagram socket sends
nothing, and tells the way there.
"""


def main(arguments: list[str]) -> int:
    """Become the program.

    Returns only if that fails, with a shell's status for it, or 66 after the limit.
    """
    if len(arguments) < 6 or arguments[4] != "--":
        sys.stderr.write(
            "usage: ray_node.py LEADER PORT SECONDS head|worker|HOSTS -- PROGRAM [ARGUMENT...]\n"
        )
        return 64
    leader, port, limit, what, program = (
        arguments[0],
        int(arguments[1]),
        arguments[2],
        arguments[3],
        arguments[5:],
    )
    deadline, env = time.monotonic() + float(limit), dict(os.environ)
    if what == "head":
        own = own_address(leader)
        program += [f"--node-ip-address={own}"] if own else []
    elif what == "worker":
        why = _listening(leader, port, deadline)
        if why:
            return _too_late(
                f"Ray's head on {leader}, port {port}, cannot be reached within {limit} s: {why}"
            )
    else:
        own = own_address(leader) or leader
        why = _listening(own, port, deadline)
        seen = 0 if why else _hosts(f"{own}:{port}", int(what), deadline)
        if seen < int(what):
            return _too_late(
                f"{seen} of {what} hosts joined Ray within {limit} s{f': {why}' if why else ''}"
            )
        env[_ADDRESS] = f"{own}:{port}"
    try:
        os.execvpe(program[0], program, env)
    except OSError as error:
        sys.stderr.write(f"trainworks: cannot start {program[0]!r}: {error.strerror or error}\n")
        return 126 if isinstance(error, PermissionError) else 127


def own_address(name: str) -> str:
    """Return this host's address by its name, or where that is loopback or
    another host's, by its way to others.

    ``""`` where neither is known: Ray then looks itself.
    """
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += [
            str(row[4][0])
            for row in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_DGRAM)
        ]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect(_ANYWHERE)
        found.append(str(way.getsockname()[0]))
    return next(
        (address for address in found if not address.startswith("127.") and _is_own(address)), ""
    )


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
        return True


def _listening(host: str, port: int, deadline: float) -> str:
    """Wait until something listens there. Returns ``""``, or after the limit why nothing does."""
    while True:
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
            return ""
        except OSError as error:
            why = str(error.strerror or error)
        if time.monotonic() + _BETWEEN_SECONDS > deadline:
            return why
        select.select((), (), (), _BETWEEN_SECONDS)


def _hosts(address: str, wanted: int, deadline: float) -> int:
    """Wait, bounded, for so many hosts of Ray. Returns how many there are."""
    # A connection as ray.init() makes it takes seconds, and registers a job.
    from ray._raylet import GcsClient

    client = GcsClient(address=address)
    while True:
        # GcsNodeInfo.ALIVE.
        alive: int = sum(row.state == 0 for row in client.get_all_node_info().values())
        if alive >= wanted or time.monotonic() + _BETWEEN_SECONDS > deadline:
            return alive
        select.select((), (), (), _BETWEEN_SECONDS)


def _too_late(what: str) -> int:
    sys.stderr.write(f"trainworks: {what}\n")
    return 66


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
