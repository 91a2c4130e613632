"""Test which rank failed first, with torch, gloo and torchrun: a rank that leaves its peers, and
takes its time to end.

Marked ``engine``. Its needs: see ``test_launcher_engine.py``. The cases without torch, in the quick
tests, are in ``test_launcher_first_failure.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_network import Network, engine_manifest, job_on, need, network_of

pytestmark = pytest.mark.engine

SCRIPT = """
import atexit, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
SLOW
try:
    for step in range(5):
        x = torch.ones(1)
        dist.all_reduce(x)
        if step == 3 and rank == 1:
            END
finally:
    dist.destroy_process_group()
"""
LABEL = "label 17 is out of range"
PLAIN = SCRIPT.replace("finally:\n    dist.destroy_process_group()", "finally:\n    pass")
SLOW = "atexit.register(time.sleep, 4 if rank == 1 else 0)"
ENDS = {
    "exception": (f"raise ValueError({LABEL!r})", 1, f"ValueError: {LABEL}"),
    "text": (f"sys.exit({LABEL!r})", 1, LABEL),
    "status": ("sys.exit(3)", 3, "exit status 3"),
}


@pytest.fixture(params=[1, 2], ids=["one-host", "two-hosts"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with network_of(request.param) as spaces:
        yield spaces


@pytest.mark.parametrize(
    ("script", "slow"), [(SCRIPT, SLOW), (SCRIPT, ""), (PLAIN, SLOW)], ids=["slow", "", "plain"]
)
@pytest.mark.parametrize("end", [*ENDS])
def test_the_rank_that_left_its_peers_is_the_first_to_fail(
    tmp_path: Path, network: Network, script: str, slow: str, end: str
) -> None:
    need("torchrun")
    words, status, cause = ENDS[end]
    hyperparameters = {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": str(2 // len(network.hosts)),
    }
    text = script.replace("SLOW", slow).replace("END", words)
    with job_on(
        network, tmp_path, text, hyperparameters, manifest=engine_manifest(tmp_path)
    ) as hosts:
        statuses = [host.wait() for host in hosts]
    joined_text = "\n".join((*(host.text for host in hosts), *(host.failure for host in hosts)))
    failure_reports = [
        json.loads((host.base / "output/failure.json").read_text(encoding="utf-8"))
        for host in hosts
    ]
    assert statuses == [status] * len(hosts), joined_text
    assert [(row["rank"], row["host"], row["retry"]) for row in failure_reports] == [
        (1, network.hosts[-1], False)
    ] * len(hosts), joined_text
    assert cause in failure_reports[0]["cause"], joined_text
    assert len({host.failure for host in hosts}) == 1, joined_text
