"""The end of a process: status 0 and no abort.

Before groups were destroyed first, an abort in the static destruction of gloo's threads showed in
one of 100 exits. Two hundred exits are run by hand: `EXITS=200 pytest tests/test_exit.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

from ranks import run_program

RANKS = 2
EXITS = int(os.environ.get("EXITS", "4"))

PROGRAM = """
import sys
import smdistributed.modelparallel.torch as smp
import torch
from torch import nn

smp.init(
    {
        "pipeline_parallel_degree": 2,
        "microbatches": 4,
        "auto_partition": False,
        "default_partition": 0,
    }
)
with smp.partition(1):
    second = nn.Linear(4, 4)
model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), second, nn.Linear(4, 4)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@smp.step
def train(model, value):
    loss = model(value).mean()
    model.backward(loss)
    return loss

for _ in range(2):
    optimizer.zero_grad()
    loss = train(model, torch.ones(8, 4)).reduce_mean()
    optimizer.step()
smp.barrier()
if "exit" in sys.argv and smp.rank() == 1:
    sys.exit(0)
"""


def test_processes_end_with_status_0_and_say_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for number in range(EXITS // RANKS):
        for rank in run_program(RANKS, [str(program), *(["exit"] if number % 2 else [])]):
            assert (rank.status, rank.err) == (0, ""), f"exit {number}: {rank}"
