"""A script that limits torch to one thread, where the environment says two: how many do the threads
of a step have?
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.pipeline.runtime import present

maps = Path("/proc/self/maps").read_text(encoding="utf-8")
openmp = ctypes.CDLL(re.search(r"/\S*/lib(?:gomp|omp|iomp5)[-.]\S*", maps)[0])  # type: ignore[index]

smp.init(
    {
        "pipeline_parallel_degree": 2,
        "microbatches": 4,
        "auto_partition": False,
        "default_partition": 0,
    }
)
before = openmp.omp_get_max_threads()
torch.set_num_threads(1)
first, second = nn.Linear(4, 4), nn.Linear(4, 4)
smp.set_partition(second, 1)
model = smp.DistributedModel(nn.Sequential(first, second))
thread_counts = set()


@smp.step
def train(model, value):  # type: ignore[no-untyped-def]  # as users write it
    thread_counts.add(openmp.omp_get_max_threads())
    loss = model(value).sum()
    model.backward(loss)
    return loss


for _ in range(2):  # the microbatches of the first step run in turn, on one thread
    train(model, torch.ones(8, 4))
print(
    "before", before, "in steps", *thread_counts, "changes of threads", present().scheduler.switches
)
