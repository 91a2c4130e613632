"""SageMaker Python SDK 3 in local mode: `ModelTrainer` starts real jobs in the real image.

With source code it replaces the image's entry point by a script and drivers of its own, so there
are two ways in: its drivers, which need programs of the image, and a command of ours, which hands
the job to the launcher.
"""

from __future__ import annotations

import io
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk.support import PIP_CHANNEL, Ended, pip_settings, run_client, source
from trainworks_launcher.command.stand_ins import NO_KEY
from trainworks_testing.clock import assert_within, start_clock

pytestmark = pytest.mark.engine


def train(
    image: str,
    folder: Path,
    program: str,
    *,
    hosts: int = 2,
    channels: dict[str, Path] | None = None,
    requirements: str = "",
    more: dict[str, str] | None = None,
    **arguments: Any,
) -> Ended:
    """Run ``ModelTrainer.train()`` on a program of ours.

    ``more`` are further settings of its ``SourceCode``.
    """
    code = source(folder, program, requirements)
    job = {
        "hosts": hosts,
        "channels": {name: str(path) for name, path in (channels or {}).items()},
        "arguments": {
            "training_image": image,
            "source_code": {"source_dir": str(code), "entry_script": program, **(more or {})},
            **arguments,
        },
    }
    return run_client("v3", job, folder / "client")


OURS = {"command": "train"}
"""The setting of ``SourceCode`` that hands the job to the launcher."""

VALUES = {
    "flag": True,
    "quotes": 'it is "so" $HOME `id`',
    "spaces": "  two words  and more ",
    "unicode": "née 日本 🙂",
}
"""In the order of their names: the SDK's drivers keep the order given, the launcher sorts."""

ARGUMENTS = [
    *("--flag", "true"),
    *("--quotes", 'it is "so" $HOME `id`'),
    *("--spaces", "  two words  and more "),
    *("--unicode", "née 日本 🙂"),
]


def test_its_driver_runs_a_plain_script(image: str, tmp_path: Path) -> None:
    result = train(image, tmp_path, "plain.py", hosts=1, hyperparameters=VALUES)
    (leader,) = result.world()
    assert leader["arguments"] == ARGUMENTS


def test_its_driver_runs_torchrun_on_two_hosts(image: str, tmp_path: Path) -> None:
    distributed = {"Torchrun": {"process_count_per_node": 2}}
    result = train(image, tmp_path, "world.py", distributed=distributed, hyperparameters=VALUES)
    assert [process["host"] for process in result.world()] == [
        "algo-1",
        "algo-1",
        "algo-2",
        "algo-2",
    ]


def test_its_driver_runs_mpi_on_one_host(image: str, tmp_path: Path) -> None:
    distributed = {"MPI": {"process_count_per_node": 2}}
    result = train(
        image, tmp_path, "world.py", hosts=1, distributed=distributed, hyperparameters=VALUES
    )
    assert [process["host"] for process in result.world()] == ["algo-1", "algo-1"]


def test_its_driver_is_ended_at_once_where_it_would_wait_for_a_key_that_no_image_should_hold(
    image: str, tmp_path: Path
) -> None:
    began = start_clock()
    result = train(image, tmp_path, "world.py", distributed={"MPI": {"process_count_per_node": 2}})
    assert_within(60, began, time.monotonic(), "left alone, the driver gives up after 300 s")
    assert result.error.endswith("Process exited with code: 143")
    assert NO_KEY.format(hosts=2) in result.output
    assert NO_KEY.format(hosts=2) in result.outputs["failure"]


@pytest.fixture
def image_with_keys(image: str) -> Iterator[str]:
    """Return an image that a user derived with the files that the SDK's driver needs: one key for
    all hosts.
    """
    import docker

    client = docker.from_env()
    tag = f"trainworks-test/keys:{uuid.uuid4().hex[:10]}"
    steps = (
        f"FROM {image}",
        "RUN ssh-keygen -A && ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519",
        "RUN cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys",
        "RUN echo StrictHostKeyChecking no > /root/.ssh/config",
    )
    client.images.build(fileobj=io.BytesIO("\n".join(steps).encode()), tag=tag, rm=True)
    try:
        yield tag
    finally:
        client.images.remove(tag, force=True)
        client.close()


def test_its_driver_runs_too_few_ranks_and_the_log_says_so(
    image_with_keys: str, tmp_path: Path
) -> None:
    result = train(
        image_with_keys, tmp_path, "world.py", distributed={"MPI": {"process_count_per_node": 2}}
    )
    assert [process["host"] for process in result.world()] == ["algo-1", "algo-1"], (
        "all on the first host"
    )
    assert "asks for 2 process(es), and the hosts have room for 4" in result.output
    assert "'ethwe' does not exist on this host; mpirun gets 'eth0'" in result.output


def test_the_client_sees_a_failing_script_and_its_status(image: str, tmp_path: Path) -> None:
    result = train(image, tmp_path, "fails.py", hosts=1)
    assert result.error.endswith("Process exited with code: 42")
    assert "cannot read /no/such/data" in result.output


def test_requirements_are_installed_before_the_script(image: str, tmp_path: Path) -> None:
    settings, variables = pip_settings(tmp_path / "pip")
    result = train(
        image,
        tmp_path,
        "requires.py",
        hosts=1,
        requirements="iniconfig==2.0.0\n",
        more={"requirements": "requirements.txt"},
        channels={PIP_CHANNEL: settings},
        environment=variables,
    )
    assert result.error == "", result.output[-4000:]
    assert list(result.model.values()) == ["2.0.0"]


@pytest.mark.parametrize("kind", ["MPI", "Torchrun"])
def test_the_launcher_starts_every_process_of_every_host(
    image: str, tmp_path: Path, kind: str
) -> None:
    distributed = {kind: {"process_count_per_node": 2}}
    result = train(
        image, tmp_path, "world.py", more=OURS, distributed=distributed, hyperparameters=VALUES
    )
    world = result.world()
    assert [process["host"] for process in world] == ["algo-1", "algo-1", "algo-2", "algo-2"]
    assert [process["arguments"] for process in world] == [ARGUMENTS] * 4
    assert "success" in result.outputs


def test_the_launcher_lets_no_host_cut_off_the_leader(image: str, tmp_path: Path) -> None:
    result = train(image, tmp_path, "plain.py", more=OURS, hyperparameters=VALUES)
    (leader,) = result.world()
    assert leader["host"] == "algo-1"
    assert leader["arguments"] == ARGUMENTS


def test_the_launcher_hands_the_client_the_scripts_status_and_the_cause(
    image: str, tmp_path: Path
) -> None:
    result = train(image, tmp_path, "fails.py", more=OURS)
    assert result.error.endswith("Process exited with code: 42")
    assert "/no/such/data" in result.outputs["failure"]
    assert "algo-2" in result.outputs["failure"]


def test_without_source_code_the_images_own_entry_point_reads_the_older_hyperparameters(
    image: str, tmp_path: Path
) -> None:
    """The client mounts a ``file://`` submit directory as /opt/ml/code."""
    hyperparameters = {
        "sagemaker_program": "world.py",
        "sagemaker_submit_directory": source(tmp_path, "world.py").as_uri(),
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 2,
    }
    job = {
        "hosts": 2,
        "channels": {},
        "arguments": {"training_image": image, "hyperparameters": hyperparameters},
    }
    result = run_client("v3", job, tmp_path / "client")
    assert [process["host"] for process in result.world()] == [
        "algo-1",
        "algo-1",
        "algo-2",
        "algo-2",
    ]
