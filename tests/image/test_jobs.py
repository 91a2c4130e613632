"""Real training jobs in the real `cpu` image, started as a platform starts them: one container per host, /opt/ml."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from image.support import ROOT, BuiltByCommand
from trainworks.engine.protocol import Completed, Mount

pytestmark = pytest.mark.engine

MODES = ("torch_distributed", "mpi")

LOSS = re.compile(r"epoch (\d+) world (\d+) loss ([0-9.]+)")


def prepare(folder: Path, mode: str, *, processes: int = 2, host: str = "algo-1", hosts: str = "algo-1") -> Path:
    """Lay out /opt/ml for the digits example with the example's own command."""
    command = (sys.executable, str(ROOT / "examples" / "digits" / "prepare.py"), str(folder))
    options = ("--mode", mode, "--processes", str(processes), "--host", host, "--hosts", hosts)
    subprocess.run((*command, *options), check=True, capture_output=True, timeout=120)
    return folder


def losses(output: str, world: int) -> list[float]:
    """Return the loss of each epoch, as the script printed it for a world of this size."""
    return [float(match[3]) for match in LOSS.finditer(output) if int(match[2]) == world]


def assert_trained(output: str, world: int, folder: Path) -> None:
    """Assert that a job trained: five epochs, a falling loss, a model, a success file and no failure file."""
    seen = losses(output, world)
    assert len(seen) == 5, output[-4000:]
    assert seen[-1] < seen[0] / 2, seen
    assert (folder / "model" / "model.pt").stat().st_size > 10_000
    assert (folder / "output" / "success").exists()
    assert not (folder / "output" / "failure").exists()


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_on_one_host_train(image: BuiltByCommand, mode: str, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "ml", mode)
    done = image.engine.run(image.reference, ("train",), mounts=(Mount(source=folder, target="/opt/ml"),), timeout=300)
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 2, folder)


def plain_job(folder: Path, script: str, **hyperparameters: str) -> Path:
    """Lay out /opt/ml for a script of one process."""
    for name in ("code", "input/config", "model", "output"):
        (folder / name).mkdir(parents=True)
    (folder / "code" / "script.py").write_text(script, encoding="utf-8")
    config = folder / "input" / "config"
    (config / "hyperparameters.json").write_text(json.dumps({"sagemaker_program": "script.py", **hyperparameters}))
    (config / "resourceconfig.json").write_text(json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]}))
    return folder


def test_a_failing_script_ends_with_its_own_status_and_says_why(image: BuiltByCommand, tmp_path: Path) -> None:
    script = "import sys\nprint('cannot read /no/such/data', file=sys.stderr)\nsys.exit(42)\n"
    folder = plain_job(tmp_path / "ml", script)
    done = image.engine.run(image.reference, ("train",), mounts=(Mount(source=folder, target="/opt/ml"),), timeout=120)
    assert done.status == 42, done.output
    assert "/no/such/data" in (folder / "output" / "failure").read_text(encoding="utf-8")
    assert not (folder / "output" / "success").exists()


def test_no_argument_is_train_and_another_one_is_run_as_given(image: BuiltByCommand, tmp_path: Path) -> None:
    folder = plain_job(tmp_path / "ml", "import sys; print('arguments', sys.argv[1:])", rate="0.5")
    mounts = (Mount(source=folder, target="/opt/ml"),)
    assert "arguments ['--rate', '0.5']" in image.engine.run(image.reference, (), mounts=mounts, timeout=120).output
    done = image.engine.run(image.reference, ("bash", "-c", "echo $0 is bash; exit 7"), timeout=120)
    assert done == Completed(status=7, output="bash is bash\n")


def test_the_plan_of_a_job_is_shown_and_nothing_is_run(image: BuiltByCommand, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "ml", "torch_distributed")
    mounts = (Mount(source=folder, target="/opt/ml"),)
    done = image.engine.run(image.reference, ("train", "--plan"), mounts=mounts, timeout=120)
    plan = json.loads(done.output)
    assert done.status == 0
    assert plan["argv"][0] == "/opt/venv/bin/torchrun"
    assert not any((folder / "model").iterdir())


@pytest.fixture
def network() -> Iterator[Any]:
    """Give a private Docker network with a name of its own."""
    import docker

    client = docker.from_env()
    made = client.networks.create(f"trainworks-test-{uuid.uuid4().hex[:10]}", driver="bridge", internal=True)
    try:
        yield made
    finally:
        made.remove()
        client.close()


@pytest.mark.parametrize("mode", MODES)
def test_two_hosts_train_together_and_end_together(
    docker_image: BuiltByCommand, network: Any, mode: str, tmp_path: Path
) -> None:
    import docker

    hosts = ("algo-1", "algo-2")
    client = docker.from_env()
    with ExitStack() as stack:
        stack.callback(client.close)
        containers = []
        for host in hosts:
            folder = prepare(tmp_path / host, mode, processes=1, host=host, hosts=",".join(hosts))
            # As on the platform: the name resolves on the network, and the container's own hostname is another.
            container = client.containers.create(
                docker_image.reference, ["train"], volumes={str(folder): {"bind": "/opt/ml", "mode": "rw"}}
            )
            stack.callback(container.remove, force=True)
            client.networks.get("bridge").disconnect(container)
            network.connect(container, aliases=[host])
            containers.append(container)
        for container in containers:
            container.start()
        statuses = [container.wait(timeout=300)["StatusCode"] for container in containers]
        logs = [container.logs().decode(errors="replace") for container in containers]
    assert statuses == [0, 0], "\n".join(log[-3000:] for log in logs)
    assert_trained("".join(logs), 2, tmp_path / "algo-1")
    assert (tmp_path / "algo-2" / "output" / "success").exists()
    # One model, and it is the leader's: only rank 0 writes it.
    assert not any((tmp_path / "algo-2" / "model").iterdir())
