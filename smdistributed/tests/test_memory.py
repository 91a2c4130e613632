"""A rank keeps the parameters of its own partition only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs import BY_HAND
from ranks import run_ranks

WIDTH, LAYERS = 2048, 16  # 16 MiB a layer


def _resident() -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def _train(config: dict[str, Any]) -> dict[str, int]:
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    layers.insert(LAYERS // 2, nn.BatchNorm1d(WIDTH))
    plain = nn.Sequential(*layers)
    full_bytes = sum(t.untyped_storage().nbytes() for t in plain.state_dict().values())
    before = _resident()
    model = smp.DistributedModel(plain)

    evaluate = smp.step(lambda model, x: model(x))
    model.eval()
    with torch.no_grad():
        evaluate(model, torch.ones(2, WIDTH))
    smp.barrier()
    local = {id(t) for t in [*model.local_parameters(), *model.local_buffers()]}
    tensors = [*plain.parameters(), *plain.buffers()]
    return {
        "whole": full_bytes,
        "freed": before - _resident(),
        "local": sum(t.untyped_storage().nbytes() for t in tensors if id(t) in local),
        "remote": sum(t.untyped_storage().nbytes() for t in tensors if id(t) not in local),
        "counted": sum(p.numel() for p in model.parameters()),
    }


def test_parameters_of_other_partitions_take_no_memory() -> None:
    # Without a trace: its imports take memory.
    first, second = run_ranks(2, _train, {"pipeline_parallel_degree": 2, "skip_tracing": True})
    assert first["remote"] == second["remote"] == 0
    assert first["local"] + second["local"] == first["whole"]
    for result in (first, second):
        assert result["local"] >= 0.4 * result["whole"]
        # The first step's threads, messages and buffers take some of the freed memory.
        assert result["freed"] >= 0.8 * (result["whole"] - result["local"]), result
        assert result["counted"] == LAYERS * WIDTH * (WIDTH + 1) + 2 * WIDTH


def _views(config: dict[str, Any]) -> int:
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    memory = torch.arange(8.0)
    plain = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for i in range(2):
        plain[i].weight = nn.Parameter(memory[4 * i : 4 * i + 4].view(2, 2))
        smp.set_partition(plain[i], i)
    model = smp.DistributedModel(plain)

    evaluate = smp.step(lambda model, x: model(x))
    out = evaluate(model, torch.ones(1, 2)).outputs[0]
    smp.barrier()
    return int(out.sum())


def test_parameters_that_share_one_storage_are_kept_where_they_are_used() -> None:
    config = {**BY_HAND, "microbatches": 1}
    x = torch.ones(1, 2) @ torch.arange(4.0).view(2, 2).T @ torch.arange(4.0, 8.0).view(2, 2).T
    assert run_ranks(2, _views, config) == [int(x.sum())] * 2
