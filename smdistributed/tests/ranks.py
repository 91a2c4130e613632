"""Start the ranks of one job on this host, as functions (fast) or as a program
(real), and collect how each ended.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# torch is imported once, by the server that each rank is forked from, as are the modules that the
# first optimizer imports (2 s). smdistributed is not: it reads the environment.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy"])

HERE = Path(__file__).parent

LIMIT = 300.0
"""Seconds after which a test gives up on a job: no promise, and far above the time of any job."""
LOST = (
    ": so says multiprocessing if its server of forks was killed,"
    " whatever the rank's own status was"
)
_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class RankError(AssertionError):
    """A rank failed, or the job took too long. The text has every rank's own error."""


@dataclass(frozen=True)
class Ended:
    """The end of one rank of a program.

    Attributes:
        rank: Its rank.
        status: Its exit status; negative is the signal that killed it.
        out: Its standard output.
        err: Its standard error.
        seconds: From the start of the job to its end.
    """

    rank: int
    status: int
    out: str
    err: str
    seconds: float


def run_ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    variables: Mapping[str, str] | None = None,
    limit: float = LIMIT,
) -> list[Any]:
    """Call ``function(*arguments)`` in ``count`` processes, and return the value of each rank, by
    rank.

    Args:
        count: Number of ranks, all on this host.
        function: A function of a module's top level. The function imports smdistributed itself.
        arguments: Picklable arguments.
        variables: Environment variables for every rank, beside the rank variables.
        limit: Seconds after which the job is killed.

    Raises:
        RankError: A rank raised, died, or the limit passed.
    """
    port = free_port()
    ends: dict[Connection, int] = {}
    processes = []
    for rank in range(count):
        receiver, sender = _FORKS.Pipe(duplex=False)
        environment = {**rank_variables(rank, count, port), **(variables or {})}
        process = _FORKS.Process(
            target=_body, args=(sender, environment, function, arguments), daemon=True
        )
        process.start()
        sender.close()
        processes.append(process)
        ends[receiver] = rank
    results: dict[int, tuple[bool, Any]] = {}
    end = time.monotonic() + limit
    while ends and (left := end - time.monotonic()) > 0:
        for ready in wait(list(ends), timeout=left):
            assert isinstance(ready, Connection)
            rank = ends.pop(ready)
            try:
                results[rank] = pickle.loads(ready.recv_bytes())  # noqa: S301
            except EOFError:
                processes[rank].join(10)
                results[rank] = (
                    False,
                    f"ended without a result, status {processes[rank].exitcode}",
                )
    late = sorted(ends.values())
    for process in processes:
        if not late:
            process.join(max(end - time.monotonic(), 10))
        if process.is_alive():
            process.kill()
            process.join()
    failed = [
        f"rank {rank}: {value}" for rank, (good, value) in sorted(results.items()) if not good
    ]
    failed += [f"rank {rank}: still running after {limit} s" for rank in late]
    failed += [
        f"rank {rank}: returned, then ended with status"
        f" {process.exitcode}{LOST if process.exitcode == 255 else ''}"
        for rank, process in enumerate(processes)
        if not failed and process.exitcode
    ]
    if failed:
        raise RankError("\n".join(failed))
    return [results[rank][1] for rank in range(count)]


def start_program(
    count: int,
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> list[subprocess.Popen[str]]:
    """Start ``python COMMAND`` once for each rank, in ``folder``, with the
    variables that mpirun would set.
    """
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, **rank_variables(rank, count, port), **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        for rank in range(count)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], *, limit: float = LIMIT) -> list[Ended]:
    """Wait for all ranks of a program.

    Raises:
        RankError: The limit (seconds) passed; all ranks are killed.
    """
    start = time.monotonic()
    ends: list[Ended] = []
    # A rank writes little: its pipes are read one after another.
    for rank, process in enumerate(processes):
        try:
            out, err = process.communicate(timeout=max(start + limit - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            for other in processes:
                if other.poll() is None:
                    os.killpg(other.pid, signal.SIGKILL)
            texts = [
                f"rank {n}: {p.communicate()}"
                for n, p in enumerate(processes)
                if not p.stdout or not p.stdout.closed
            ]
            raise RankError(f"rank {rank} still ran after {limit} s\n" + "\n".join(texts)) from None
        ends.append(Ended(rank, process.returncode, out, err, time.monotonic() - start))
    return ends


def run_program(
    count: int,
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    limit: float = LIMIT,
    folder: Path | None = None,
) -> list[Ended]:
    """Run ``python COMMAND`` as the ranks of one job, and return how each ended, by rank."""
    return finish(start_program(count, command, variables=variables, folder=folder), limit=limit)


def rank_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the variables that Open MPI and the launcher set for one rank."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    """Return a TCP port without a listener, below those that the kernel gives to connections.

    A port of the kernel's own choice would sometimes be a connection's before
    rank 0 listens on it: gloo opens many.
    """
    lowest = max(20_000, int(_CONNECTIONS.read_text(encoding="ascii").split()[0]))
    while True:
        port = 10_000 + secrets.randbelow(lowest - 10_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def _body(
    sender: Connection, environment: Mapping[str, str], function: Callable[..., Any], arguments: Any
) -> None:
    os.environ.update(environment)
    faulthandler.enable()  # a rank that a signal kills says where it was
    import torch

    torch.set_num_threads(1)
    try:
        result = (True, function(*arguments))
    except BaseException:  # noqa: BLE001  every error belongs to the report
        result = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's would share the memory of tensors, which
    # ends with this process.
    sender.send_bytes(pickle.dumps(result))
    sender.close()
