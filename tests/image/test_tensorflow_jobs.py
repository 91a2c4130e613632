"""Real TensorFlow jobs in the real `cpu` image: one process, two ranks of
mpirun, two hosts of TF_CONFIG.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from image.jobs import run_on_hosts
from image.support import ROOT, BuiltByCommand, build_once, given_image
from trainworks.engine.protocol import Job, Mount

pytestmark = pytest.mark.engine

LOSS = re.compile(r"epoch (\d+) world (\d+) rank (\d+) loss ([0-9.]+)")
WEIGHTS = re.compile(r"rank (\d+) of (\d+): the weights' sum is (-?[0-9.]+)")

MPI = {
    "sagemaker_mpi_enabled": "true",
    "sagemaker_mpi_num_of_processes_per_host": "2",
    "reduce": "mpi",
}
MIRRORED = {"sagemaker_multi_worker_mirrored_strategy_enabled": "true", "reduce": "strategy"}
SERVERS = {"sagemaker_parameter_server_enabled": "true"}


@pytest.fixture(scope="session")
def tensorflow_image(shared: Path) -> BuiltByCommand:
    """Give TensorFlow's image as Docker built it; the first use builds and tests it."""
    return given_image() or build_once(shared, "docker", "tensorflow")


def prepare(folder: Path, hyperparameters: dict[str, str], hosts: Sequence[str], host: str) -> Path:
    """Lay out /opt/ml for the Keras example."""
    for name in ("code", "input/config", "model", "output"):
        (folder / name).mkdir(parents=True)
    shutil.copyfile(ROOT / "examples" / "keras" / "train.py", folder / "code" / "train.py")
    config = folder / "input" / "config"
    job = {"sagemaker_program": "train.py", "epochs": "3", **hyperparameters}
    (config / "hyperparameters.json").write_text(json.dumps(job), encoding="utf-8")
    resources = {"current_host": host, "hosts": list(hosts), "network_interface_name": "eth0"}
    (config / "resourceconfig.json").write_text(json.dumps(resources), encoding="utf-8")
    return folder


def assert_trained(output: str, world: int, folder: Path) -> None:
    """Assert that all ranks trained one model: falling losses, equal weights in
    the end, saved by the first one.
    """
    for rank in range(world):
        losses = [
            float(loss)
            for _, size, of, loss in LOSS.findall(output)
            if int(size) == world and int(of) == rank
        ]
        assert len(losses) == 3, output[-4000:]
        assert losses[-1] < losses[0] / 2, losses
    weights = WEIGHTS.findall(output)
    assert {(int(rank), int(size)) for rank, size, _ in weights} == {
        (rank, world) for rank in range(world)
    }
    assert len({total for *_, total in weights}) == 1, (
        "the ranks' models differ: no gradient was averaged"
    )
    assert (folder / "model" / "model.keras").stat().st_size > 10_000
    assert (folder / "output" / "success").exists()
    assert not (folder / "output" / "failure").exists()


@pytest.mark.parametrize(("hyperparameters", "world"), [({}, 1), (MPI, 2), (SERVERS, 1)])
def test_one_host_trains_and_saves_a_model(
    tensorflow_image: BuiltByCommand, hyperparameters: dict[str, str], world: int, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "ml", hyperparameters, ("algo-1",), "algo-1")
    image = tensorflow_image
    done = image.engine.run(
        image.reference,
        Job(command=("train",), mounts=(Mount(source=folder, target="/opt/ml"),), timeout=300),
    )
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, world, folder)


def test_a_tensorflow_for_another_cuda_than_the_images_is_noticed(
    tensorflow_image: BuiltByCommand, tmp_path: Path
) -> None:
    manifest = tmp_path / "image.json"
    manifest.write_text(
        json.dumps({"components": {"cuda": {"version": "12.9.79"}}}), encoding="utf-8"
    )
    mounts = (Mount(source=manifest, target="/opt/trainworks/image.json"),)
    command = ("python", "/opt/trainworks/share/tensorflow-build")
    image = tensorflow_image
    done = image.engine.run(image.reference, Job(command=command, mounts=mounts, timeout=300))
    assert done.status == 1
    assert "compiled with CUDA none, the image has 12.9.79" in done.output


def test_two_hosts_train_together_by_tensorflows_own_strategy(
    tensorflow_image: BuiltByCommand, network: Any, tmp_path: Path
) -> None:
    hosts = ("algo-1", "algo-2")
    folders = {host: prepare(tmp_path / host, MIRRORED, hosts, host) for host in hosts}
    assert_trained(
        run_on_hosts(tensorflow_image.reference, network, folders), 2, tmp_path / "algo-1"
    )
    assert not any((tmp_path / "algo-2" / "model").iterdir())
