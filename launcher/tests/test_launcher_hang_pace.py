"""Which silence is too long for a job: by its own pauses, without and with real processes."""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
from pathlib import Path

import pytest
from launcher_network import engine_manifest, job_on, need, two_namespaces
from launcher_support import GLOO_ENDS, Launcher, write_inputs, write_manifest

from trainworks_launcher.contract import names
from trainworks_launcher.contract.values import Json
from trainworks_launcher.supervise.hang.pace import SHORTEST, Pace

LIMIT = 600.0


def paced(*times: float) -> Pace:
    """A job that printed at these times; the first is 1000."""
    pace = Pace(LIMIT)
    for each in times:
        pace.hear(1000 + each)
    return pace


def every(seconds: float, until: float, since: float = 0.0) -> list[float]:
    return [since + seconds * step for step in range(int((until - since) / seconds) + 1)]


@pytest.mark.parametrize(
    ("times", "early"),
    [
        ([], LIMIT),
        ([0], LIMIT),
        (every(1, until=140), LIMIT),  # not warm yet
        (every(1, until=150), SHORTEST),
        (every(10, until=300), 40),
        (every(50, until=600), 200),
        (every(70, until=1400), LIMIT),  # never steady
        ([0, *every(1, since=400, until=560)], SHORTEST),  # its start does not count
        ([*every(1, until=200), *every(1, since=260, until=300)], 240),  # a pause of 60 s, once it was warm
        ([*every(1, until=200), *every(1, since=900, until=1000)], LIMIT),
    ],
    ids=itertools.count(),
)
def test_the_longest_pause_decides(times: list[float], early: float) -> None:
    assert paced(*times).early == early


def test_an_excuse_is_a_pause() -> None:
    pace = paced(*every(1, until=200))
    pace.excuse(16)
    assert pace.early == 64
    pace.excuse(200)
    assert pace.early == LIMIT


def test_a_day_of_a_job_needs_few_looks_and_none_while_it_is_steady() -> None:
    """24 hours of steps, evaluations and checkpoints, drawn at random: a silence is looked into once it is twice as
    long as any before, so a day has a handful of looks, and each excuses what it saw."""
    for seed in range(20):
        draw = random.Random(seed)
        pace, now, silences = Pace(LIMIT), 1000.0, 0
        for step in range(86_400 // 2):
            pause = 2 * draw.uniform(0.5, 2)
            if step % 500 == 499:
                pause = draw.uniform(5, 60)  # an evaluation
            if step % 5000 == 4999:
                pause = draw.uniform(30, 240)  # a checkpoint
            if pause > pace.early / 2:
                silences += 1
                pace.excuse(pause)
            now += pause
            pace.hear(now)
        assert silences <= 8, seed


TALKING = """
import os, sys, threading, time
def step(number):
    print("step", number, flush=True)
    time.sleep(0.2)
def work():
    number = 0
    while time.monotonic() < begin + 40:
        step(number)
        number += 1
    print("the last step", flush=True)
    threading.Event().wait()
begin = time.monotonic()
work()
"""


@pytest.mark.engine
def test_a_steady_job_that_stops_is_seen_before_the_limit_and_ended_at_it(tmp_path: Path) -> None:
    write_inputs(tmp_path, TALKING, {}, {})
    manifest = write_manifest(tmp_path / "image.json", {"python": sys.executable})
    variables = {
        "TRAINWORKS_HANG": "fail",
        "TRAINWORKS_HANG_LIMIT_SECONDS": "60",
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
    }
    with Launcher(tmp_path, variables=variables) as launcher:
        launcher.read_until("the last step")
        launcher.read_until("it was silent for")
        early = launcher.text
        assert launcher.wait() == names.EXIT_HANG, launcher.text
    found = re.search(r"no rank has made progress for (\d+) s: the program on \S+ is in work \(train", early)
    assert found is not None, early
    assert SHORTEST <= int(found[1]) < 60
    assert launcher.failure.startswith("no rank has made progress for 60 s: the program on ")


STEPS = (
    GLOO_ENDS
    + """
import threading, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, ones, begin = dist.get_rank(), torch.ones(8), time.monotonic()
def step():
    done = torch.tensor(float(time.monotonic() > begin + 45))
    dist.all_reduce(done, dist.ReduceOp.MIN)
    if rank == 0:
        print("a step", flush=True)
    time.sleep(0.2)
    return done
while not step():
    pass
def hang():
    threading.Event().wait()
def evaluate():
    until = time.monotonic() + 50
    while time.monotonic() < until:
        predict(list(range(20)))
def predict(batch):
    return [sum(range(each * 50_000)) for each in batch]
"""
)


@pytest.mark.engine
@pytest.mark.parametrize("what", ["hang", "evaluate"])
def test_hosts_that_print_nothing_look_when_the_leader_falls_silent(tmp_path: Path, what: str) -> None:
    """A rank of the second host hangs, and is named before the limit; or it works in silence, and nothing is said."""
    need("torchrun")
    script = f"{STEPS}\nif rank == 3:\n    {what}()\ndist.barrier()\n"
    mode: dict[str, Json] = {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": 2,
    }
    own = str(Path(sys.executable).parent)  # py-spy is there
    variables = {"PATH": f"{os.environ['PATH']}:{own}", "TRAINWORKS_HANG_LIMIT_SECONDS": "60"}
    with (
        two_namespaces() as network,
        job_on(network, tmp_path, script, mode, manifest=engine_manifest(tmp_path), variables=variables) as hosts,
    ):
        if what == "hang":
            for host in hosts:
                host.read_until("it was silent for")
            said = re.search(r"no rank has made progress for (\d+) s: rank 3 on algo-2 is in hang \(", hosts[0].text)
            assert said is not None, hosts[0].text
            assert SHORTEST <= int(said[1]) < 60
        else:
            assert [host.wait() for host in hosts] == [0, 0], hosts[0].text
            assert "made progress" not in hosts[0].text
