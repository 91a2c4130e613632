"""The request of docs/platforms/sagemaker.md is one that AWS's command line
sends, and starts the job that it says.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.session import Session
from botocore.validate import ParamValidator

from documentation.blocks import Block
from trainworks_launcher.environment.environment import Devices
from trainworks_testing.launcher_environments import environment, plan


@pytest.fixture
def request_of_the_page(page_blocks: list[Block]) -> dict[str, Any]:
    """Give the JSON block of the page."""
    (block,) = page_blocks
    request: dict[str, Any] = json.loads(block.text)
    return request


def problems_of(request: dict[str, Any]) -> str:
    """Return the problems that AWS's own model of CreateTrainingJob finds."""
    model = Session().get_service_model("sagemaker").operation_model("CreateTrainingJob")
    report: str = ParamValidator().validate(request, model.input_shape).generate_report()
    return report


def test_awss_model_takes_the_request(request_of_the_page: dict[str, Any]) -> None:
    assert problems_of(request_of_the_page) == ""
    wrong = {**request_of_the_page, "ResourceConfig": {"InstanceCount": "2"}}
    assert "InstanceCount" in problems_of(wrong)


def test_its_hyperparameters_start_torchrun_on_both_hosts(
    request_of_the_page: dict[str, Any],
) -> None:
    sent = request_of_the_page["HyperParameters"]
    sent.pop("sagemaker_submit_directory")  # the archive at S3: the code is taken to be there
    count = request_of_the_page["ResourceConfig"]["InstanceCount"]
    hosts = [f"algo-{number}" for number in range(1, count + 1)]
    devices = Devices(gpus=8, cpus=8, interfaces=("eth0", "lo"))
    node_plan = plan(environment(sent, hosts=hosts, devices=devices))
    assert (node_plan.mode, node_plan.host) == ("torch_distributed", "algo-1")
    assert "--nnodes=2" in node_plan.argv
    assert node_plan.argv[-3:] == ("train.py", "--epochs", "3")
