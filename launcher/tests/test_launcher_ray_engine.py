"""Test the real Ray on two hosts: tasks, an actor, Ray Train with gloo, on Slurm, and the effects
of deaths.

Marked ``engine``. Needs the environment that ``tools/set-up-peers ray`` makes. A start takes Ray
some twenty seconds of one processor, so a job shows several things.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_network import NAMES, Network, engine_manifest, job_on, two_namespaces
from launcher_slurm import slurm_of
from launcher_support import LAUNCHER, REPOSITORY, pids_with_variable

from trainworks_testing.clock import assert_within

pytestmark = pytest.mark.engine

PROGRAMS = {name: str(REPOSITORY / ".cache/peers/ray/bin" / name) for name in ("ray", "python")}
ASKED = {"sagemaker_ray_enabled": "true"}
DEATH_SECONDS = 30
TASKS = """
import os, ray

ray.init()

@ray.remote(scheduling_strategy="SPREAD")
def where(number):
    return os.environ["SM_CURRENT_HOST"]

@ray.remote
class Counter:
    count = 0

    def add(self):
        self.count += 1
        return self.count

counter = Counter.remote()
print("counted", [ray.get(counter.add.remote()) for _ in range(3)][-1])
found = set()
while len(found) < 2:
    found.update(ray.get([where.remote(number) for number in range(8)]))
resources = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
print("tasks on", *sorted(found), resources, flush=True)
"""
TRAIN = """
import os, time
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

def loop(config):
    torch.manual_seed(dist.get_rank())
    model = prepare_model(torch.nn.Linear(4, 1))
    steps = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for _ in range(20):
        inputs = torch.randn(16, 4)
        loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
    weights = [torch.zeros(1, 4) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.weight.data)
    same = all(torch.equal(weights[0], other) for other in weights)
    with open(os.path.join(os.environ["SHARED"], "rank-%d" % dist.get_rank()), "w") as told:
        told.write(
            f"{os.environ[os.environ['HOST_BY']]} {dist.get_backend()} {same} {float(loss) < 3.0}"
        )
    time.sleep(3)  # in which Ray Train's cleaner asks for its controller three times

TorchTrainer(
    loop,
    train_loop_config={"lr": 0.05},
    scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
    run_config=RunConfig(storage_path=os.environ["SHARED"]),
).fit()
print("trained", flush=True)
"""
DIES = """
import os, pathlib, signal, sys, time
import ray

what = sys.argv[sys.argv.index("--what") + 1]
again = os.environ["TRAINWORKS_RESTART_COUNT"]
ray.init()

def dies(name=""):
    print("dies", time.monotonic(), flush=True)
    if not name:
        os.kill(os.getpid(), signal.SIGKILL)
    for path in pathlib.Path("/proc").glob("[0-9]*/comm"):
        if path.read_text().strip() == name:
            os.kill(int(path.parent.name), signal.SIGKILL)
    time.sleep(600)

@ray.remote(max_retries=0, num_cpus=0)
def task(name=""):
    dies(name)

@ray.remote(num_cpus=0)
class Actor:
    def die(self):
        dies()

def on_the_worker(function, *given):
    other = next(
        row["NodeID"] for row in ray.nodes() if "node:__internal_head__" not in row["Resources"]
    )
    at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(other, soft=False)
    return function.options(scheduling_strategy=at).remote(*given)

if again != "0":
    print("try", again, "has", len(ray.nodes()), "hosts", flush=True)
elif what == "a worker process":
    ray.get(on_the_worker(task))
elif what == "an actor":
    ray.get(on_the_worker(Actor).die.remote())
elif what == "the head":
    dies("gcs_server")
elif what == "a raylet":
    ray.get(on_the_worker(task, "raylet"))  # ends with an exception before Ray's daemon does
elif what == "the program":
    dies()
elif what == "an exception":
    print("dies", time.monotonic(), flush=True)
    raise ValueError("the batch is empty")
if again == "0":
    print("waits", flush=True)
    signal.pause()
"""
DEATHS = {
    "a worker process": (1, "ray.exceptions.WorkerCrashedError"),
    "an actor": (1, "ray.exceptions.ActorDiedError"),
    "the head": (1, "the Ray head on host algo-1 (mode ray): exit status 1"),
    "a raylet": (1, "the Ray worker on host algo-2 (mode ray): exit status 1"),
    "the program": (137, "train.py on host algo-1 (mode ray): killed by SIGKILL"),
    "an exception": (1, "ValueError: the batch is empty"),
    "a host": (66, "lost host algo-2"),
}
"""The victim, the job's status, and words of the first lines of the failure on each host that is
left.
"""


LATE = "The current node timed out during startup"
"""Words of Ray when its own start took more than 30 s, a limit without a setting
(ray/_private/node.py).
"""

TURNS = 6


def again_where_ray_is_late(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test anew, in another folder, where the machine was too busy for Ray's own limit."""

    @functools.wraps(test)
    def run(tmp_path: Path, **fixtures: object) -> None:
        for turn in range(TURNS):
            try:
                return test(tmp_path=tmp_path / f"turn-{turn}", **fixtures)
            except AssertionError as error:
                if LATE not in str(error) or turn == TURNS - 1:
                    raise
        return None

    return run


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    missing = [path for path in PROGRAMS.values() if not Path(path).exists()]
    if missing:
        pytest.skip(f"NOT TESTED: {', '.join(missing)}: tools/set-up-peers ray")
    return engine_manifest(tmp_path, **PROGRAMS)


@pytest.fixture
def network() -> Iterator[Network]:
    with two_namespaces() as spaces:
        yield spaces


@again_where_ray_is_late
def test_tasks_and_an_actor_run_on_both_hosts(
    tmp_path: Path, network: Network, manifest: Path
) -> None:
    secret = {"TRAINWORKS_JOB_SECRET": "a secret of this job"}
    with job_on(network, tmp_path, TASKS, ASKED, manifest=manifest, variables=secret) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], "".join(host.text for host in hosts)
    leader, worker = hosts
    assert "counted 3\n" in leader.text
    assert "tasks on algo-1 algo-2" in leader.text
    assert "'GPU': 0" in leader.text
    assert all(host.succeeded for host in hosts)
    assert "The object store is using" not in leader.text + worker.text
    assert "Token authentication is disabled" not in leader.text
    assert "\x1b[" not in leader.text + worker.text


@again_where_ray_is_late
def test_ray_train_trains_on_both_hosts_and_its_cleaner_is_quiet(
    tmp_path: Path, network: Network, manifest: Path
) -> None:
    variables = {"SHARED": str(tmp_path), "HOST_BY": "SM_CURRENT_HOST"}
    with job_on(network, tmp_path, TRAIN, ASKED, manifest=manifest, variables=variables) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], "".join(host.text for host in hosts)
    rank_texts = sorted((tmp_path / f"rank-{rank}").read_text() for rank in range(2))
    assert rank_texts == [f"{host} gloo True True" for host in NAMES], hosts[0].text
    assert "State API" not in hosts[0].text


@pytest.mark.parametrize("victim", DEATHS)
@again_where_ray_is_late
def test_what_dies_ends_both_hosts_with_its_cause(
    tmp_path: Path, network: Network, manifest: Path, victim: str
) -> None:
    status, cause = DEATHS[victim]
    with job_on(network, tmp_path, DIES, {**ASKED, "what": victim}, manifest=manifest) as hosts:
        leader, worker = hosts
        if victim == "a host":
            leader.read_until("waits")
            died = time.monotonic()
            worker.kill()
        left = [leader] if victim == "a host" else [leader, worker]
        assert [host.wait() for host in left] == [status] * len(left), "".join(
            host.text for host in hosts
        )
        end_time = max(host.end_time for host in left)
        moments = [line.split()[-1] for line in leader.text.splitlines() if "dies " in line]
        if moments:
            died = float(moments[0])
        elif victim != "a host":
            died = end_time
        print(f"{victim}: both hosts ended {end_time - died:.1f} s later")
        assert_within(DEATH_SECONDS, died, end_time, leader.text)
    assert len({host.failure for host in left}) == 1
    assert cause in "\n".join(leader.failure.splitlines()[:2]), leader.failure


@again_where_ray_is_late
def test_all_hosts_start_again_with_a_new_ray(
    tmp_path: Path, network: Network, manifest: Path
) -> None:
    variables = {"TRAINWORKS_MAX_RESTARTS": "1"}
    hyperparameters = {**ASKED, "what": "a raylet"}
    with job_on(
        network, tmp_path, DIES, hyperparameters, manifest=manifest, variables=variables
    ) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], "".join(host.text for host in hosts)
    assert "try 1 has 2 hosts" in hosts[0].text
    for host in hosts:
        assert (
            "starting again on every host (1 of 1): the Ray worker on host algo-2" in host.text
        ), host.text


@again_where_ray_is_late
def test_ray_train_trains_on_slurms_nodes_which_share_a_file_system(
    tmp_path: Path, manifest: Path
) -> None:
    """Run the launcher as another process than number 1: the processes that it starts end with it
    all the same.
    """
    (tmp_path / "slurm").mkdir(parents=True)
    (tmp_path / "train.py").write_text(TRAIN)
    variables = {
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "SHARED": str(tmp_path),
        "HOST_BY": "SLURMD_NODENAME",
    }
    train = (sys.executable, "-IS", str(LAUNCHER / "trainworks_launcher" / "__main__.py"))
    words = ("--nodes=2", "--ntasks-per-node=1", "--overcommit", f"--chdir={tmp_path}")
    with slurm_of(2, tmp_path / "slurm") as slurm:
        result = slurm.run(
            "srun", *words, *train, "--mode", "ray", "--", "train.py", variables=variables
        )
        assert result.returncode == 0, result.stdout
        assert "trained\n" in result.stdout
        assert not pids_with_variable("SAGEMAKER_BASE_DIR", str(tmp_path))
    rank_texts = sorted((tmp_path / f"rank-{rank}").read_text() for rank in range(2))
    assert rank_texts == [f"{host} gloo True True" for host in NAMES], result.stdout
