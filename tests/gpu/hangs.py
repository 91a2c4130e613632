"""A rank that skips an all-reduce is named by the launcher while the others wait."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from launching import launch
from together import main

NEEDS = ("torch", "cuda", "nccl")
BOUND = 150

LIMIT, AFTER = 15.0, 45.0
"""Seconds without progress until a job hangs, and until the rank is named then,
the start of torch included.
"""

RANKS, DIFFERENT = 4, 2
HANG_STATUS = 68

SCRIPT = f"""
import os, sys, threading
os.environ["NCCL_HOSTID"] = "rank-" + os.environ["RANK"]
import torch
import torch.distributed as dist

device = sys.argv[1]
dist.init_process_group("nccl" if device == "cuda" else "gloo")
ones = torch.ones(1 << 20, device=torch.device(device, 0))
dist.all_reduce(ones)

def waits_for_nobody():
    threading.Event().wait()

def joins_all():
    dist.all_reduce(ones)
    print(ones.sum().item())

(waits_for_nobody if dist.get_rank() == {DIFFERENT} else joins_all)()
"""


def run(options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT, encoding="utf-8")
        variables = {"TRAINWORKS_HANG": "fail", "TRAINWORKS_HANG_LIMIT_SECONDS": f"{LIMIT:g}"}
        status, output, seconds = launch(folder, [str(script), options["device"]], RANKS, variables)
        reports = sorted(file.name for file in Path(folder, "ml", "output", "data").iterdir())
    print(output)
    assert status == HANG_STATUS, f"status {status}, not {HANG_STATUS}"
    lines = [line for line in output.splitlines() if "no rank has made progress" in line]
    assert lines, "no hang was found"
    assert f"rank {DIFFERENT} " in lines[0], lines[0]
    assert "waits_for_nobody" in lines[0] or "train.py" in lines[0], lines[0]
    if options["device"] == "cuda":
        assert seconds < LIMIT + AFTER, f"it was named after {seconds:.0f} s"
    return {"seconds": round(seconds, 1), "said": lines[0][:300], "files": reports}


if __name__ == "__main__":
    main(globals())
