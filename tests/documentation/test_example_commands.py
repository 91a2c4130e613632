"""The lines of examples/README.md for clusters: the launcher plans those of Slurm and Kubernetes,
and preflight takes those of SageMaker. Nothing is started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from documentation.blocks import ROOT, block_of

PAGE = "examples/README.md"
MODES = {"torchrun": "torch_distributed", "smp": "smdistributed.modelparallel", "ray": "ray"}
"""Mode of each line, in the order of each block."""

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node-[1-2]",
    "SLURM_JOB_NODELIST": "node-[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
"""Variables that Slurm sets on the first of two nodes."""

SRUN = f"""#!/bin/sh
while [ "$1" != train ]; do shift; done
shift
exec {sys.executable} -m trainworks_launcher --plan "$@"
"""
"""A stand-in for srun: it plans the words behind `train`."""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Give the environment of a container with a `train.py`, torchrun, mpirun and ray.

    A plan only looks whether these programs are there.
    """
    (tmp_path / "train.py").touch()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"torchrun": "", "ray": "", "mpirun": "", "srun": SRUN}.items():
        (programs / name).write_text(text or "#!/bin/sh\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(ROOT / "launcher")}


def run(command: tuple[str, ...], folder: Path, environment: dict[str, str]) -> str:
    """Run a command, and return its output."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_lines_for_slurm_are_planned(tmp_path: Path, variables: dict[str, str]) -> None:
    block = block_of(PAGE, "srun")
    printed = run(("bash", "-euc", block), tmp_path, {**SLURM, **variables})
    plans = [json.loads(f"{{{text}") for text in printed.split("\n{")[1:]]
    plans.insert(0, json.loads(printed.split("\n{")[0]))
    assert [plan["mode"] for plan in plans] == list(MODES.values())
    assert {plan["platform"] for plan in plans} == {"slurm"}


def test_the_commands_for_kubernetes_are_planned(tmp_path: Path, variables: dict[str, str]) -> None:
    modes = []
    hosts = {"TRAINWORKS_HOSTS": "job-[0-1].service", "TRAINWORKS_HOST": "job-0.service"}
    for container in yaml.safe_load_all(block_of(PAGE, "command:")):
        own = {item["name"]: item["value"] for item in container.get("env", [])}
        launcher = (sys.executable, "-m", "trainworks_launcher", "--plan")
        command = (*launcher, *container["command"][1:])
        plan = json.loads(run(command, tmp_path, {**variables, **hosts, **own}))
        modes.append(plan["mode"])
    assert modes == list(MODES.values())


@pytest.mark.parametrize("name", MODES)
def test_preflight_takes_the_settings_for_sagemaker(
    name: str, tmp_path: Path, variables: dict[str, str]
) -> None:
    settings: dict[str, Any] = {}
    exec(block_of(PAGE, "sagemaker_ray_enabled"), settings)  # noqa: S102 - the page's own lines
    command = [sys.executable, "-m", "trainworks_preflight", "--entry-point", "train.py"]
    command += ["--instance-type", "ml.p4d.24xlarge", "--instance-count", "2"]
    for option, value in settings[name].items():
        (tmp_path / option).write_text(json.dumps(value), encoding="utf-8")
        command += [f"--{option}", option]
    printed = run(tuple(command), tmp_path, variables)
    assert printed.startswith(f"mode {MODES[name]}, host algo-1 (1 of 2)")
    assert "ready: the job would start" in printed
