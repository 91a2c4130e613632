"""A training script that meets every other process of its job, and whose rank 0 writes the list of
all processes as the model.

MPI ranks meet through mpi4py, others through torch.distributed.
"""

import atexit
import json
import os
import sys
import time
from pathlib import Path

here = {
    "host": os.environ["SM_CURRENT_HOST"],
    "arguments": sys.argv[1:],
    "greeting": os.environ.get("GREETING", ""),
}

if "OMPI_COMM_WORLD_RANK" in os.environ:
    from mpi4py import MPI  # type: ignore[import-not-found]

    rank = MPI.COMM_WORLD.Get_rank()
    world = MPI.COMM_WORLD.allgather(here)
else:
    import torch.distributed  # type: ignore[import-not-found]

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    world = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(world, here)
    torch.distributed.destroy_process_group()
    # A thread of gloo that still works when Python ends would abort the rank.
    atexit.register(time.sleep, 0.3)

print(f"rank {rank} of {len(world)} on {here['host']}")
if rank == 0:
    Path(os.environ["SM_MODEL_DIR"], "model.json").write_text(json.dumps(world), encoding="utf-8")
