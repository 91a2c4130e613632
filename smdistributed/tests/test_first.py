from typing import Any

from ranks import run_ranks


def _sum(config: dict[str, Any]) -> float:
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    @smp.step
    def train(model: Any, x: torch.Tensor) -> Any:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    return float(train(model, torch.ones(4, 4)).reduce_mean())


def test_two_ranks_train() -> None:
    first, second = run_ranks(2, _sum, {"pipeline_parallel_degree": 2, "microbatches": 2})
    assert first == second
