"""Times an all-reduce of torch: ``python all_reduce.py`` once per rank, with torch's own variables (RANK, ...).

Run by the image's Python, between all hosts and GPUs of a job, before it starts. NCCL on GPUs, gloo on CPUs. Rank 0
prints a JSON object: ``backend``, ``bytes`` of the tensor, ``seconds`` of one all-reduce, ``world``.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import time
from typing import Any

_GPU_BYTES = 256 << 20
_CPU_BYTES = 16 << 20
_ROUNDS = 5
_LIMIT = datetime.timedelta(seconds=90)


def main() -> int:
    """Measure; 1 if the sum is wrong."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    distributed.init_process_group(backend, timeout=_LIMIT)
    world = distributed.get_world_size()
    tensor = torch.ones((_GPU_BYTES if cuda else _CPU_BYTES) // 4, device=device)
    distributed.all_reduce(tensor)
    if not bool((tensor == world).all()):
        sys.stderr.write(f"the all-reduce of {world} ones is not {world}\n")
        return 1
    distributed.barrier()
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        distributed.all_reduce(tensor)
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / _ROUNDS
    size = tensor.numel() * tensor.element_size()
    if distributed.get_rank() == 0:
        print(json.dumps({"backend": backend, "bytes": size, "seconds": seconds, "world": world}), flush=True)
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
