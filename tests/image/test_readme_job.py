"""Test the examples, and the first jobs of README.md, docs/jobs.md and docs/extend.md, as these
pages run them; the failed job of the README prints the text that the page shows.

All are in one file, which one process runs: their containers have fixed names.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from documentation.blocks import Block
from image.support import ROOT, BuiltByCommand

pytestmark = pytest.mark.engine


def run(command: tuple[str, ...], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=600
    )
    return done.stdout


def test_the_failed_job_of_the_readme(
    docker_image: BuiltByCommand, page_blocks: list[Block], tmp_path: Path
) -> None:
    (block,) = page_blocks
    folder = tmp_path / "failing"
    shutil.copytree(ROOT / "examples" / "failing", folder)
    try:
        run(("sh", "two-hosts.sh", docker_image.reference), folder)
        seen = ""
        for command in re.findall(r"^\$ (.*)$", block.text, re.MULTILINE):
            seen += f"$ {command}\n{run(('bash', '-c', command), folder)}"
    finally:
        subprocess.run(
            ("docker", "rm", "--force", "node-1", "node-2"), check=False, capture_output=True
        )
        subprocess.run(("docker", "network", "rm", "failing"), check=False, capture_output=True)
    assert seen == block.text


TRAIN = """
import argparse, os, torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
torch.distributed.init_process_group("gloo")
ranks = torch.ones(1)
torch.distributed.all_reduce(ranks)
print(f"{int(ranks)} ranks, lr {parser.parse_args().lr}", flush=True)
torch.distributed.destroy_process_group()
"""
"""A script of a user's own, as the pages have it: it takes `--lr`."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Give a folder with `my-project/train.py`, the examples and a `build.py`, as in a clone."""
    (tmp_path / "my-project").mkdir()
    (tmp_path / "my-project" / "train.py").write_text(TRAIN, encoding="utf-8")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name in ("build.py", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    """Return the variables of a shell in which `python` is the one that has the builder."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


def played(block: str, folder: Path) -> str:
    """Run a block in a shell, and return all that it prints."""
    done = subprocess.run(
        ("bash", "-euc", block),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def owners_of_results(project: Path) -> set[str]:
    """Return the owners of all that jobs have written into the folder of the script."""
    new_files = [path for path in (project / "my-project").rglob("*") if path.name != "train.py"]
    return {path.owner() for path in new_files}


@pytest.mark.usefixtures("docker_image")
def test_the_first_jobs_of_the_readme(page_blocks: list[Block], project: Path) -> None:
    """Run both blocks, on the image of these tests; the second one as the text says for no GPUs."""
    digits, own = page_blocks
    first_job = digits.adapted(folder=project / "digits")
    printed = played(f"{first_job}cd my-project\n{own.adapted()}", project)
    assert "\nmodel.pt\n" in printed
    assert printed.count("2 ranks, lr 0.1\n") == 2
    assert owners_of_results(project) <= {project.owner()}


@pytest.mark.usefixtures("docker_image")
def test_the_first_jobs_of_the_page_on_jobs(page_blocks: list[Block], project: Path) -> None:
    """One container, then two, in one shell: the second block goes on where the first one ends."""
    one, two = page_blocks
    try:
        printed = played(one.text + two.text, project)
    finally:
        subprocess.run(
            ("docker", "rm", "--force", "node-1", "node-2"), check=False, capture_output=True
        )
        subprocess.run(("docker", "network", "rm", "two"), check=False, capture_output=True)
    assert printed.count("2 ranks, lr 0.1\n") == 3, "both of one container, and one of two"
    assert printed.endswith("\n0\n0\nnode-1\nnode-2\ntwo\n")
    assert owners_of_results(project) <= {project.owner()}


@pytest.mark.usefixtures("docker_image")
def test_the_first_extension_of_the_page_on_extend(page_blocks: list[Block], project: Path) -> None:
    (block,) = page_blocks
    tag = f"trainworks-test/page:{uuid.uuid4().hex[:12]}"
    shutil.rmtree(project / "my-project")
    try:
        printed = played(block.adapted(tag=tag), project)
    finally:
        subprocess.run(("docker", "rmi", "--force", tag), check=False, capture_output=True)
    assert "trained with einops 0." in printed


EXAMPLES = ("fsdp2", "deepspeed", "trainer-peft", "lightning", "smp", "ray")
LOSS = re.compile(r"\bloss'?:? '?([0-9.]+)")


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """Give a copy of the examples beside a `build.py`, as in a clone: jobs write into it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "build.py").symlink_to(ROOT / "build.py")
    return tmp_path / "examples"


@pytest.mark.usefixtures("docker_image")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_and_goes_on_as_its_page_says(examples: Path, name: str) -> None:
    """Every block of the page, one after the other: one host, then two hosts
    from the last checkpoint.
    """
    page = (examples / name / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    printed = played("\n".join(blocks), examples / name)
    losses = [float(loss) for loss in LOSS.findall(printed)]
    assert len(losses) > 4
    assert losses[-1] < losses[0] / 4
    assert "continues" in printed
    assert "exit status of node-1 and node-2: 0 0" in printed


def rank_in(container: str) -> int:
    """Return the process of the script in a container, as this machine numbers it."""
    listed = run(("docker", "top", container, "-eo", "pid,args"), ROOT)
    (fields,) = [
        words for words in map(str.split, listed.splitlines()) if words[2:3] == ["train.py"]
    ]
    return int(fields[0])


def test_an_example_goes_on_after_the_death_of_a_rank(
    docker_image: BuiltByCommand, examples: Path
) -> None:
    """A rank of the second host is killed after the first checkpoint: torchrun
    starts all ranks again from there.
    """
    words = (
        "train",
        "--mode",
        "torch_distributed",
        "--processes-per-host",
        "1",
        "--",
        "train.py",
        "--steps",
        "200",
    )
    watching = ("docker", "events", "--filter", "container=node-2", "--filter", "event=start")
    with subprocess.Popen(watching, stdout=subprocess.PIPE, text=True) as events:
        job = subprocess.Popen(
            ("sh", "../two-hosts.sh", docker_image.reference, *words),
            cwd=examples / "fsdp2",
            env=environment(DOCKER_OPTIONS="--env TRAINWORKS_MAX_RESTARTS=3"),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert events.stdout is not None
        assert events.stdout.readline()
        events.kill()
    with subprocess.Popen(
        ("docker", "logs", "--follow", "node-1"), stdout=subprocess.PIPE, text=True
    ) as log:
        assert log.stdout is not None
        assert any("step 30 loss" in line for line in log.stdout)
        os.kill(rank_in("node-2"), signal.SIGKILL)
        log.kill()
    output, _ = job.communicate()
    assert job.returncode == 0, output[-4000:]
    assert re.search(r"continues with step \d+, from /src/checkpoints/step-\d+", output)
    assert "step 200 loss" in output
