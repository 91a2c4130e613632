"""Signals for the ranks, and launchers that are killed, under real starters:
torchrun, mpirun on two hosts, Slurm's.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_network import (
    BECOME_HOST,
    PREFIX,
    Host,
    Network,
    engine_manifest,
    job_on,
    need,
    network_of,
)
from launcher_support import TIME_OUT, Launcher, pids_with_variable, write_inputs

from trainworks_launcher.contract.json_values import Json
from trainworks_testing.clock import assert_within

pytestmark = pytest.mark.engine

MODES: dict[str, dict[str, Json]] = {
    "mpi": {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "2"},
    "torch_distributed": {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": "2",
    },
    "own torchrun": {"sagemaker_program": "run.sh"},
    "own mpirun": {"sagemaker_program": "run.sh"},
}
STARTERS = {
    "own torchrun": f"{PREFIX}/bin/torchrun --standalone --nproc-per-node 2 train.py",
    "own mpirun": (
        f"{PREFIX}/bin/mpirun --allow-run-as-root"
        f" --oversubscribe -np 2 {PREFIX}/bin/python train.py"
    ),
}
SAVES = """
import os, signal, sys
def save(number, frame):
    os.write(1, f"saved at {int(number)}\\n".encode())
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
while True: signal.pause()
"""
LOADS = """
import os, signal, torch
class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield os.getpid()
        while True: signal.pause()
loaded = iter(torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=None))
os.write(1, f"pids {os.getpid()} {next(loaded)} {next(loaded)} ready\\n".encode())
while True: signal.pause()
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    need("mpirun", "torchrun")
    return engine_manifest(tmp_path)


@pytest.fixture(scope="module")
def shared() -> Iterator[Network]:
    """Two hosts that no test spoils."""
    with network_of(2) as network:
        yield network


@pytest.mark.parametrize("mode", ["mpi", "torch_distributed"])
def test_each_host_hands_a_signal_to_its_own_ranks(
    shared: Network, manifest: Path, tmp_path: Path, mode: str
) -> None:
    with job_on(shared, tmp_path, SAVES, MODES[mode], manifest=manifest) as hosts:
        for host in hosts:
            host.read_until("ready", 2)
        for host in hosts:
            host.signal_process_one(signal.SIGUSR1)
        assert [host.wait() for host in hosts] == [0, 0], "\n".join(host.text for host in hosts)
    for host in hosts:
        assert host.text.count(f"saved at {int(signal.SIGUSR1)}") == 2
        assert host.succeeded


@pytest.mark.parametrize("mode", list(STARTERS))
def test_ranks_of_the_scripts_own_starter_get_it_too(
    manifest: Path, tmp_path: Path, mode: str
) -> None:
    """torchrun would die of the signal, and is passed over; mpirun passes the signal on itself."""
    write_inputs(tmp_path, SAVES, MODES[mode], {})
    (tmp_path / "code/run.sh").write_text(f"#!/bin/bash\n{STARTERS[mode]}\n", encoding="ascii")
    with Launcher(tmp_path, variables={"TRAINWORKS_IMAGE_MANIFEST": str(manifest)}) as launcher:
        launcher.read_until("ready", 2)
        launcher.process.send_signal(signal.SIGUSR1)
        assert launcher.wait() == 0, launcher.text
    assert launcher.text.count(f"saved at {int(signal.SIGUSR1)}") == 2


# --- the launcher is killed -----------------------------------------------------------------------
def pids_in(text: str) -> list[int]:
    lines = [line.partition("pids ")[2].split() for line in text.splitlines() if "pids " in line]
    return [int(word) for words in lines for word in words if word.isdecimal()]


def wait_for_ends(pids: list[int]) -> float:
    """The moment at which none of these processes was there any more."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            assert select.select([descriptor], [], [], TIME_OUT)[0], f"process {pid} goes on"
            os.close(descriptor)
    return time.monotonic()


def test_torchruns_ranks_and_their_data_loaders_end_with_the_launcher(
    manifest: Path, tmp_path: Path
) -> None:
    write_inputs(tmp_path, LOADS, MODES["torch_distributed"], {})
    with Launcher(tmp_path, variables={"TRAINWORKS_IMAGE_MANIFEST": str(manifest)}) as launcher:
        launcher.read_until("ready", 2)
        pids = pids_in(launcher.text)
        assert len(pids) == 6, launcher.text
        killed = time.monotonic()
        launcher.process.kill()
        assert_within(3, killed, wait_for_ends(pids), launcher.text)
        launcher.wait()
        assert pids_with_variable("SAGEMAKER_BASE_DIR", str(tmp_path)) == []


@pytest.mark.parametrize("killed", [0, 1], ids=["leader", "worker"])
def test_mpiruns_ranks_on_both_hosts_end_with_a_launcher(
    shared: Network, manifest: Path, tmp_path: Path, killed: int
) -> None:
    """Hosts without a PID namespace: as Slurm starts tasks, without a container."""
    script = (
        "import os, signal\n"
        "os.write(1, b'pids %d ready\\n' % os.getpid())\n"
        "while True: signal.pause()\n"
    )
    hosts = []
    with contextlib.ExitStack() as stack:
        for name in shared.hosts:
            base = tmp_path / name
            write_inputs(
                base, script, MODES["mpi"], {"hosts": list(shared.hosts), "current_host": name}
            )
            own = (
                "unshare",
                "--mount",
                "--uts",
                "sh",
                "-c",
                BECOME_HOST,
                "sh",
                name,
                str(tmp_path),
            )
            variables = {"TRAINWORKS_IMAGE_MANIFEST": str(manifest)}
            hosts.append(Host(base, variables=variables, prefix=shared.inside(name, *own)))
            stack.enter_context(hosts[-1])
        for host in hosts:
            host.read_until("ready", 2)
        pids = pids_in(hosts[0].text) + pids_in(hosts[1].text)
        assert len(pids) == 4
        began = time.monotonic()
        hosts[killed].process.kill()
        wait_for_ends(pids_in(hosts[killed].text))
        assert_within(3, began, time.monotonic(), hosts[killed].text)
        wait_for_ends(pids)
        hosts[1 - killed].wait()
        hosts[killed].wait()
        for host in hosts:
            assert pids_with_variable("SAGEMAKER_BASE_DIR", str(host.base)) == [], host.text
