"""torch.compile of a partition, and over modules that have children on other partitions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import equality
import networks
from jobs import BY_HAND
from ranks import run_ranks

WIDTH = 8


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.c(self.b(self.a(x).sin()).cos())


class Net(nn.Module):
    """``where`` are the partitions of the first layer, of the middle one, and of the module in
    that.
    """

    def __init__(self, where: tuple[int, int, int, int, int], compiled: str) -> None:
        import smdistributed.modelparallel.torch as smp

        super().__init__()
        self.first, self.middle, self.out = nn.Linear(WIDTH, WIDTH), Middle(), nn.Linear(WIDTH, 10)
        for module, index in zip(
            [self.first, self.middle, *self.middle.children()], where, strict=True
        ):
            smp.set_partition(module, index)
        if compiled == "in place":
            self.middle.compile(backend="eager")
        elif compiled == "around":
            self.middle = torch.compile(self.middle, backend="aot_eager")  # type: ignore[assignment]
            smp.set_partition(self.middle, where[1])
        self.compiled = compiled

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.log_softmax(
            (_traced if self.compiled == "function" else _inner)(self, x), 1
        )


def _inner(net: Net, x: torch.Tensor) -> Any:
    return net.out(net.middle(net.first(x).sin()))


_traced = torch.compile(_inner, backend="eager")


def _loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(x)
    return out, nn.functional.nll_loss(out, y)


def _compiled(where: tuple[int, int, int, int, int], compiled: str) -> float:
    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "microbatches": 4})
    torch.manual_seed(2)
    plain = Net(where, compiled).double()
    return equality.compare(plain, _loss, functools.partial(networks.data, "")).largest


@pytest.mark.parametrize("compiled", ["in place", "around", "function"])
@pytest.mark.parametrize(
    "where", [(0, 1, 1, 1, 1), (0, 0, 0, 1, 0), (1, 1, 1, 0, 1)], ids=["whole", "over", "back"]
)
def test_compiled_parts_equal_one_process(
    where: tuple[int, int, int, int, int], compiled: str
) -> None:
    assert max(run_ranks(2, _compiled, where, compiled)) <= 1e-9
