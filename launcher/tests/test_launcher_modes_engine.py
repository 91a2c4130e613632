"""Modes under the real Open MPI: a distribution over some of the hosts, and smddp's wrapper in
front of every rank.

Marked ``engine``; see test_launcher_engine for its needs. smddp itself is not installed: its
``smddprun`` is a stand-in that says where it was put and becomes the program.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher_network import (
    NAMES,
    engine_manifest,
    job_on,
    need,
    network_of,
    two_hosts,
    two_namespaces,
)

from trainworks_launcher.contract.json_values import Json

pytestmark = pytest.mark.engine

THREE = (*NAMES, "algo-3")
PER_HOST = "sagemaker_mpi_num_of_processes_per_host"
SCRIPT = """
import os, sys
host = os.environ["SM_CURRENT_HOST"]
if "OMPI_COMM_WORLD_RANK" not in os.environ:
    print("plain on", host, flush=True)
    sys.exit(7 if "--fail" in sys.argv else 0)
from mpi4py import MPI
world = MPI.COMM_WORLD
total, wrapped = world.allreduce(1), os.environ.get("WRAPPED")
print("rank", world.rank, "of", world.size, "sum", total, "on", host, wrapped, flush=True)
if "--fail" in sys.argv:
    import signal
    signal.pause()
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """The manifest of a made-up image whose programs are this machine's, and a
    stand-in for smddprun.
    """
    need("mpirun", "python")
    wrapper = tmp_path / "smddprun"
    wrapper.write_text(
        '#!/bin/sh\nWRAPPED="$SMDATAPARALLEL_SERVER_ADDR" exec "$@"\n', encoding="ascii"
    )
    wrapper.chmod(0o755)
    return engine_manifest(tmp_path, smddprun=str(wrapper))


@pytest.mark.parametrize("fail", [False, True])
def test_mpirun_over_one_group_of_three_hosts(tmp_path: Path, manifest: Path, fail: bool) -> None:
    """mpirun, its keys and rank 0 are on the group's first host.

    The host outside the group ends with all, and ends all.
    """
    hyperparameters: dict[str, Json] = {
        "sagemaker_mpi_enabled": "true",
        PER_HOST: "2",
        "sagemaker_distribution_instance_groups": '["train"]',
        **({"fail": 1} if fail else {}),
    }
    groups: dict[str, Json] = {
        "instance_groups": [
            {"instance_group_name": "data", "instance_type": "local", "hosts": ["algo-1"]},
            {
                "instance_group_name": "train",
                "instance_type": "local",
                "hosts": ["algo-2", "algo-3"],
            },
        ]
    }
    with (
        network_of(3) as network,
        job_on(
            network, tmp_path, SCRIPT, hyperparameters, manifest=manifest, config=lambda _: groups
        ) as hosts,
    ):
        expected = 7 if fail else 0
        assert [launcher.wait() for launcher in hosts] == [expected] * 3, "".join(
            launcher.text for launcher in hosts
        )
    assert "plain on algo-1" in hosts[0].text
    if fail:
        assert len({launcher.failure for launcher in hosts}) == 1
        assert hosts[2].failure.startswith("train.py on host algo-1 (mode mpi): exit status 7\n")
        return
    for rank in range(4):
        host = THREE[1 + rank // 2]
        assert (
            f"[{host} rank {rank}] rank {rank} of 4 sum 4 on {host} None\n"
            in hosts[1 + rank // 2].text
        )
    assert all(launcher.succeeded for launcher in hosts)


@pytest.mark.parametrize(
    "switch", ["sagemaker_distributed_dataparallel_enabled", "sagemaker_pytorch_ddp_enabled"]
)
def test_smddps_wrapper_and_its_variables_reach_every_rank(
    tmp_path: Path, manifest: Path, switch: str
) -> None:
    with (
        two_namespaces() as network,
        two_hosts(tmp_path, network, manifest, SCRIPT, {switch: "true", PER_HOST: "2"}) as hosts,
    ):
        assert [launcher.wait() for launcher in hosts] == [0, 0], hosts[0].text + hosts[1].text
    for rank in range(4):
        assert f"rank {rank} of 4 sum 4 on {NAMES[rank // 2]} algo-1\n" in hosts[rank // 2].text
