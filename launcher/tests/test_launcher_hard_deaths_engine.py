"""Hard deaths of one rank of two hosts under mpirun, again and again: its
status, host and rank on both hosts.

Marked ``engine``. TRAINWORKS_HARD_DEATHS=40 is the whole series (about ten minutes); by default
there is one death of each kind. Every second one is beside a load of eight processes. Its
needs: see ``test_launcher_engine.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_network import Network, engine_manifest, job_on, need, two_namespaces

from trainworks_testing.clock import assert_within, start_clock

pytestmark = pytest.mark.engine

COUNT = int(os.environ.get("TRAINWORKS_HARD_DEATHS", "6"))
LOAD = 8
MEMORY = Path("/sys/fs/cgroup/memory")
HOST_BYTES = 1 << 30
SCRIPT = """
import os, signal, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
for step in range(3):
    world.allreduce(step)
if world.rank == DYING:
    print("dies", time.monotonic(), flush=True)
    DEATH
world.allreduce(1)
"""
DEATHS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    "exit 17": ("os._exit(17)", 17, "exit status 17"),
    "out of memory": (
        (
            "kept = [(bytearray(1 << 24), print('dies', time.monotonic(), flush=True)) for _ in"
            " range(1 << 12)]"
        ),
        137,
        "out of memory",
    ),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM)", 143, "killed by SIGTERM"),
    "exit 0": ("os._exit(0)", None, "ended with exit status 0 while other ranks went on"),
    "exception": ("raise ValueError('the batch is empty')", 1, "ValueError: the batch is empty"),
}
"""Code of the rank, the job's status (None: any but 0), and the words of the failure."""


@pytest.fixture
def network() -> Iterator[Network]:
    with two_namespaces() as spaces:
        yield spaces


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """Run ``count`` processes that compute."""
    processes = [subprocess.Popen((sys.executable, "-c", "while True: pass")) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def memory_of(limit: int) -> Iterator[tuple[str, ...]]:
    """The words that run a command with so much memory, as a container with ``--memory``."""
    if not (MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip("no memory controller of cgroups 1 to put a host's processes into")
    group = MEMORY / f"trainworks-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit), encoding="ascii")
        # The host's network has a /sys of its own.
        enter = (
            "mount -t tmpfs none /sys/fs/cgroup; mkdir /sys/fs/cgroup/memory;"
            f"mount -t cgroup -o memory none /sys/fs/cgroup/memory; echo $$ > {group}/cgroup.procs;"
            ' exec "$@"'
        )
        yield ("sh", "-c", enter, "sh")
    finally:
        deadline = time.monotonic() + 10
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                assert time.monotonic() < deadline, f"{group} has processes"


@pytest.mark.parametrize("number", range(COUNT))
def test_a_hard_death_of_a_rank(tmp_path: Path, network: Network, number: int) -> None:
    need("mpirun")
    kind = [*DEATHS][number % len(DEATHS)]
    death, status, words = DEATHS[kind]
    ranks = (4, 8)[number // len(DEATHS) % 2]
    dying = 2 * ranks - 1 - (number // len(DEATHS)) * 5 % (2 * ranks)  # the last one first
    host = f"algo-{1 + dying // ranks}"
    hyperparameters = {
        **json.loads(os.environ.get("X", "{}")),
        "sagemaker_mpi_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": str(ranks),
    }
    loaded = LOAD if (number + number // 10) % 2 else 0
    with contextlib.ExitStack() as stack:
        limit = stack.enter_context(memory_of(HOST_BYTES)) if kind == "out of memory" else ()
        stack.enter_context(load(loaded))
        script = SCRIPT.replace("DEATH", death).replace("DYING", str(dying))
        manifest = engine_manifest(tmp_path)
        prefix = {host: limit}
        hosts = stack.enter_context(
            job_on(network, tmp_path, script, hyperparameters, manifest=manifest, before=prefix)
        )
        dying_host = hosts[dying // ranks]
        dying_host.read_until("dies")
        start_clock()
        statuses = [host.wait() for host in hosts]
        died = float(
            dying_host.text.rpartition("] dies ")[2].split()[0]
        )  # all hosts have one clock
        seconds = max(host.end_time for host in hosts) - died
    failure_reports = [
        json.loads((host.base / "output/failure.json").read_text(encoding="utf-8"))
        for host in hosts
    ]
    text = "\n".join((*(host.text for host in hosts), *(host.failure for host in hosts)))
    print(
        f"{kind}, rank {dying} of {2 * ranks}, load {loaded}: {statuses} after {seconds:.1f} s:"
        f" {failure_reports[0]['cause']}"
    )
    assert [(row["host"], row["rank"]) for row in failure_reports] == [(host, dying)] * 2, text
    assert statuses[0] == statuses[1] != 0, text
    assert status in (None, statuses[0]), text
    assert words in hosts[0].failure, text
    assert hosts[0].failure == hosts[1].failure, text
    assert_within(20, died, died + seconds, text)
