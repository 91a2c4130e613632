"""A model trained on several ranks equals the same model trained in one process.

One job trains all models, one after another, under one configuration.
``SMP_FULL_MATRIX=1`` runs every combination.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import pytest
import torch

import equality
import networks
from ranks import run_ranks

PLAIN = tuple(name for name in networks.BUILD if name != "gpt2")
BY_HAND = tuple(name for name, kind in networks.BUILD.items() if hasattr(kind, "places"))


def compare(
    config: dict[str, Any], names: tuple[str, ...], dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Train each model on these ranks, and a copy in this process.

    Return the differences by model.
    """
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    out = {}
    for name in names:
        plain = networks.build(name, dtype)
        out[name] = equality.compare(
            plain,
            functools.partial(networks.loss_of, name),
            functools.partial(networks.data, name, dtype=dtype),
            owner=networks.places(plain, smp.pp_size()),
        )
    smp.barrier()
    return out


def check(world: int, config: dict[str, Any], names: tuple[str, ...]) -> None:
    for rank, result in enumerate(run_ranks(world, compare, config, names)):
        for name, worst in result.items():
            where = f"{name} on rank {rank}: {worst}"
            degree = config["pipeline_parallel_degree"]
            assert worst.partitions == (min(degree, 2) if name in BY_HAND else degree), where
            assert worst.largest <= 1e-10, where
            # A module that is called twice adds its gradients in another order.
            if world == degree and name != "loop":
                assert worst.bitwise, where


def _config(
    degree: int, microbatches: int, pipeline: str, replicas: str, *, shard: bool, skip: bool
) -> tuple[int, dict[str, Any]]:
    config: dict[str, Any] = {
        "pipeline_parallel_degree": degree,
        "microbatches": microbatches,
        "pipeline": pipeline,
        "skip_tracing": skip,
    }
    if replicas != "1":
        config |= {"ddp": True, "placement_strategy": replicas, "shard_optimizer_state": shard}
    return degree * (1 if replicas == "1" else 2), config


# All pairs of values are in one of these.
PAIRS = [
    (2, 1, "interleaved", "1", False, False),
    pytest.param(2, 4, "simple", "1", False, True, marks=pytest.mark.core),
    (2, 8, "interleaved", "cluster", True, True),
    pytest.param(2, 4, "interleaved", "spread", False, False, marks=pytest.mark.core),
    (3, 8, "simple", "1", False, True),
    (3, 4, "interleaved", "cluster", False, False),
    (3, 1, "simple", "spread", True, False),
    (4, 4, "interleaved", "1", False, False),
    (4, 1, "simple", "cluster", True, True),
    (4, 8, "interleaved", "spread", True, True),
]


@pytest.mark.parametrize(("degree", "microbatches", "pipeline", "replicas", "shard", "skip"), PAIRS)
def test_equals_one_process(
    degree: int, microbatches: int, pipeline: str, replicas: str, shard: bool, skip: bool
) -> None:
    world, config = _config(degree, microbatches, pipeline, replicas, shard=shard, skip=skip)
    check(world, config, PLAIN)


def test_gpt2_equals_one_process() -> None:
    check(3, {"pipeline_parallel_degree": 3, "microbatches": 4}, ("gpt2",))


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
def test_models_of_other_kinds_equal_one_process(pipeline: str) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": pipeline}
    check(2, config, tuple(networks.KINDS))


def test_few_active_microbatches_change_nothing() -> None:
    check(2, {"pipeline_parallel_degree": 2, "microbatches": 8, "active_microbatches": 2}, PLAIN)


def test_data_parallelism_alone_equals_one_process() -> None:
    check(2, {"pipeline_parallel_degree": 1, "microbatches": 2, "ddp": True}, PLAIN)


def test_single_precision_is_close() -> None:
    (first, second) = run_ranks(
        2, compare, {"pipeline_parallel_degree": 2, "microbatches": 4}, PLAIN[:2], torch.float32
    )
    for worst in [*first.values(), *second.values()]:
        assert worst.largest <= 2e-4


FULL = [
    case
    for case in itertools.product(
        (2, 3, 4),
        (1, 4, 8),
        ("interleaved", "simple"),
        ("1", "cluster", "spread"),
        (False, True),
        (False, True),
    )
    if case[3] != "1" or not case[4]
]


@pytest.mark.skipif(
    os.environ.get("SMP_FULL_MATRIX") != "1", reason="takes half an hour: SMP_FULL_MATRIX=1 runs it"
)
@pytest.mark.parametrize(("degree", "microbatches", "pipeline", "replicas", "shard", "skip"), FULL)
def test_full_matrix(
    degree: int, microbatches: int, pipeline: str, replicas: str, shard: bool, skip: bool
) -> None:
    world, config = _config(degree, microbatches, pipeline, replicas, shard=shard, skip=skip)
    check(world, config, tuple(networks.BUILD))
