"""SageMaker Python SDK 2 in local mode: `Estimator` and the `PyTorch` estimator
start real jobs in the real image.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk.support import (
    BUCKET,
    PEERS,
    PIP_CHANNEL,
    Ended,
    host_address,
    pip_settings,
    run_client,
    source,
)

pytestmark = pytest.mark.engine


@pytest.fixture
def store(image: str) -> Iterator[str]:
    """Give the address of a real S3 server with an empty bucket, where containers reach it."""
    programs = PEERS / "s3" / "bin"
    assert programs.is_dir(), f"{programs} is missing; make peers makes it"
    host = host_address(image)
    with socket.create_server((host, 0)) as probe:
        port = str(probe.getsockname()[1])
    words = (str(programs / "moto_server"), "-H", host, "-p", port)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            assert any(b"Running on" in line for line in process.stderr), (
                "the S3 server did not start"
            )
            address = f"http://{host}:{port}"
            make = (
                "import boto3; boto3.client('s3',"
                f" endpoint_url={address!r}).create_bucket(Bucket={BUCKET!r})"
            )
            keys = {
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            environment = {**keys, "NO_PROXY": host, "PATH": os.defpath}
            subprocess.run(
                (str(programs / "python"), "-c", make), env=environment, check=True, timeout=300
            )
            yield address
        finally:
            process.kill()


def test_code_through_s3(image: str, tmp_path: Path, store: str) -> None:
    """The client uploads the code, every host fetches it for itself."""
    result = fit(
        image,
        tmp_path,
        "plain.py",
        store=store,
        distribution={"torch_distributed": {"enabled": True}},
    )
    assert result.error == "", result.output[-6000:]
    assert result.output.count(f"fetching s3://{BUCKET}/") == 2
    # Compose stops the other host when one has ended, even before the last lines of that one.
    assert "job succeeded on every host" in result.output


def fit(
    image: str,
    folder: Path,
    program: str,
    *,
    store: str = "",
    hosts: int = 2,
    channels: dict[str, Path] | None = None,
    requirements: str = "",
    estimator: str = "PyTorch",
    **arguments: Any,
) -> Ended:
    """Run ``estimator.fit()`` on a program of ours."""
    code = source(folder, program, requirements)
    job = {
        "estimator": estimator,
        "channels": {name: path.as_uri() for name, path in (channels or {}).items()},
        "arguments": {
            "image_uri": image,
            "instance_count": hosts,
            "entry_point": program,
            "source_dir": str(code),
            **arguments,
        },
    }
    return run_client("v2", job, folder / "client", store)


VALUES = {
    "quotes": 'it is "so", isn\'t it? $HOME `id` \\ end',
    "spaces": "  two words  and more ",
    "unicode": "née 日本 🙂",
    "flag": True,
    "count": 3,
    "rate": 1e-5,
    "empty": "",
}

ARGUMENTS = [
    *("--count", "3"),
    *("--empty", ""),
    *("--flag", "True"),
    *("--quotes", 'it is "so", isn\'t it? $HOME `id` \\ end'),
    *("--rate", "1e-05"),
    *("--spaces", "  two words  and more "),
    *("--unicode", "née 日本 🙂"),
]


def test_a_plain_script_gets_its_values_as_they_are_and_the_leader_writes_the_model(
    image: str, tmp_path: Path
) -> None:
    result = fit(image, tmp_path, "plain.py", hyperparameters=VALUES)
    (leader,) = result.world()
    assert leader["host"].startswith("algo-1-")
    assert leader["arguments"] == ARGUMENTS
    assert "grüße, 日本" in result.output
    assert "success" in result.outputs
    assert "failure" not in result.outputs


DOCUMENTED = "--mca btl_vader_single_copy_mechanism none -x GREETING='two words'"
"""The option that AWS's guides for smdistributed add, and which ends the job under
sagemaker-training; and another.
"""


def test_two_hosts_with_two_processes_are_one_world_of_four(image: str, tmp_path: Path) -> None:
    distribution = {
        "mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": DOCUMENTED}
    }
    result = fit(image, tmp_path, "world.py", distribution=distribution, hyperparameters=VALUES)
    assert_world_of_four(result, ARGUMENTS, greeting="two words")


def test_model_parallel_jobs_start_with_the_library_of_the_image(
    image: str, tmp_path: Path
) -> None:
    distribution = {
        "smdistributed": {
            "modelparallel": {"enabled": True, "parameters": {"partitions": 2, "ddp": True}}
        },
        "mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": DOCUMENTED},
    }
    result = fit(image, tmp_path, "world.py", distribution=distribution)
    assert_world_of_four(result, ["--mp_parameters", "ddp=True,partitions=2"], greeting="two words")
    assert "the image has no smp" not in result.output


def assert_world_of_four(result: Ended, arguments: list[str], greeting: str = "") -> None:
    """Assert that four processes met, two on each host, leader first, each with
    these arguments and this variable.
    """
    world = result.world()
    hosts = [process["host"] for process in world]
    assert [host.rpartition("-")[0] for host in hosts] == [
        "algo-1",
        "algo-1",
        "algo-2",
        "algo-2",
    ], result.output[-3000:]
    assert [process["arguments"] for process in world] == [arguments] * 4
    assert [process["greeting"] for process in world] == [greeting] * 4
    for rank, host in enumerate(hosts):
        assert f"rank {rank} of 4 on {host}" in result.output


@pytest.mark.parametrize(
    "distribution",
    [
        pytest.param(
            {
                "smdistributed": {
                    "dataparallel": {"enabled": True, "custom_mpi_options": DOCUMENTED}
                }
            },
            id="dataparallel with the documented option",
        ),
        pytest.param({"pytorchddp": {"enabled": True}}, id="pytorchddp"),
    ],
)
def test_data_parallel_jobs_start_one_process_per_host_without_gpus_with_the_library_of_the_image(
    image: str, tmp_path: Path, distribution: dict[str, Any]
) -> None:
    result = fit(image, tmp_path, "world.py", distribution=distribution, hyperparameters=VALUES)
    assert [process["host"][:6] for process in result.world()] == ["algo-1", "algo-2"]
    assert not re.search("warning: .*smddp", result.output)


def test_torch_distributed_starts_torchrun_on_every_host(image: str, tmp_path: Path) -> None:
    """The client has no word for processes per host here; without GPUs the launcher starts one."""
    distribution = {"torch_distributed": {"enabled": True}}
    result = fit(image, tmp_path, "world.py", distribution=distribution, hyperparameters=VALUES)
    assert [process["host"][:6] for process in result.world()] == ["algo-1", "algo-2"]


def test_what_the_generic_estimator_drops_can_be_said_as_hyperparameters(
    image: str, tmp_path: Path
) -> None:
    """`Estimator` accepts `distribution` and sends nothing of it: docs/jobs.md."""
    hyperparameters = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
    result = fit(
        image,
        tmp_path,
        "world.py",
        estimator="Estimator",
        hyperparameters={**VALUES, **hyperparameters},
    )
    assert_world_of_four(result, ARGUMENTS)


def test_the_client_sees_a_failing_script_and_its_status(image: str, tmp_path: Path) -> None:
    result = fit(image, tmp_path, "fails.py")
    assert result.error.startswith("RuntimeError: ")
    assert result.error.endswith("Process exited with code: 42")
    assert "cannot read /no/such/data" in result.output
    assert "/no/such/data" in result.outputs["failure"]
    assert "algo-2" in result.outputs["failure"]
    assert "success" not in result.outputs


def test_requirements_are_installed_on_every_host_before_the_script(
    image: str, tmp_path: Path
) -> None:
    settings, variables = pip_settings(tmp_path / "pip")
    result = fit(
        image,
        tmp_path,
        "requires.py",
        requirements="iniconfig==2.0.0\n",
        channels={PIP_CHANNEL: settings},
        environment=variables,
    )
    assert result.error == "", result.output[-4000:]
    assert sorted(result.model.values()) == ["2.0.0", "2.0.0"]
