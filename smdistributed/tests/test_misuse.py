"""Ranks that do not do the same are told, and where: another step function, another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from jobs import BY_HAND
from ranks import run_ranks

HAND = {**BY_HAND, "microbatches": 1}


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Net(nn.Module):
    def __init__(self, width: int, tail: bool) -> None:
        import smdistributed.modelparallel.torch as smp

        super().__init__()
        self.tail, self.first, self.second = tail, nn.Linear(4, 4), nn.Linear(4, width)
        smp.set_partition(self.second, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(x)
        if self.tail:
            return self.second(result)  # type: ignore[no-any-return]
        return torch.tanh(self.second(result))


def two_functions(odd: int, tail: bool) -> list[str]:
    """Return what each rank says when rank ``odd`` evaluates while the other one trains, and then of a common step."""
    import smdistributed.modelparallel.torch as smp

    smp.init(HAND)
    model = smp.DistributedModel(Net(4, tail))

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    @smp.step
    def evaluate(model: Any, x: torch.Tensor) -> None:
        model(x)

    train(model, torch.ones(2, 4))
    found = [said(lambda: (evaluate if smp.rank() == odd else train)(model, torch.ones(2, 4)))]
    smp.barrier()
    return [*found, said(lambda: train(model, torch.ones(2, 4)))]


def check(odd: int, tail: bool) -> None:
    for rank, (text, after) in enumerate(run_ranks(2, two_functions, odd, tail)):
        assert "StepError" in text or "PeerError" in text, f"rank {rank}: {text}"
        assert "rank 0 (pp_rank 0) runs the step function two_functions.<locals>." in text, text
        assert after == "nothing"


def test_ranks_in_different_step_functions_are_told() -> None:
    check(0, tail=True)
    check(1, tail=False)


def two_models() -> str:
    import smdistributed.modelparallel.torch as smp

    smp.init(HAND)
    model = smp.DistributedModel(Net(4 + smp.rank(), True))

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    return said(lambda: train(model, torch.ones(2, 4)))


def test_ranks_with_different_models_are_told() -> None:
    for text in run_ranks(2, two_models):
        assert text.startswith("SMPConfigError: the models of the ranks differ: rank 0 has parameter 'second.weight' ")
        assert "of shape (4, 4) on partition 1, rank 1 has parameter 'second.weight' of shape (5, 4)" in text
