"""Images for arm64: built, tested, trained in.

By hand: `make arm64`; on another machine it is emulated, slowly.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from image.jobs import assert_trained, prepare
from image.support import ROOT, BuiltByCommand, build_command, engine_that_answers
from trainworks.engine.protocol import Job, Mount

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        "TRAINWORKS_ARM64" not in os.environ, reason="NOT TESTED: by hand only, with `make arm64`"
    ),
]


@pytest.fixture(
    scope="module",
    params=[("docker", "cpu"), ("docker", "cu130"), ("docker", "cu132"), ("buildah", "cpu")],
    ids="-".join,
)
def image(request: pytest.FixtureRequest) -> BuiltByCommand:
    """Give the image, as an engine built it."""
    name, cuda = request.param
    engine = engine_that_answers(name)
    more = () if cuda == "cpu" else ("--mirror", str(request.getfixturevalue("mirror")))
    command = build_command(name, "--architecture", "arm64", *more, cuda=cuda)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=7200)
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-4000:]
    report = json.loads(done.stdout)
    return BuiltByCommand(
        engine=engine, root=ROOT, reference=report["tags"][0], report=report, progress=done.stderr
    )


def test_every_promise_is_kept(image: BuiltByCommand) -> None:
    checks = image.report["checks"]
    assert len(checks) > 100
    assert [check["title"] for check in checks if not check["passed"]] == []


def test_its_programs_are_for_arm64(image: BuiltByCommand) -> None:
    script = "import platform, torch; print(platform.machine(), torch.ones(2).sum().item())"
    done = image.engine.run(image.reference, Job(command=("python", "-c", script), timeout=600))
    # PyTorch's lines about the emulated processor come first.
    assert (done.status, done.output.splitlines()[-1]) == (0, "aarch64 2.0"), done.output


@pytest.mark.parametrize("mode", ["torch_distributed", "mpi"])
def test_two_ranks_train(image: BuiltByCommand, mode: str, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "ml", mode)
    mounts = (Mount(source=folder, target="/opt/ml"),)
    done = image.engine.run(image.reference, Job(command=("train",), mounts=mounts, timeout=1800))
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 2, folder)
