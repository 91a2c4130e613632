"""Jobs on a real Slurm cluster of two nodes: torchrun, mpirun, one task per rank, a failure, the
page's batch script.

Marked ``engine``. Needs Debian's slurmctld, slurmd, slurm-client and munge, which
``tools/set-up-peers`` installs, and the programs of test_launcher_engine.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_network import PREFIX, engine_manifest, need
from launcher_slurm import Slurm, slurm_of
from launcher_support import GLOO_ENDS, LAUNCHER, REPOSITORY

from trainworks_launcher.environment.platforms.common import expand_nodes
from trainworks_testing.clock import assert_within

pytestmark = pytest.mark.engine

TRAIN = (sys.executable, "-IS", str(LAUNCHER / "trainworks_launcher" / "__main__.py"))
ONE_PER_NODE = ("--nodes=2", "--ntasks-per-node=1", "--overcommit")
TORCH = (
    GLOO_ENDS
    + """
import os, sys, torch
from torch import nn
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
steps = torch.optim.SGD(model.parameters(), lr=float(sys.argv[sys.argv.index("--lr") + 1]))
for _ in range(20):
    inputs = torch.randn(16, 4)
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    steps.zero_grad()
    loss.backward()
    steps.step()
weights = [torch.zeros(1, 4) for _ in range(world)]
dist.all_gather(weights, model.module.weight.data)
same = all(torch.equal(weights[0], other) for other in weights)
node = os.environ["SLURMD_NODENAME"]
print("trained rank", rank, "of", world, "on", node, "equal", same, "loss", float(loss) < 3.0)
dist.destroy_process_group()
"""
)
MPI = """
import os
from mpi4py import MPI

world = MPI.COMM_WORLD
total, node = world.allreduce(world.rank), os.environ["SLURMD_NODENAME"]
print("rank", world.rank, "of", world.size, "sum", total, "node", node)
"""
FAILS = """
import os, sys, time
if os.environ["SM_CURRENT_HOST"] == "algo-2" and os.environ.get("LOCAL_RANK", "0") == "0":
    open("left", "w").write(str(time.time()))
    print("the disk is on fire", file=sys.stderr)
    sys.exit(42)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    need("mpirun", "torchrun", "python")
    with slurm_of(2, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, str]:
    return {
        "TRAINWORKS_IMAGE_MANIFEST": str(engine_manifest(tmp_path)),
        # The folder is both nodes', as a home directory is: results go where the job was started.
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }


def srun(
    slurm: Slurm, tmp_path: Path, variables: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    return slurm.run("srun", f"--chdir={tmp_path}", *words, variables=variables)


@pytest.mark.parametrize(
    "listed",
    ["one", "fn[1-12]", "gpu[08-10,020]", "a,b[2,4],c", "r[1-2]n[0-1]", "g[009-011]-ib[0-1],h7"],
)
def test_node_lists_are_read_as_slurm_reads_them(slurm: Slurm, listed: str) -> None:
    assert slurm.run("scontrol", "show", "hostnames", listed).stdout.split() == list(
        expand_nodes(listed)
    )


def test_torchrun_trains_on_two_nodes(
    slurm: Slurm, tmp_path: Path, manifest: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(TORCH)
    words = (
        "--mode",
        "torch_distributed",
        "--processes-per-host",
        "2",
        "--",
        "train.py",
        "--lr",
        "0.05",
    )
    result = srun(slurm, tmp_path, manifest, *ONE_PER_NODE, *TRAIN, *words)
    assert result.returncode == 0, result.stdout
    for rank in range(4):
        node = f"algo-{1 + rank // 2}"
        line = f"[{node} rank {rank}] trained rank {rank} of 4 on {node} equal True loss True\n"
        assert line in result.stdout, result.stdout


def test_mpirun_trains_on_two_nodes(slurm: Slurm, tmp_path: Path, manifest: dict[str, str]) -> None:
    """mpirun must not take Slurm's variables for its own: it would start its daemons by srun."""
    (tmp_path / "train.py").write_text(MPI)
    words = ("--mode", "mpi", "--processes-per-host", "2", "--", "train.py")
    result = srun(slurm, tmp_path, manifest, *ONE_PER_NODE, *TRAIN, *words)
    assert result.returncode == 0, result.stdout
    for rank in range(4):
        node = f"algo-{1 + rank // 2}"
        assert f"[{node} rank {rank}] rank {rank} of 4 sum 6 node {node}\n" in result.stdout, (
            result.stdout
        )


def test_each_task_trains_as_one_rank(
    slurm: Slurm, tmp_path: Path, manifest: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(TORCH)
    words = ("--nodes=2", "--ntasks-per-node=2")
    result = srun(slurm, tmp_path, manifest, *words, *TRAIN, "--", "train.py", "--lr", "0.05")
    assert result.returncode == 0, result.stdout
    for rank in range(4):
        node = f"algo-{1 + rank // 2}"
        line = f"[{node} rank {rank}] trained rank {rank} of 4 on {node} equal True loss True\n"
        assert line in result.stdout, result.stdout


@pytest.mark.parametrize(
    ("per_node", "mode"), [(1, "none"), (1, "torch_distributed"), (1, "mpi"), (2, "none")], ids=str
)
def test_status_and_cause_of_a_failed_task_end_the_step_on_both_nodes(
    slurm: Slurm, tmp_path: Path, manifest: dict[str, str], per_node: int, mode: str
) -> None:
    """srun by itself reports 143 for this, or waits for the tasks that are left."""
    (tmp_path / "train.py").write_text(FAILS)
    words = ("--nodes=2", f"--ntasks-per-node={per_node}", "--label")
    result = srun(slurm, tmp_path, manifest, *words, *TRAIN, "--mode", mode, "--", "train.py")
    seconds, now = time.time() - float((tmp_path / "left").read_text()), time.monotonic()
    assert result.returncode == 42, result.stdout
    # A status of the script's own says nothing of its last words: they are shown in the text.
    matches = re.findall(
        r"^(\d+): .*job failed \(exit status 42, host algo-2\): .*exit status 42$",
        result.stdout,
        re.MULTILINE,
    )
    assert sorted(matches) == [str(task) for task in range(2 * per_node)], result.stdout
    assert "the disk is on fire" in (tmp_path / "output/failure").read_text()
    print(f"from the exit to the end of srun: {seconds:.2f} s")
    assert_within(5, now - seconds, now, result.stdout)


@pytest.mark.parametrize("signal", [(), ("--signal=TERM",)], ids=["cancel", "signal"])
def test_a_cancelled_job_stops_every_rank(
    slurm: Slurm, tmp_path: Path, manifest: dict[str, str], signal: tuple[str, ...]
) -> None:
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved', flush=True)))\n"
    )
    script += "print('waits', flush=True)\nwhile True: signal.pause()\n"
    (tmp_path / "train.py").write_text(script)
    env = {**os.environ, "SLURM_CONF": str(slurm.folder / "slurm.conf"), **manifest}
    words = (
        "srun",
        f"--chdir={tmp_path}",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--job-name=stops",
        *TRAIN,
        "--",
        "train.py",
    )
    inside = slurm.network.inside(slurm.network.hosts[0], *words)
    with subprocess.Popen(
        inside, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        text = ""
        while text.count("waits") < 2:
            line = process.stdout.readline()
            assert line, text
            text += line
        slurm.run("scancel", *signal, "--name=stops")
        text += process.stdout.read()
    assert text.count("saved") == 2, text
    assert "job stopped" in text


def test_a_batch_script_without_srun_is_refused(
    slurm: Slurm, tmp_path: Path, manifest: dict[str, str]
) -> None:
    """The script runs on the first node only: as one host of a job of two it would train alone, and
    end with 0.
    """
    (tmp_path / "train.py").write_text("print('trained alone')")
    batch = tmp_path / "batch.sh"
    batch.write_text(f"#!/bin/sh\nexec {' '.join(TRAIN)} -- train.py\n")
    status, text = slurm.batch(batch, "--nodes=2", f"--chdir={tmp_path}", variables=manifest)
    assert status == 64, text
    assert "SLURM_STEP_NODELIST" in text
    assert "srun --ntasks-per-node=1" in text
    assert "trained alone" not in text


@pytest.fixture
def page_blocks(request: pytest.FixtureRequest) -> list[str]:
    """Give the batch scripts of docs/platforms/slurm.md whose mark, the comment in the line above,
    names the test.
    """
    page = (REPOSITORY / "docs/platforms/slurm.md").read_text(encoding="utf-8")
    test = f"launcher/tests/{Path(__file__).name}::{request.node.name}"
    mark = rf"^<!-- run by {re.escape(test)}(?:;[^\n]*)? -->\n"
    return re.findall(rf"{mark}```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def run_batch(
    slurm: Slurm, tmp_path: Path, manifest: dict[str, str], batch: str, script: str
) -> tuple[int, str]:
    """Run a batch script that starts ``train``, and this train.py."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "train").write_text(f'#!/bin/sh\nexec {" ".join(TRAIN)} "$@"\n')
    (bin_ / "train").chmod(0o755)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "job.sh").write_text(batch)
    variables = {**manifest, "PATH": f"{bin_}:{PREFIX}/bin:{os.environ['PATH']}"}
    return slurm.batch(tmp_path / "job.sh", f"--chdir={tmp_path}", variables=variables)


def test_the_batch_script_of_the_page(
    slurm: Slurm, page_blocks: list[str], tmp_path: Path, manifest: dict[str, str]
) -> None:
    """docs/platforms/slurm.md, without the options of a container, and with two
    processes on each CPU node.
    """
    (script,) = page_blocks
    batch = re.sub(r"#SBATCH --gpus\S*.*\n", "", script)
    batch = re.sub(r" *--container[^\n]*\\\n", "", batch).replace(
        "--mode", "--processes-per-host 2 --mode"
    )
    status, text = run_batch(slurm, tmp_path, manifest, batch, TORCH)
    assert status == 0, text
    assert text.count("equal True") == 4, text


def test_the_limits_of_a_task_are_those_of_slurmd(slurm: Slurm, page_blocks: list[str]) -> None:
    """The page's line gives a task what slurmd has, where the shell that calls srun has less."""
    (line,) = page_blocks
    _, limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    highest = "unlimited" if limit == resource.RLIM_INFINITY else str(limit // 1024)
    words = ("bash", "-c", f"ulimit -S -l 100; {line}")
    done = slurm.run(*words)
    assert done.stdout.splitlines().count(highest) == 2, done.stdout
    assert done.stdout.count("/dev/shm") >= 2, done.stdout
    words = ("bash", "-c", f"ulimit -S -l 100; {line.replace('--propagate=NONE', '')}")
    done = slurm.run(*words)
    assert done.stdout.splitlines().count("100") == 2, done.stdout


SIGNALLED = """
import os, pathlib, signal, subprocess, sys

def save(number, frame):
    # The other node has got the signal, too, before this one ends.
    meet("saving")
    print("saved by node", node, flush=True)
    sys.exit(3)

def meet(name):
    # A FIFO opens for both nodes when both have come.
    pathlib.Path(name).open("r" if node == "0" else "w").close()

node = os.environ["SLURM_NODEID"]
signal.signal(signal.SIGUSR1, save)
meet("ready")
if node == "1":
    # What Slurm does before the time limit, by --signal=B:USR1.
    words = ["scancel", "--batch", "--signal=USR1", os.environ["SLURM_JOB_ID"]]
    subprocess.run(words, check=True)
while True:
    signal.pause()
"""


def test_a_batch_shell_hands_its_signal_to_the_step(
    slurm: Slurm, page_blocks: list[str], tmp_path: Path, manifest: dict[str, str]
) -> None:
    """The page's batch shell gets the signal alone, and lives until the ranks have saved."""
    (batch,) = page_blocks
    for name in ("ready", "saving"):
        os.mkfifo(tmp_path / name)
    status, text = run_batch(slurm, tmp_path, manifest, batch, SIGNALLED)
    for node in range(2):
        assert f"saved by node {node}\n" in text, text
    assert status == 3, text


REQUEUED = """
import os, pathlib, signal

begun = os.environ.get("TRAINWORKS_RESUME_FROM", "nothing")
node = os.environ["SLURM_NODEID"]
checkpoints = pathlib.Path(os.environ["TRAINWORKS_CHECKPOINT_DIRECTORY"])
# Not its output: a launcher that is killed may not have passed that on.
with open(checkpoints.parent / f"begins-{node}", "a") as file:
    file.write(f"{begun}\\n")
if begun == "nothing":
    meeting = checkpoints.parent / "meeting"
    if node == "0":
        meeting.open("w").close()
        signal.pause()
    # Both nodes have begun when both have opened the FIFO.
    meeting.open().close()
    (checkpoints / "step-3.ckpt").write_text("weights")
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
"""


def test_a_job_whose_task_is_lost_goes_on_when_it_is_requeued(
    slurm: Slurm, page_blocks: list[str], tmp_path: Path, manifest: dict[str, str]
) -> None:
    """The other batch script of docs/platforms/slurm.md: a launcher is killed,
    with all that it had started.
    """
    (script,) = page_blocks
    batch = script.replace("SECONDS=60", "SECONDS=20")
    assert "SECONDS=20\n" in batch
    (tmp_path / "checkpoints").mkdir()
    os.mkfifo(tmp_path / "meeting")
    status, text = run_batch(slurm, tmp_path, manifest, batch, REQUEUED)
    assert status == 0, text
    for node in range(2):
        begun = (tmp_path / f"begins-{node}").read_text().splitlines()
        assert begun == ["nothing", f"{tmp_path}/checkpoints/step-3.ckpt"], text
    assert "starting again on every host (1 of 3): lost host" in text
