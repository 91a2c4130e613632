"""Test the examples, and the first jobs of README.md, docs/jobs.md and docs/extend.md, as these
pages run them; the failed job of the README prints the text that the page shows.

All are in one file, which one process runs: their containers have fixed names.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
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


def blocks_of_example(examples: Path, name: str) -> list[str]:
    """Return the blocks of an example's page: its image, one host, two hosts."""
    page = (examples / name / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


@pytest.mark.usefixtures("docker_image")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns_and_goes_on_as_its_page_says(examples: Path, name: str) -> None:
    """Every block of the page, one after the other: one host, then two hosts
    from the last checkpoint.
    """
    blocks = blocks_of_example(examples, name)
    assert len(blocks) == 3
    printed = played("\n".join(blocks), examples / name)
    losses = [float(loss) for loss in LOSS.findall(printed)]
    assert len(losses) > 4
    assert losses[-1] < losses[0] / 4
    assert "continues" in printed
    assert "exit status of node-1 and node-2: 0 0" in printed


@dataclass(frozen=True)
class Death:
    """How a rank of an example is killed.

    Attributes:
        losses: How many losses are printed before: by then there is a checkpoint.
        steps: Of the job: so many that it does not end before the rank is killed.
        rank: Expression for the command line of a rank.
    """

    losses: int
    steps: int = 200
    rank: str = r"\S*python\S* (-m mpi4py )?train\.py\b"


DEATHS = {
    "fsdp2": Death(losses=3),
    "deepspeed": Death(losses=3),
    "trainer-peft": Death(losses=3),
    "lightning": Death(losses=4, steps=1000),
    "smp": Death(losses=5, steps=1000),
    # Ray prints a loss twice, and again in its report of each worker, and it records a checkpoint
    # some reports later. It names its processes, and chooses the hosts of its workers.
    "ray": Death(losses=30, steps=400, rank=r"ray::\w*TrainWorker"),
}


def ranks_in(container: str, command_line: str) -> list[int]:
    """Return the ranks in a container, as this machine numbers their processes."""
    listed = run(("docker", "top", container, "-eo", "pid,args"), ROOT)
    rows = [row.split(maxsplit=1) for row in listed.splitlines()]
    return [int(number) for number, arguments in rows if re.match(command_line, arguments)]


def wait_for_start(job: subprocess.Popen[str], container: str, since: float) -> None:
    """Wait until the job has started a container; fail if the job ends before.

    Args:
        job: The process that starts the container.
        container: The name of the container.
        since: A moment before the job, in seconds since 1970.
    """
    filters = ("--filter", f"container={container}", "--filter", "event=start")
    watching = ("docker", "events", "--since", f"{since:.3f}", *filters)
    with subprocess.Popen(watching, stdout=subprocess.PIPE, text=True) as events:

        def end_with_the_job() -> None:
            job.wait()
            events.kill()

        threading.Thread(target=end_with_the_job, daemon=True).start()
        assert events.stdout is not None
        assert events.stdout.readline(), job.communicate()[0]
        events.kill()


def kill_a_rank(death: Death) -> None:
    """Kill a rank when the job has printed its losses: on the second host if it has one."""
    following = ("docker", "logs", "--follow", "node-1")
    with subprocess.Popen(
        following, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as log:
        assert log.stdout is not None
        lines_with_loss = filter(LOSS.search, log.stdout)
        first_lines = list(itertools.islice(lines_with_loss, death.losses))
        assert len(first_lines) == death.losses, first_lines
        victim, *_ = ranks_in("node-2", death.rank) or ranks_in("node-1", death.rank)
        os.kill(victim, signal.SIGKILL)
        log.kill()


@pytest.mark.usefixtures("docker_image")
@pytest.mark.parametrize("name", DEATHS)
def test_an_example_goes_on_after_the_death_of_a_rank(examples: Path, name: str) -> None:
    """Kill a rank of the job on two hosts after its first checkpoint. All ranks start again from
    there, as the page says of ``--max-restarts``.
    """
    death = DEATHS[name]
    image_block, _, two_hosts = blocks_of_example(examples, name)
    image = played(f'{image_block}echo "$image"', examples / name).splitlines()[-1]
    job_lines = two_hosts.replace(" train ", " train --max-restarts 3 ")
    job_lines = re.sub(r"--steps \d+", f"--steps {death.steps}", job_lines)
    begin = time.time()
    job = subprocess.Popen(
        ("bash", "-euc", job_lines),
        cwd=examples / name,
        env=environment(image=image),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for_start(job, "node-2", begin)
        kill_a_rank(death)
        output, _ = job.communicate()
    finally:
        # Without them the job ends, and removes its network.
        names = ("node-1", "node-2")
        subprocess.run(("docker", "rm", "--force", *names), check=False, capture_output=True)
        job.wait()
    assert job.returncode == 0, output[-4000:]
    # The script says it; the launcher's own lines are about the job.
    _, *rest = re.split(r"^(?!trainworks: ).*\bcontinues ", output, maxsplit=1, flags=re.MULTILINE)
    assert rest, output[-4000:]
    losses = [float(loss) for loss in LOSS.findall(rest[0])]
    assert losses[-1] < losses[0], rest[0][-4000:]
