"""A Python that stands by for a rank, under the real torchrun and the launcher, with torch.

Marked ``engine``; needs torch in ``launcher_network.PREFIX`` (``tools/set-up-peers programs``). A standby imports ten
seconds after its rank's start, so these tests take their time.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from launcher_network import engine_manifest, need
from launcher_support import Launcher, pids_with_variable, write_inputs

from trainworks_launcher.contract.values import Json

pytestmark = pytest.mark.engine

ASKED: dict[str, Json] = {
    "sagemaker_torch_distributed_enabled": "true",
    "sagemaker_torch_distributed_max_restarts": "1",
    "sagemaker_mpi_num_of_processes_per_host": "2",
}
SCRIPT = """
import sys
standby = "torch" in sys.modules
import os, signal, time
import torch
import torch.distributed as dist
rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"life {life} of {rank} as {os.getpid()}, standby {standby}, sum {total.item():g}", flush=True)
if life == "0":
    signal.pause()  # until the test ends it
"""
ENDS = {
    "": (0, ""),
    "sys.exit(3)": (3, "exit status 3"),
    "raise ValueError('no')": (1, "ValueError: no"),
    "os.kill(os.getpid(), signal.SIGKILL)": (137, "SIGKILL"),
    "os.kill(os.getpid(), signal.SIGSEGV)": (139, "SIGSEGV"),
}


def second_life(job: Launcher) -> None:
    """End rank 1 of the first life once rank 0 has a standby."""
    job.read_until("each rank has one")
    job.read_until("life 0", 2)
    first = dict(re.findall(r"life 0 of (\d) as (\d+)", job.text))
    os.kill(int(first["1"]), signal.SIGKILL)
    job.read_until("life 1", 2)


@pytest.mark.parametrize("end", ENDS)
def test_ranks_go_on_in_pythons_that_stood_by(tmp_path: Path, end: str) -> None:
    need("torchrun")
    status, cause = ENDS[end]
    script = SCRIPT + ("dist.barrier()\nif rank == '0':\n    " + (end or "pass") + "\n")
    write_inputs(tmp_path, script + ("signal.pause()\n" if end else "dist.destroy_process_group()\n"), ASKED, {})
    variables = {"TRAINWORKS_STANDBY": "on", "TRAINWORKS_IMAGE_MANIFEST": str(engine_manifest(tmp_path))}
    with Launcher(tmp_path, variables=variables) as job:
        second_life(job)
        assert job.wait() == status, job.text
        assert pids_with_variable("SAGEMAKER_BASE_DIR", str(tmp_path)) == []
    lives = re.findall(r"\[\S+ rank (\d)\] life 1 of (\d) as \d+, standby (\w+), sum 2$", job.text, re.MULTILINE)
    first, second = sorted(lives)
    assert first == ("0", "0", "True"), job.text
    assert second[:2] == ("1", "1"), job.text  # whose standby may have come too late
    assert cause in job.failure
    assert job.succeeded is (status == 0)
    if cause:
        assert "rank 0" in job.failure


def test_a_stop_reaches_a_rank_that_stood_by(tmp_path: Path) -> None:
    need("torchrun")
    stops = (
        "def stop(*_):\n    print('rank', rank, 'saves', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    write_inputs(tmp_path, SCRIPT + stops, ASKED, {})
    variables = {"TRAINWORKS_STANDBY": "on", "TRAINWORKS_IMAGE_MANIFEST": str(engine_manifest(tmp_path))}
    with Launcher(tmp_path, variables=variables) as job:
        second_life(job)
        job.read_until("ready", 2)
        job.process.send_signal(signal.SIGTERM)
        job.wait()
        assert pids_with_variable("SAGEMAKER_BASE_DIR", str(tmp_path)) == []
    assert "rank 0 saves" in job.text, job.text
    assert "rank 1 saves" in job.text, job.text
