"""Batch normalization whose microbatches overlap: its running statistics are
those of one process.
"""

from __future__ import annotations

import copy
import logging
import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

from jobs import BY_HAND
from ranks import run_ranks
from smdistributed.modelparallel.torch.pipeline.running import BUFFERS, RunningStatistics, is_update

NORMS: dict[str, nn.Module] = {
    "batch": nn.BatchNorm1d(4),
    "share of a half": nn.BatchNorm1d(4, momentum=0.5),
    "images": nn.BatchNorm2d(4),
}


@pytest.mark.parametrize("kind", NORMS)
def test_updates_in_any_order_are_joined_in_the_order_of_microbatches(kind: str) -> None:
    torch.manual_seed(0)
    norm = copy.deepcopy(NORMS[kind]).double()
    reference = copy.deepcopy(norm)
    shape = (3, 4, 5, 5) if kind == "images" else (3, 4, 5)
    batches = [torch.randn(shape, dtype=torch.float64) + number for number in range(4)]
    for batch in batches:
        reference(batch)
        reference(batch * 2)  # a module that is called twice
    statistics = RunningStatistics()
    before = dict(norm.named_buffers())
    for number in (2, 0, 3, 1):
        for factor in (1, 2):
            for name in BUFFERS:
                norm._buffers[name] = statistics.buffer(norm, name, number)
            norm(batches[number] * factor)
    norm._buffers.update(before)
    assert statistics.waits(norm)
    statistics.settle_all()
    assert not statistics.waits(norm)
    for name, value in reference.named_buffers():
        assert torch.allclose(before[name], value, rtol=1e-14)


def test_only_torch_s_own_forward_updates() -> None:
    update = nn.BatchNorm1d.forward.__code__
    assert is_update(update, nn.BatchNorm1d(4))
    assert not is_update(update, nn.BatchNorm1d(4).eval())
    assert not is_update(update, nn.BatchNorm1d(4, momentum=None))
    assert not is_update(update, nn.BatchNorm1d(4, track_running_stats=False))
    assert not is_update(update, nn.Linear(4, 4))
    assert not is_update(
        nn.InstanceNorm1d.forward.__code__, nn.InstanceNorm1d(4, track_running_stats=True)
    )
    assert not is_update(train.__code__, nn.BatchNorm1d(4))


class Slow(nn.Module):
    """A module that takes another time for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        threading.Event().wait(random.random() * 0.01)
        return self.linear(x).tanh()  # type: ignore[no-any-return]


class Net(nn.Module):
    """A model whose microbatches take ways of two lengths, and come to a batch
    normalization in any order.

    Attributes:
        reads: Whether the module reads the running mean that it has just updated.
    """

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.there, self.elsewhere = Slow(), Slow()
        self.norm, self.second = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = self.norm(self.there(self.first(x)))
        longer = self.there(value) if float(x[0, 0]) > 0 else value
        value = self.second(self.elsewhere(longer) + self.norm(longer))
        if self.reads:
            value = value + self.norm.running_mean
        loss: torch.Tensor = ((self.last(value) - y) ** 2).mean()
        return loss


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(reads: bool) -> tuple[float, list[str]]:
    """Return the largest difference of the state from one process's, and the
    warnings of this rank.
    """
    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "pipeline_parallel_degree": 3, "microbatches": 8})
    warnings = Warnings()
    logging.getLogger("smdistributed.modelparallel").addHandler(warnings)
    torch.manual_seed(3)
    plain = Net(reads).double()
    reference = copy.deepcopy(plain)
    smp.set_partition(plain.there, 1)
    smp.set_partition(plain.elsewhere, 2)
    model = smp.DistributedModel(plain)

    @smp.step
    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        model.backward(model(x, y))

    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, 32, 8, generator=generator, dtype=torch.float64)
        step(model, x, y)
        for part, other in zip(x.chunk(8), y.chunk(8), strict=True):
            (reference(part, other) / 8).backward()
    state = model.state_dict()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    differences = [
        (state[name] - value).abs().max().item() for name, value in reference.state_dict().items()
    ]
    for name, parameter in model.local_named_parameters():
        mine, expected = parameter.grad, gradients[name]
        assert mine is not None
        assert expected is not None
        differences.append((mine - expected).abs().max().item())
    smp.barrier()
    return max(differences), warnings.texts


@pytest.mark.core
def test_microbatches_overlap_over_a_batch_normalization() -> None:
    for difference, warnings in run_ranks(3, train, False):
        assert difference < 1e-12
        assert warnings == []


def test_a_running_mean_that_is_read_puts_microbatches_in_turn() -> None:
    results = run_ranks(3, train, True)
    assert all(difference < 1e-12 for difference, _ in results)
    (warning,) = results[0][1]
    assert "microbatches run one after another: attribute " in warning
    assert " of module norm (BatchNorm1d)" in warning
