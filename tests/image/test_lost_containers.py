"""Jobs of two containers on a private network, of which one is killed, paused
or cut off: how the other one ends.
"""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from image.support import BuiltByCommand
from trainworks_testing.clock import assert_within, start_clock

pytestmark = pytest.mark.engine

HOSTS = ("algo-1", "algo-2")
MODES = {"mpi": "sagemaker_mpi_enabled", "torch_distributed": "sagemaker_torch_distributed_enabled"}
HEARTBEAT = 12
"""Seconds of silence after which a host counts as lost: the launcher's default,
which these tests leave as it is.
"""

SCRIPT = "import signal\nprint('rank is ready', flush=True)\nwhile True: signal.pause()\n"


def prepare(folder: Path, mode: str, host: str) -> Path:
    """Lay out /opt/ml of one host."""
    for name in ("code", "input/config", "model", "output"):
        (folder / name).mkdir(parents=True)
    (folder / "code" / "script.py").write_text(SCRIPT, encoding="utf-8")
    config = folder / "input" / "config"
    hyperparameters = {"sagemaker_program": "script.py", MODES[mode]: "true"}
    (config / "hyperparameters.json").write_text(json.dumps(hyperparameters), encoding="utf-8")
    resources = {"current_host": host, "hosts": HOSTS, "network_interface_name": "eth0"}
    (config / "resourceconfig.json").write_text(json.dumps(resources), encoding="utf-8")
    return folder


@pytest.fixture
def client() -> Iterator[Any]:
    import docker

    docker_client = docker.from_env()
    try:
        yield docker_client
    finally:
        docker_client.close()


class Job:
    """Two running containers whose ranks are ready."""

    def __init__(self, client: Any, stack: ExitStack, image: str, folder: Path, mode: str) -> None:
        network = client.networks.create(
            f"trainworks-test-{uuid.uuid4().hex[:10]}", driver="bridge", internal=True
        )
        stack.callback(network.remove)
        self.network, self.folder, self.containers = network, folder, []
        for host in HOSTS:
            mounts = {str(prepare(folder / host, mode, host)): {"bind": "/opt/ml", "mode": "rw"}}
            container = client.containers.create(image, ["train"], volumes=mounts)
            stack.callback(container.remove, force=True)
            client.networks.get("bridge").disconnect(container)
            network.connect(container, aliases=[host])
            self.containers.append(container)
        for container in self.containers:
            container.start()
        for container in self.containers:
            words = ("docker", "logs", "--follow", container.id)
            with subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as following:
                assert following.stdout is not None
                assert any(b"rank is ready" in line for line in following.stdout), self.log(
                    len(self.containers) - 1
                )
                following.kill()

    def wait(self, number: int) -> int:
        """The exit status of a container."""
        return int(self.containers[number].wait(timeout=300)["StatusCode"])

    def failure(self, number: int) -> str:
        """The text of its failure file."""
        return (self.folder / HOSTS[number] / "output" / "failure").read_text(encoding="utf-8")

    def log(self, number: int) -> str:
        return str(self.containers[number].logs().decode(errors="replace"))


@pytest.mark.parametrize(
    ("mode", "lost"), [("mpi", 0), ("mpi", 1), ("torch_distributed", 0), ("torch_distributed", 1)]
)
def test_a_container_is_killed(
    docker_image: BuiltByCommand, client: Any, tmp_path: Path, mode: str, lost: int
) -> None:
    with ExitStack() as stack:
        start_clock()
        job = Job(client, stack, docker_image.reference, tmp_path, mode)
        killed = time.monotonic()
        job.containers[lost].kill()
        assert job.wait(1 - lost) == 66, job.log(1 - lost)
        assert_within(15, killed, time.monotonic(), job.log(1 - lost))
        assert job.failure(1 - lost).startswith(f"lost host {HOSTS[lost]}: ")
        assert not (tmp_path / HOSTS[1 - lost] / "output" / "success").exists()


def test_a_container_is_paused(docker_image: BuiltByCommand, client: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        start_clock()
        job = Job(client, stack, docker_image.reference, tmp_path, "torch_distributed")
        paused = time.monotonic()
        job.containers[1].pause()
        assert job.wait(0) == 66, job.log(0)
        assert_within(HEARTBEAT + 5, paused, time.monotonic(), job.log(0))
        assert job.failure(0).startswith("lost host algo-2: no message from it for ")
        job.containers[1].unpause()
        assert job.wait(1) == 66, job.log(1)
        assert "lost host algo-" in job.failure(1)


def test_a_container_is_cut_off_the_network(
    docker_image: BuiltByCommand, client: Any, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        start_clock()
        job = Job(client, stack, docker_image.reference, tmp_path, "mpi")
        cut = time.monotonic()
        job.network.disconnect(job.containers[1], force=True)
        assert [job.wait(0), job.wait(1)] == [66, 66], job.log(0) + job.log(1)
        assert_within(HEARTBEAT + 5, cut, time.monotonic(), job.log(0) + job.log(1))
        assert job.failure(0).startswith("lost host algo-2: ")
        assert job.failure(1).startswith("lost host algo-1: ")
