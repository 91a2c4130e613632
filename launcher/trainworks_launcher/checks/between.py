"""Measures between the hosts of a job, before it starts: TCP from each host to the leader, then an all-reduce of torch.

The leader listens on the port that rank 0's store uses later. Each other host connects, says who it is, and sends as
much as it can when it is its turn. After the last one the leader tells all of them the figures and each host's first
rank, and the all-reduce starts on all at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

from trainworks_launcher.checks import FAILED, WARNING, Checks, Finding
from trainworks_launcher.checks.rules import bandwidth, bits

_CHUNK = bytes(1 << 20)
_SECONDS = 1.0
"""How long each host sends, where there are not more than _TURNS of them."""

_TURNS = 10.0
_PATIENCE_SECONDS = 15.0
"""Silence after which a measurement has failed."""

_LINE_BYTES = 1 << 20
_REDUCE_SECONDS = 180.0
"""For the import of torch, the rendezvous and the rounds. Torch gives up by itself earlier."""

_PAUSE_SECONDS = 0.2
_ADVICE = "let all hosts of the job connect to each other on every port (security group, firewall, network policy)"


class _Told(NamedTuple):
    """What the leader tells all hosts: first rank of each, bits per second of each other host, ranks in all."""

    ranks: dict[str, int]
    rates: dict[str, float]
    world: int


def measure(asked: Checks, log: Callable[[str], None]) -> tuple[Finding, ...]:
    """Measure this host's part. Returns what is wrong; the figures are lines of the leader's log."""
    leader = asked.host == asked.hosts[0]
    told = _Told({asked.host: 0}, {}, max(1, asked.gpus))
    if len(asked.hosts) > 1:
        try:
            told = _lead(asked) if leader else _follow(asked)
        except (OSError, ValueError, TypeError, KeyError) as error:
            what = f"TCP between {asked.host} and {asked.hosts[0]}, port {asked.port}, cannot be measured: {error}"
            return (Finding(FAILED, what, _ADVICE),)
    found: list[Finding] = []
    if leader and told.rates:
        slowest = min(told.rates, key=lambda host: told.rates[host])
        log(
            f"TCP to {asked.host}: {bits(told.rates[slowest])} from {slowest}, the slowest of {len(told.rates)} host(s)"
        )
        found += bandwidth(told.rates)
    if asked.python:
        found += _all_reduce(asked, told.ranks[asked.host], told.world, log)
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------------- TCP
def _lead(asked: Checks) -> _Told:
    """Let every host send in turn, and tell all of them what follows. Raises OSError."""
    others = set(asked.hosts[1:])
    joined: dict[str, socket.socket] = {}
    gpus = {asked.host: asked.gpus}
    deadline = time.monotonic() + asked.wait
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(asked.port, len(others)))
        while others - joined.keys():
            if not select.select((server,), (), (), max(0.0, deadline - time.monotonic()))[0]:
                raise OSError(f"{', '.join(sorted(others - joined.keys())[:10])} did not connect")
            connection, _ = server.accept()
            stack.callback(connection.close)
            connection.settimeout(_PATIENCE_SECONDS)
            with contextlib.suppress(OSError, ValueError):  # a stranger
                said = _read_line(connection)
                host = str(said.get("host"))
                if host in others:
                    joined[host], gpus[host] = connection, int(str(said.get("gpus")))
        seconds = _SECONDS * min(1.0, _TURNS / len(joined))
        rates = {host: _receive(connection, seconds) for host, connection in joined.items()}
        ranks: dict[str, int] = {}
        world = 0
        for host in asked.hosts:
            ranks[host] = world
            world += max(1, gpus[host])
        told = _Told(ranks, rates, world)
        server.close()  # rank 0 listens on this port next
        for connection in joined.values():
            connection.sendall(json.dumps(told._asdict()).encode() + b"\n")
        return told


def _listen(port: int, backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def _receive(connection: socket.socket, seconds: float) -> float:
    """Return the bits per second that a host sends, from the word to start to the end of its data."""
    connection.sendall(json.dumps({"seconds": seconds}).encode() + b"\n")
    began, count = time.monotonic(), 0
    buffer = bytearray(1 << 20)
    while True:
        got = connection.recv_into(buffer)
        if not got:
            return count * 8 / max(time.monotonic() - began, 1e-6)
        count += got


def _follow(asked: Checks) -> _Told:
    """Send to the leader when it says so, and return what it tells. Raises OSError."""
    deadline = time.monotonic() + asked.wait
    connection = _connect(asked.address, asked.port, deadline)
    with connection:
        connection.sendall(json.dumps({"host": asked.host, "gpus": asked.gpus}).encode() + b"\n")
        connection.settimeout(asked.wait)  # until all hosts are there, and those before this one are done
        seconds = float(str(_read_line(connection).get("seconds") or 0))
        connection.settimeout(_PATIENCE_SECONDS)
        until = time.monotonic() + min(seconds, _SECONDS)
        while time.monotonic() < until:
            connection.sendall(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(asked.wait)
        return _Told(**_read_line(connection))


def _connect(address: str, port: int, deadline: float) -> socket.socket:
    """Connect to the leader, which may listen a little later. Raises OSError."""
    while True:
        try:
            rest = max(_PAUSE_SECONDS, deadline - time.monotonic())
            return socket.create_connection((address, port), timeout=min(_PATIENCE_SECONDS, rest))
        except OSError:
            if time.monotonic() >= deadline:
                raise
        select.select((), (), (), _PAUSE_SECONDS)


def _read_line(connection: socket.socket) -> dict[str, Any]:
    """Return the JSON object of one line. Raises OSError for anything else."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = connection.recv(65536)
        line += chunk
        if not chunk or len(line) > _LINE_BYTES:
            raise OSError("the other host ended the connection")
    try:
        found = json.loads(line)
    except ValueError as error:
        raise OSError("the other host does not speak the launcher's protocol") from error
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------------------------------------------------- all-reduce
def _all_reduce(asked: Checks, first: int, world: int, log: Callable[[str], None]) -> list[Finding]:
    """Run this host's ranks of the all-reduce; the host with rank 0 logs the figure."""
    if world < 2:
        return []
    program = str(Path(__file__).resolve().parent.parent / "programs" / "all_reduce.py")
    started = []
    for local in range(max(1, asked.gpus)):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1" if first == 0 else asked.address,  # its own name may resolve nowhere
            "MASTER_PORT": str(asked.port),
            "RANK": str(first + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
        }
        started.append(
            subprocess.Popen(
                (asked.python, "-I", program), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    deadline = time.monotonic() + _REDUCE_SECONDS
    answers, problem = [], ""
    for local, process in enumerate(started):
        try:
            output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            problem = problem or f"rank {first + local} has not ended within {_REDUCE_SECONDS:g} s"
            break
        answers.append(output)
        if process.returncode:
            last = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"status {process.returncode}"]
            problem = problem or f"rank {first + local}: {last[0]}"
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if problem:
        return [Finding(FAILED, f"the all-reduce failed on {asked.host}: {problem[:300]}", _ADVICE)]
    if first == 0:
        try:
            figure = json.loads(answers[0])
            rate = 2 * (world - 1) / world * figure["bytes"] * 8 / figure["seconds"]
            log(f"all-reduce ({figure['backend']}, {world} ranks, {figure['bytes'] >> 20} MiB): {bits(rate)} per rank")
        except (ValueError, KeyError, IndexError, ZeroDivisionError):
            return [Finding(WARNING, "the all-reduce printed no figure", "run it again with NCCL_DEBUG=INFO")]
    return []
