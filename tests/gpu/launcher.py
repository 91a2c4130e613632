"""The launcher starts a script and torchrun on the GPU.

Every answer of `train check` is the real library's.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from launching import check, launch
from together import NotTestedError, main

NEEDS = ("torch", "cuda", "nccl")
BOUND = 120

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist

device = sys.argv[1]
found = {"devices": torch.cuda.device_count(), "sum": 0.0}
if "RANK" in os.environ and found["devices"] + (device == "cpu"):
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    ones = torch.ones(4, device=device)
    dist.all_reduce(ones)
    found["sum"] = ones.sum().item()
    dist.destroy_process_group()
print("found", json.dumps(found), flush=True)
"""


def run(options: dict[str, Any]) -> dict[str, Any]:
    device = options["device"]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT, encoding="utf-8")
        for title, mode, variables in (
            ("torchrun", "torchrun", {}),
            ("script", "none", {}),
            ("script without a visible GPU", "none", {"CUDA_VISIBLE_DEVICES": ""}),
        ):
            status, output, seconds = launch(folder, [str(script), device], 1, variables, mode)
            print(output)
            assert status == 0, f"{title}: status {status}"
            (line,) = [
                line.partition("found ")[2] for line in output.splitlines() if "found {" in line
            ]
            figures_of_host = json.loads(line)
            expected = 0 if variables or device == "cpu" else 1
            assert min(figures_of_host["devices"], 1) == expected, f"{title}: {figures_of_host}"
            assert figures_of_host["sum"] == (4.0 if mode == "torchrun" else 0.0), (
                f"{title}: {figures_of_host}"
            )
            figures[title] = f"{seconds:.1f} s"
    status, output = check()
    print(output)
    assert status == 0, f"train check: status {status}: {output}"
    figures["train check"] = output.strip()[-500:]
    if device == "cuda":
        figures |= management()
    return figures


def management() -> dict[str, Any]:
    """Return nvidia-smi's figures of each GPU, after a comparison with CUDA's own answers."""
    import torch

    from trainworks_launcher.checks import gpus

    query = gpus.query_gpus(60.0)
    if query.problem:
        raise NotTestedError(query.problem)
    assert query.status == 0, f"nvidia-smi ended with {query.status}"
    assert query.driver, "nvidia-smi gives no version of the driver"
    assert query.devices, "nvidia-smi sees no GPU"
    uuids = [device["uuid"] for device in query.devices.values()]
    for number, device in query.devices.items():
        assert device["uuid"].startswith(("GPU-", "MIG-")), f"GPU {number}: {device}"
        assert any("reasons.active" in name for name in device), (
            f"GPU {number} does not say why its clocks are low"
        )
    own = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    sliced = "MIG" in torch.cuda.get_device_name(0)
    assert not own or sliced or any(own in uuid for uuid in uuids), (
        f"CUDA's GPU {own} is none of nvidia-smi's"
    )
    status, output = check({"CUDA_VISIBLE_DEVICES": uuids[0]})
    assert status == 0, f"train check with CUDA_VISIBLE_DEVICES: {output}"
    return {"driver": query.driver, "GPUs": dict(query.devices)}


if __name__ == "__main__":
    main(globals())
