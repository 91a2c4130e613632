"""Jobs under the real Open MPI and torchrun: one host, and two hosts as two network namespaces.

Marked ``engine``. They need root, iproute2, util-linux, and a virtual environment with Open MPI,
mpi4py and torch: ``tools/set-up-peers`` makes it, TRAINWORKS_TEST_PREFIX names another. A test
whose needs are missing is skipped with their names.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_network import NAMES, Network, engine_manifest, need, two_hosts, two_namespaces
from launcher_support import GLOO_ENDS, TIME_OUT, Launcher, write_inputs

from trainworks_launcher.contract.json_values import Json

pytestmark = pytest.mark.engine

MPI: dict[str, Json] = {
    "sagemaker_mpi_enabled": "true",
    "sagemaker_mpi_num_of_processes_per_host": "2",
}
TORCH: dict[str, Json] = {
    "sagemaker_torch_distributed_enabled": "true",
    "sagemaker_mpi_num_of_processes_per_host": "2",
}
HELLO = """
import os, socket, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(1)
names = os.environ["SM_CURRENT_HOST"], socket.gethostname()
assert "trainworks" not in os.environ.get("TMPDIR", "")
print("rank", world.rank, "of", world.size, "sum", total, *names, flush=True)
if "--fail" in sys.argv and world.rank == world.size - 1:
    raise ValueError("the last rank fails")
world.Barrier()
"""
STOP = """
import os, signal
from mpi4py import MPI
seen = []
signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
MPI.COMM_WORLD.Barrier()
print("ready", flush=True)
while not seen:
    signal.sigtimedwait([signal.SIGUSR1], 0.1)
print("checkpoint", flush=True)
"""
GLOO = (
    GLOO_ENDS
    + """
import os, sys, torch
import torch.distributed as distributed

distributed.init_process_group("gloo")
one = torch.ones(1)
distributed.all_reduce(one)
rank = distributed.get_rank()
size, host = distributed.get_world_size(), os.environ["SM_CURRENT_HOST"]
print("rank", rank, "of", size, "sum", int(one), host, flush=True)
if "--fail" in sys.argv and rank == 3:
    sys.exit(42)
distributed.barrier()
distributed.destroy_process_group()
"""
)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return engine_manifest(tmp_path)


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts that can be resolved as algo-1 and algo-2."""
    with two_namespaces() as spaces:
        yield spaces


def test_mpi_on_one_host(tmp_path: Path, manifest: Path) -> None:
    need("mpirun", "python")
    write_inputs(tmp_path, HELLO, MPI, {})
    with Launcher(tmp_path, variables={"TRAINWORKS_IMAGE_MANIFEST": str(manifest)}) as launcher:
        assert launcher.wait() == 0
    assert launcher.text.count("of 2 sum 2") == 2


def test_mpi_on_two_hosts(tmp_path: Path, network: Network, manifest: Path) -> None:
    need("mpirun")
    options = "--mca btl_vader_single_copy_mechanism none -verbose -x GREETING='hello world'"
    hyperparameters: dict[str, Json] = {**MPI, "sagemaker_mpi_custom_mpi_options": options}
    with two_hosts(tmp_path, network, manifest, HELLO, hyperparameters) as launchers:
        assert [launcher.wait() for launcher in launchers] == [0, 0], (
            launchers[0].text + launchers[1].text
        )
    leader, worker = launchers
    for rank in range(4):
        host = NAMES[rank // 2]
        assert (
            f"[{host} rank {rank}] rank {rank} of 4 sum 4 {host} {host}\n"
            in launchers[rank // 2].text
        )
    assert leader.succeeded
    assert worker.succeeded
    assert "using 'eth0', which routes to the leader" in worker.text


def test_a_failing_rank_on_the_second_host(
    tmp_path: Path, network: Network, manifest: Path
) -> None:
    """Report one status and one cause on both hosts, from the last words of the rank itself, which
    only its host has.
    """
    need("mpirun")
    with two_hosts(tmp_path, network, manifest, HELLO, {**MPI, "fail": 1}) as launchers:
        statuses = [launcher.wait() for launcher in launchers]
    assert statuses == [1, 1]
    assert launchers[0].failure == launchers[1].failure
    lines = launchers[0].failure.splitlines()
    assert lines[:2] == [
        "ValueError: the last rank fails",
        "train.py on host algo-2, rank 3 (mode mpi): exit status 1",
    ]
    assert lines[-1] == lines[0]


def test_a_stop_signal_reaches_every_rank(tmp_path: Path, network: Network, manifest: Path) -> None:
    need("mpirun")
    with two_hosts(tmp_path, network, manifest, STOP, MPI) as launchers:
        for launcher in launchers:
            launcher.read_until("ready", 2)
        launchers[1].signal_process_one(signal.SIGTERM)
        assert [launcher.wait() for launcher in launchers] == [0, 0], (
            launchers[0].text + launchers[1].text
        )
    for host, ranks, launcher in zip(NAMES, ((0, 1), (2, 3)), launchers, strict=True):
        assert all(f"[{host} rank {rank}] checkpoint\n" in launcher.text for rank in ranks)
    assert "job stopped" in launchers[1].text


def test_a_killed_worker_ends_the_leader(tmp_path: Path, network: Network, manifest: Path) -> None:
    need("mpirun")
    with two_hosts(tmp_path, network, manifest, STOP, MPI) as launchers:
        for launcher in launchers:
            launcher.read_until("ready", 2)
        launchers[1].process.kill()
        assert launchers[0].wait() == 66
    assert launchers[0].failure.startswith("lost host algo-2: ")


def test_mpirun_that_refuses_to_start(tmp_path: Path, network: Network, manifest: Path) -> None:
    need("mpirun")
    hyperparameters: dict[str, Json] = {
        **MPI,
        "sagemaker_mpi_custom_mpi_options": "--no-such-option",
    }
    with two_hosts(tmp_path, network, manifest, HELLO, hyperparameters) as launchers:
        statuses = [launcher.wait() for launcher in launchers]
    assert statuses[0] == statuses[1] != 0
    assert "no-such-option" in launchers[1].failure


def test_torchrun_on_two_hosts(tmp_path: Path, network: Network, manifest: Path) -> None:
    need("torchrun")
    with two_hosts(tmp_path, network, manifest, GLOO, TORCH) as launchers:
        assert [launcher.wait() for launcher in launchers] == [0, 0], (
            launchers[0].text + launchers[1].text
        )
    for rank in range(4):
        host = NAMES[rank // 2]
        assert f"[{host} rank {rank}] rank {rank} of 4 sum 4 {host}\n" in launchers[rank // 2].text


@pytest.mark.parametrize(
    ("end", "status"),
    [("os.kill(os.getpid(), signal.SIGTERM)", 143), ("os._exit(17)", 17), ("os.abort()", 134)],
)
def test_a_hard_death_under_torchrun(
    tmp_path: Path, network: Network, manifest: Path, end: str, status: int
) -> None:
    """Break the connection of the peers, which fail of it or are ended for it: neither is the
    cause.
    """
    need("torchrun")
    script = GLOO.replace("sys.exit(42)", f"import signal; {end}")
    with two_hosts(tmp_path, network, manifest, script, {**TORCH, "fail": 1}) as launchers:
        assert [launcher.wait() for launcher in launchers] == [status, status], (
            launchers[0].text + launchers[1].text
        )
    assert "on host algo-2, rank 3 (mode torch_distributed)" in launchers[0].failure
    assert launchers[0].failure == launchers[1].failure


def test_a_failing_rank_under_torchrun(tmp_path: Path, network: Network, manifest: Path) -> None:
    need("torchrun")
    with two_hosts(tmp_path, network, manifest, GLOO, {**TORCH, "fail": 1}) as launchers:
        statuses = [launcher.wait() for launcher in launchers]
    assert statuses[0] == statuses[1] != 0
    assert launchers[0].failure == launchers[1].failure
    assert max(launcher.seconds for launcher in launchers) < TIME_OUT
