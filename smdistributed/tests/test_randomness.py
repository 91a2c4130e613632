"""Test that the same seeds give the same losses, with dropout, in any order of arrival.

And every draw is another one.
"""

from __future__ import annotations

import queue
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from jobs import BY_HAND, forget, train_step
from ranks import run_ranks

WIDTH, BATCH = 8, 8


class Drops(nn.Module):
    """A linear module with dropout.

    Dropping takes longer for some microbatches, on one rank or another.
    """

    seen: queue.SimpleQueue[torch.Tensor]

    def __init__(self, slow: int, again: bool) -> None:
        super().__init__()
        self.linear, self.drop, self.slow, self.again = (
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.5),
            slow,
            again,
        )
        self.seen = queue.SimpleQueue()  # a list would make the microbatches run in turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(400 * ((int(1000 * x.detach().abs().sum()) * self.slow) % 5)):
            torch.ones(16, 16) @ torch.ones(16, 16)
        drawn = torch.rand(4)
        if not self.again:
            self.seen.put(drawn)
        result: torch.Tensor = self.drop(self.linear(x))
        return result


class Draws(nn.Module):
    """A linear module whose factor comes from Python's generator or numpy's, by
    a name or by an object.
    """

    def __init__(self, slow: int, kind: str) -> None:
        super().__init__()
        self.linear, self.slow, self.kind = nn.Linear(WIDTH, WIDTH), slow, kind
        self.hidden = vars(random)["random"]

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(400 * ((int(1000 * x.detach().abs().sum()) * self.slow) % 5)):
            torch.ones(16, 16) @ torch.ones(16, 16)
        if self.kind == "numpy":
            return self.linear(x) * (1 + numpy.random.rand())
        return self.linear(x) * (1 + (random.random() if self.kind == "python" else self.hidden()))


def streams() -> tuple[Any, str]:
    """Return where the script's own generators are."""
    return random.getstate(), repr(numpy.random.get_state())


def other_losses(kind: str) -> tuple[list[list[float]], bool]:
    """Return the losses of trainings with the same seeds and other speeds, and
    whether the script's streams stayed.
    """
    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "microbatches": 4, "active_microbatches": 4})
    loss_lists, stayed = [], True
    for speeds in ([0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 2], [3, 1, 2, 0], [0, 0, 2, 1]):
        torch.manual_seed(11)
        random.seed(5)
        numpy.random.seed(7)
        plain = nn.Sequential(*(Draws(slow, kind) for slow in speeds)).double()
        for number, module in enumerate(plain):
            smp.set_partition(module, number % 2)
        model = smp.DistributedModel(plain)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train = train_step(lambda model, x: (model(x) ** 2).mean())
        values = []
        for step in range(4):
            optimizer.zero_grad()
            before = streams()
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).double()
            values += [output.item() for output in train(model, x).outputs]
            stayed &= step == 0 or before == streams()
            optimizer.step()
        loss_lists.append(values)
        forget()
    smp.barrier()
    return loss_lists, stayed


@pytest.mark.parametrize("kind", ["python", "numpy", "hidden"])
def test_generators_of_python_and_numpy_belong_to_the_microbatch(kind: str) -> None:
    results = run_ranks(2, other_losses, kind)
    for result, stayed in results:
        assert all(values == result[0] for values in result)
        assert len(set(result[0])) == len(result[0])
        assert stayed
    assert results[0] == results[1]


def losses(config: dict[str, Any], places: list[int], checkpoint: bool) -> dict[str, Any]:
    """Train the same model several times, at other speeds of its modules.

    Return the losses of each training.
    """
    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "microbatches": 4, "pipeline_parallel_degree": max(places) + 1, **config})
    losses_and_draws, drawn = [], []
    for speeds in (
        [0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [0, 1, 0, 2, 0],
        [0, 0, 2, 1, 3],
        [3, 1, 2, 0, 1],
    ):
        torch.manual_seed(11)
        modules = [Drops(slow, checkpoint) for slow, _ in zip(speeds, places, strict=False)]
        plain = nn.Sequential(*modules).double()
        for module, index in zip(modules, places, strict=True):
            smp.set_partition(module, index)
        model = smp.DistributedModel(plain)
        if checkpoint:
            smp.set_activation_checkpointing(plain)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        train = train_step(lambda model, x: (model(x) ** 2).mean())
        values = []
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).double()
            values += [output.item() for output in train(model, x).outputs]
            optimizer.step()
        losses_and_draws.append((values, torch.rand(()).item()))
        drawn = [
            tuple(module.seen.get().tolist())
            for module in modules
            for _ in range(module.seen.qsize())
        ]
        forget()
    smp.barrier()
    return {"losses": losses_and_draws, "drawn": len(drawn), "different": len(set(drawn))}


@pytest.mark.parametrize(
    ("config", "places"),
    [
        pytest.param({}, [0, 1, 0, 1], id="twice", marks=pytest.mark.core),
        pytest.param({"active_microbatches": 4}, [0, 1, 2, 0, 1], id="three"),
    ],
)
def test_the_same_seeds_give_the_same_losses(config: dict[str, Any], places: list[int]) -> None:
    first = None
    for pipeline in ("interleaved", "simple"):
        results = run_ranks(
            max(places) + 1, losses, {**config, "pipeline": pipeline}, places, False
        )
        for rank, result in enumerate(results):
            first = first or result["losses"][0]
            # The script's own stream is that of the others, too.
            assert result["losses"] == [first] * 5, f"{pipeline}, rank {rank}"
            assert result["different"] == result["drawn"] > 0


def test_modules_that_run_again_draw_the_same() -> None:
    with_it, without = (
        run_ranks(2, losses, {}, [0, 1, 0, 1], checkpoint) for checkpoint in (True, False)
    )
    assert [rank_result["losses"] for rank_result in with_it] == [
        rank_result["losses"] for rank_result in without
    ]
