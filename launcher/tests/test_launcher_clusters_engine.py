"""Jobs of two hosts with the variables that Kubeflow, AWS Batch and dstack set,
under real torchrun and mpirun.

Two network namespaces are the pods or nodes. The variables are those of
launcher/tests/test_launcher_clusters.py, where their sources are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from launcher_network import Host, Network, engine_manifest, need, network_of
from launcher_pods import start_pod
from launcher_support import GLOO_ENDS, TRAIN
from test_launcher_clusters import BATCH, DSTACK, PYTORCH_JOB, TRAIN_JOB, of_host

pytestmark = pytest.mark.engine

GLOO = (
    GLOO_ENDS
    + """
import os, sys, torch
import torch.distributed as distributed

assert not [name for name in os.environ if name.startswith("PET_")]
distributed.init_process_group("gloo")
one = torch.ones(1)
distributed.all_reduce(one)
rank = distributed.get_rank()
size, host = distributed.get_world_size(), os.environ["SM_CURRENT_HOST"]
print("rank", rank, "of", size, "sum", int(one), host, flush=True)
if "--fail" in sys.argv and rank == 1:
    os._exit(42)
distributed.barrier()
distributed.destroy_process_group()
"""
)
MPI = """
import os
from mpi4py import MPI

world = MPI.COMM_WORLD
host = os.environ["SM_CURRENT_HOST"]
print("rank", world.rank, "of", world.size, "sum", world.allreduce(1), host, flush=True)
"""


def start(
    network: Network,
    folder: Path,
    index: int,
    platform: Mapping[str, str],
    hostname: str,
    words: Sequence[str],
) -> Host:
    """Start ``train`` on a host of the network, in the directory of the code
    and with nothing below /opt/ml.
    """
    name = network.hosts[index]
    base = folder / f"base-{index}"
    variables = {
        "TRAINWORKS_IMAGE_MANIFEST": str(folder / "image.json"),
        "GLOO_SOCKET_IFNAME": "eth0",
        **of_host(platform, index, network.address(network.hosts[0])),
    }
    program = ("env", "-C", str(folder), *TRAIN)
    return start_pod(
        network, name, base, *words, hostname=hostname, variables=variables, program=program
    )


def run(
    folder: Path,
    names: Sequence[str],
    platform: Mapping[str, str],
    hostnames: Sequence[str],
    script: str,
    *words: str,
    status: int = 0,
) -> tuple[str, ...]:
    """Run a job on two hosts, which must end with a status; return the output of each."""
    need("python", "torchrun", "mpirun")
    engine_manifest(folder)
    (folder / "train.py").write_text(script, encoding="utf-8")
    with network_of(2, names) as network, contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(start(network, folder, index, platform, hostname, words))
            for index, hostname in enumerate(hostnames)
        ]
        assert [host.wait() for host in hosts] == [status] * 2, "".join(host.text for host in hosts)
    return tuple(host.text for host in hosts)


@pytest.mark.parametrize(
    ("platform", "names", "hostnames"),
    [
        (TRAIN_JOB, ("pi-node-0-0.pi", "pi-node-0-1.pi"), ("pi-node-0-0", "pi-node-0-1")),
        (PYTORCH_JOB, ("pi-master-0", "pi-worker-0"), ("pi-master-0", "pi-worker-0")),
        (BATCH, ("ip-10-77-0-1", "ip-10-77-0-2"), ("ip-10-77-0-1", "ip-10-77-0-2")),
    ],
)
def test_torchrun_on_two_hosts(
    tmp_path: Path, platform: Mapping[str, str], names: tuple[str, str], hostnames: tuple[str, str]
) -> None:
    outputs = run(
        tmp_path, names, platform, hostnames, GLOO, "--mode", "torch_distributed", "--", "train.py"
    )
    for rank, text in enumerate(outputs):
        assert f"rank {rank} of 2 sum 2 " in text


def test_a_failed_rank_is_the_cause_on_both_hosts(tmp_path: Path) -> None:
    names = ("pi-node-0-0.pi", "pi-node-0-1.pi")
    outputs = run(
        tmp_path,
        names,
        TRAIN_JOB,
        ("pi-node-0-0", "pi-node-0-1"),
        GLOO,
        "--",
        "train.py",
        "--fail",
        status=42,
    )
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
    assert (
        "train.py on host pi-node-0-1.pi, rank 1 (mode torch_distributed): exit status 42"
        in outputs[0]
    )


def test_mpirun_on_two_nodes_of_aws_batch(tmp_path: Path) -> None:
    """The main node knows no address at all: it learns the other's when that one joins."""
    hostnames = ("ip-10-77-0-1", "ip-10-77-0-2")
    outputs = run(tmp_path, hostnames, BATCH, hostnames, MPI, "--mode", "mpi", "--", "train.py")
    assert "[node-0 rank 0] rank 0 of 2 sum 2 node-0\n" in outputs[0]
    assert "[node-1 rank 1] rank 1 of 2 sum 2 node-1\n" in outputs[1]


def test_the_leaders_name_resolves_late(tmp_path: Path) -> None:
    """A headless service has a pod's name only once the pod is ready.

    Even the pod itself does not know it before.
    """
    names = ("pi-node-0-0.pi", "pi-node-0-1.pi")
    need("python", "torchrun")
    engine_manifest(tmp_path)
    (tmp_path / "train.py").write_text(GLOO, encoding="utf-8")
    with network_of(2, names) as network, contextlib.ExitStack() as stack:
        for name in names:
            network.resolves(name)
        hosts = [
            stack.enter_context(
                start(network, tmp_path, index, TRAIN_JOB, name.split(".")[0], ("--", "train.py"))
            )
            for index, name in enumerate(names)
        ]
        hosts[1].read_until("joining pi-node-0-0.pi on port")
        for name in names:
            network.resolves(name, *names)
        assert [host.wait() for host in hosts] == [0, 0], "".join(host.text for host in hosts)


def test_dstack_calls_hosts_by_their_addresses(tmp_path: Path) -> None:
    outputs = run(
        tmp_path, ("a", "b"), DSTACK, ("box", "box"), MPI, "--mode", "mpi", "--", "train.py"
    )
    assert "[10.77.0.2 rank 1] rank 1 of 2 sum 2 10.77.0.2\n" in outputs[1]
