"""A rank is killed, or raises, at a moment drawn at random: the others end
within ten seconds, and name it once.

A moment is a number of calls, of Python's or of C's, in all threads of a rank after `smp.init`; for
an exception, of those that the script's own code makes. A run without a fault counts them first.
``SMP_FULL_MATRIX=1`` has all seeds.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from test_faults import RANKS, check_others, run_ranks_to_their_end

SEEDS = range(25)
FEW = SEEDS if os.environ.get("SMP_FULL_MATRIX") == "1" else SEEDS[:5]
SHAPES: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True},
    "sharded": {"sharded_data_parallel_degree": 2, "microbatches": 2, "ddp": True},
}
"""Both have two replicas."""


@dataclass
class Moment:
    """The moment in which a rank fails.

    Attributes:
        folder: Where the rank says so.
        how: "kill", "raise", or "count": it does not fail.
        rank: The rank.
        number: Of its moments of this kind.
        kills: How many moments of "kill" there have been.
        raises: How many of "raise".

    Both numbers are ctypes': the profiler counts in every thread, also while smp gives the
    containers that a model's code reaches their content back.
    """

    folder: str
    how: str
    rank: int = -1
    number: int = 0
    kills: ctypes.c_int = field(default_factory=ctypes.c_int)
    raises: ctypes.c_int = field(default_factory=ctypes.c_int)

    def pass_by(self, kind: str) -> None:
        counter = self.kills if kind == "kill" else self.raises
        counter.value += 1
        if self.how == kind and counter.value >= self.number:
            self.fail()

    def fail(self) -> None:
        Path(self.folder, "failed").write_text(str(time.time()))
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self.how = "count"  # the end of a rank that failed is none of its moments
        raise ValueError("the cause")


def train(shape: str, moment: Moment) -> None:
    """Train three steps; the rank of the moment fails."""
    import torch
    from torch import nn

    armed = int(os.environ["OMPI_COMM_WORLD_RANK"]) == moment.rank or moment.how == "count"
    begun = threading.Event()

    def called(*_: Any) -> None:
        if begun.is_set():
            moment.pass_by("kill")

    if armed and moment.how != "raise":
        threading.setprofile(called)
        sys.setprofile(called)

    import smdistributed.modelparallel.torch as smp

    def here() -> None:
        if armed:
            moment.pass_by("raise")

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            return value * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            here()
            return grad

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            here()
            result: torch.Tensor = Passing.apply(self.linear(value))  # type: ignore[no-untyped-call]
            return result

    smp.init(SHAPES[shape])
    begun.set()
    model = smp.DistributedModel(nn.Sequential(*[Block() for _ in range(4)]))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))

    @smp.step
    def step(model: Any, value: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(value).sum()
        here()
        model.backward(loss)
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        step(model, torch.ones(4, 4))
        here()
        optimizer.step()
        model.state_dict()
    if moment.how == "count":
        sys.setprofile(None)
        Path(moment.folder, f"moments{smp.rank()}").write_text(
            repr({"kill": moment.kills.value, "raise": moment.raises.value})
        )
    elif armed:  # the calls of two runs differ by a few
        moment.fail()
    smp.barrier()
    print("the end was reached")


@functools.cache
def moments(shape: str) -> list[dict[str, int]]:
    """Return how many moments each rank of an undisturbed run has, by kind."""
    with tempfile.TemporaryDirectory() as folder:
        statuses = run_ranks_to_their_end(Path(folder), train, shape, Moment(folder, "count"))
        assert statuses == [0] * RANKS, Path(folder, "stderr0").read_text()
        return [eval(Path(folder, f"moments{rank}").read_text()) for rank in range(RANKS)]  # noqa: S307


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_ends_and_names_the_cause_once_whenever_a_rank_fails(
    shape: str, seed: int, tmp_path: Path
) -> None:
    drawn = random.Random(f"{shape} {seed}")
    rank, how = drawn.randrange(RANKS), drawn.choice(["kill", "kill", "raise"])
    number = drawn.randint(1, moments(shape)[rank][how])
    check_others(tmp_path, rank, how, train, shape, Moment(str(tmp_path), how, rank, number))
