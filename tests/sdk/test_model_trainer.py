"""SageMaker Python SDK 3 in local mode: `ModelTrainer` starts real jobs in the real image.

With source code it replaces the image's entry point by a script and drivers of its own, so there are two ways in:
its drivers, which need programs of the image, and a command of ours, which hands the job to the launcher.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdk.support import PIP_CHANNEL, Ended, pip_settings, run_client, source

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
    """Run ``ModelTrainer.train()`` on a program of ours; ``more`` are further settings of its ``SourceCode``."""
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


VALUES = {"spaces": "  two words  and more ", "quotes": 'it is "so" $HOME `id`', "unicode": "née 日本 🙂", "flag": True}

DRIVER_ARGUMENTS = [
    *("--spaces", "  two words  and more "),
    *("--quotes", 'it is "so" $HOME `id`'),
    *("--unicode", "née 日本 🙂"),
    *("--flag", "true"),
]


def test_its_driver_runs_a_plain_script(image: str, tmp_path: Path) -> None:
    ended = train(image, tmp_path, "plain.py", hosts=1, hyperparameters=VALUES)
    (leader,) = ended.world()
    assert leader["arguments"] == DRIVER_ARGUMENTS


def test_its_driver_runs_torchrun_on_two_hosts(image: str, tmp_path: Path) -> None:
    distributed = {"Torchrun": {"process_count_per_node": 2}}
    ended = train(image, tmp_path, "world.py", distributed=distributed, hyperparameters=VALUES)
    assert [process["host"] for process in ended.world()] == ["algo-1", "algo-1", "algo-2", "algo-2"]


def test_the_client_sees_a_failing_script_and_its_status(image: str, tmp_path: Path) -> None:
    ended = train(image, tmp_path, "fails.py", hosts=1)
    assert ended.error.endswith("Process exited with code: 42")
    assert "cannot read /no/such/data" in ended.output


def test_requirements_are_installed_before_the_script(image: str, tmp_path: Path) -> None:
    settings, variables = pip_settings(tmp_path / "pip")
    ended = train(
        image,
        tmp_path,
        "requires.py",
        hosts=1,
        requirements="iniconfig==2.0.0\n",
        more={"requirements": "requirements.txt"},
        channels={PIP_CHANNEL: settings},
        environment=variables,
    )
    assert ended.error == "", ended.output[-4000:]
    assert list(ended.model.values()) == ["2.0.0"]
