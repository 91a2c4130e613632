"""Train one model on the ranks of a job and a copy of it in each process, and compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jobs import forget

STEPS, BATCH = 4, 8
Loss = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Difference:
    """The largest differences between this rank and one process.

    Attributes:
        gradient: Over all steps and this rank's parameters.
        loss: Over all microbatches.
        output: Of an evaluation after training.
        parameter: Over the whole model after training.
        bitwise: All gradients are equal to the last bit.
        partitions: Number of partitions that have modules.
    """

    gradient: float = 0.0
    loss: float = 0.0
    output: float = 0.0
    parameter: float = 0.0
    bitwise: bool = True
    partitions: int = 0

    @property
    def largest(self) -> float:
        return max(self.gradient, self.loss, self.output, self.parameter)


def squares(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model's output for x, and its mean squared distance from y."""
    out = model(x)
    return out, ((out - y) ** 2).mean()


def rows(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of width 4."""
    both = torch.randn(2, count, 4, generator=torch.Generator().manual_seed(seed)).double()
    return both[0], both[1]


def compare(
    plain: nn.Module,
    loss_of: Loss,
    data: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
    *,
    owner: dict[str, int] | None = None,
) -> Difference:
    """Train ``plain`` with Adam under the configuration that ``smp.init`` got.

    Afterwards another model can follow.

    Args:
        plain: The model.
        loss_of: Returns the outputs and the loss of a model on inputs and labels.
        data: Returns inputs and labels for a seed and a number of samples.
        owner: The partition of each module; None: as the configuration says.
    """
    import smdistributed.modelparallel.torch as smp

    reference = copy.deepcopy(plain)
    reference_optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    model = smp.DistributedModel(plain, bucket_cap_mb=0.001)
    optimizer: Any = smp.DistributedOptimizer(plain_optimizer)
    if owner is not None:
        model.preset_partition(owner)

    @smp.step
    def train(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        out, loss = loss_of(model, x, y)
        model.backward(loss)
        return out, loss

    @smp.step
    def evaluate(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        out, loss = loss_of(model, x, y)
        return out, loss.item()

    microbatches, replicas, mine = smp.num_microbatches(), smp.dp_size(), smp.dp_rank()
    difference = Difference()
    for step in range(STEPS):
        x, y = data(step, BATCH * replicas)
        optimizer.zero_grad()
        own_rows = slice(mine * BATCH, (mine + 1) * BATCH)
        _, loss = train(model, x[own_rows], y[own_rows])
        reference_optimizer.zero_grad()
        losses = []
        for xs, ys in zip(
            x.chunk(replicas * microbatches), y.chunk(replicas * microbatches), strict=True
        ):
            _, part = loss_of(reference, xs, ys)
            (part / microbatches / replicas).backward()  # type: ignore[no-untyped-call]
            losses.append(part.item())
        expected = losses[mine * microbatches : (mine + 1) * microbatches]
        difference.loss = max(
            [
                difference.loss,
                *(abs(a.item() - b) for a, b in zip(loss.outputs, expected, strict=True)),
            ]
        )
        gradients = {n: p.grad for n, p in reference.named_parameters()}
        for key, parameter in model.local_named_parameters():
            ours, theirs = parameter.grad, gradients[key]
            assert (ours is None) == (theirs is None), key
            if ours is not None and theirs is not None:
                ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
                difference.gradient = max(difference.gradient, (ours - theirs).abs().max().item())
                difference.bitwise &= torch.equal(ours, theirs)
        optimizer.step()
        reference_optimizer.step()
    model.eval()
    reference.eval()
    x, y = data(99, BATCH)
    with torch.no_grad():
        out, values = evaluate(model, x, y)
        chunks = zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)
        plain_out = torch.cat([loss_of(reference, xs, ys)[0] for xs, ys in chunks])
    assert isinstance(values, list)
    assert len(values) == microbatches
    assert not any(t.requires_grad for t in out.outputs)
    merged, full_state = model.state_dict(), reference.state_dict()
    assert list(merged) == list(full_state)
    difference.output = (out.concat() - plain_out).abs().max().item()
    difference.parameter = max(
        [
            0.0,
            *(
                (merged[key].to(full_state[key].device) - full_state[key]).abs().max().item()
                for key in full_state
            ),
        ]
    )
    difference.partitions = len(set(model.owner.values()))
    forget()
    return difference
