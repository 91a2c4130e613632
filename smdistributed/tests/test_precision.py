"""fp16 and bf16: master weights, loss scaling, clipping over partitions, and
`smp.amp.GradScaler`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from jobs import BY_HAND, train_step
from ranks import run_ranks


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


def loss_of(output: torch.Tensor) -> Any:
    return (output.float() - 1.0).pow(2).mean()


def wrapped(config: dict[str, Any], dtype: torch.dtype, places: tuple[int, int] = (0, 1)) -> Any:
    """Start smp, and return the network with its two layers placed by hand, and its step."""
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    with smp.model_creation(dtype=dtype):
        model = network(dtype)
    for layer, place in zip((0, 2), places, strict=True):
        smp.set_partition(model[layer], place)

    train = train_step(lambda model, data, factor=1.0: loss_of(model(data)) * factor)
    return smp.DistributedModel(model), train


# --- The scale ------------------------------------------------------------------------------------


def scales(arguments: dict[str, Any], steps: str) -> list[float]:
    """Return the scale after each step: ``x`` is an overflow, ``.`` a good step."""
    from smdistributed.modelparallel.torch.training.precision import LossScaler

    scaler = LossScaler.of(None, True, arguments)
    seen = []
    for step in steps:
        scaler.update_scale(step == "x")
        seen.append(scaler.loss_scale)
    return seen


def test_the_dynamic_scale() -> None:
    assert scales({}, "x.x") == [2.0**31, 2.0**31, 2.0**30]
    assert scales({"init_scale": 4, "scale_window": 2}, "..x....") == [4, 8, 4, 4, 8, 8, 16]
    assert scales({"init_scale": 4, "scale_factor": 4, "min_scale": 2}, "xx") == [2, 2]
    # The first overflows are forgiven; a growth of the scale forgives anew, or
    # with hysteresis each good step.
    assert scales({"init_scale": 64, "delayed_shift": 2, "scale_window": 3}, "x.x...xx") == [
        64, 64, 32, 32, 32, 64, 64, 32,
    ]  # fmt: skip
    renewed = {"init_scale": 64, "delayed_shift": 2, "consecutive_hysteresis": True}
    assert scales(renewed, "x.x.xx") == [64, 64, 64, 64, 64, 32]


def test_the_scale_is_saved() -> None:
    from smdistributed.modelparallel.torch.training.precision import LossScaler

    arguments = {"init_scale": 64, "delayed_shift": 3, "scale_window": 4}
    first, second = LossScaler.of(None, True, arguments), LossScaler.of(None, True, arguments)
    for step in "x..x":
        first.update_scale(step == "x")
    second.load_state_dict(first.state_dict())
    for step in "x....x":
        first.update_scale(step == "x")
        second.update_scale(step == "x")
        assert first.loss_scale == second.loss_scale


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None, True, {"scale_windw": 1}), "did you mean 'scale_window'"),
        ((None, True, {"min_scale": 0}), "min_scale must be greater than 0, got 0"),
        ((None, True, {"delayed_shift": 0}), "delayed_shift must be at least 1"),
        ((None, True, {"scale_factor": 1}), "scale_factor must be greater than 1"),
        ((-1.0, False, None), "static_loss_scale must be greater than 0, got -1.0"),
    ],
)
def test_wrong_arguments_of_the_scale(arguments: Any, error: str) -> None:
    from smdistributed.modelparallel.torch.training.precision import LossScaler

    with pytest.raises(ValueError, match=error):
        LossScaler.of(*arguments)


# --- Training -------------------------------------------------------------------------------------


def alone(
    dtype: torch.dtype, steps: int, clip: float, lr: float
) -> tuple[list[float], list[torch.Tensor]]:
    """Train in this process, with float32 copies of half-precision parameters."""
    model = network(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    adam = torch.optim.AdamW(masters, lr=lr)
    norms = []
    for number in range(steps):
        model.zero_grad()
        for half in batch(number).to(dtype).chunk(2):
            (loss_of(model(half)) / 2).backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters, clip)))
        adam.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
    return norms, [p.detach() for p in masters]


def _trains(name: str, scale: float | None) -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    model, train = wrapped({**BY_HAND, name: True}, dtype)
    optimizer: Any = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        static_loss_scale=scale,
        dynamic_loss_scale=False,
    )
    norms, losses = [], []
    for number in range(6):
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(train(model, batch(number).to(dtype)).reduce_mean()))
        norms.append(optimizer.clip_master_grads(0.5))
        optimizer.step()
        assert optimizer._global_grad_norm == norms[-1]
    for parameter, master in optimizer._smp_masters.pairs.values():
        assert parameter.dtype == dtype
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.to(dtype))
    full_state = optimizer.state_dict()["_smp_precision"]["masters"]
    assert all(
        parameter_state["exp_avg"].dtype == torch.float32
        for parameter_state in optimizer.local_state_dict()["state"].values()
    )
    # The script changes the model: the masters follow where they differ.
    masters = {index: master.clone() for index, (_, master) in optimizer._smp_masters.pairs.items()}
    local = next(iter(model.local_parameters()))
    with torch.no_grad():
        local[0] = 3.0
    optimizer.zero_grad()
    optimizer.update_master_grads()
    changed = [not torch.equal(masters[i], m) for i, (_, m) in optimizer._smp_masters.pairs.items()]
    assert changed == [True, False]
    index = next(iter(masters))
    assert torch.equal(optimizer._smp_masters.pairs[index][1][1:], masters[index][1:])
    local.data[1] = 4.0
    optimizer.reload_model_params(model, optimizer)
    assert bool((optimizer._smp_masters.pairs[index][1][1] == 4.0).all())
    return {"losses": losses, "norms": norms, "masters": full_state}


@pytest.mark.parametrize(("name", "scale"), [("bf16", 1.0), ("fp16", 1.0), ("fp16", 256.0)])
def test_half_precision_equals_one_process_with_masters(name: str, scale: float) -> None:
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    norms, masters = alone(dtype, 6, 0.5, 2e-3)
    ranks = run_ranks(2, _trains, name, scale)
    assert ranks[0]["losses"] == ranks[1]["losses"]
    for rank_result in ranks:
        # A scale that is a power of two changes no digit, but for fp16 gradients too small for it.
        tolerance = 1e-6 if scale == 1.0 else 1e-2
        assert rank_result["norms"] == pytest.approx(norms, rel=tolerance)
        for index, master in enumerate(masters):
            tolerance = 1e-6 if scale == 1.0 else 1e-4
            assert torch.allclose(rank_result["masters"][index], master, atol=tolerance)


def _small_updates() -> list[float]:
    import smdistributed.modelparallel.torch as smp

    dtype = torch.bfloat16
    model, train = wrapped({**BY_HAND, "bf16": True}, dtype)
    first = {index: p.detach().clone() for index, p in enumerate(model.parameters())}
    optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=2e-4))
    losses, stuck = [], 0
    for number in range(100):
        optimizer.zero_grad()
        losses.append(float(train(model, batch(0).to(dtype)).reduce_mean()))
        optimizer.step()
        if number == 0:
            stuck = sum(
                [int((p == first[i]).sum()) for i, (p, _) in optimizer._smp_masters.pairs.items()]
            )
    # The first update is lost in some weights; the masters add up the following ones.
    assert stuck > sum(
        [int((p == first[i]).sum()) for i, (p, _) in optimizer._smp_masters.pairs.items()]
    )
    return losses


def test_masters_add_up_updates_that_are_too_small_for_the_weights() -> None:
    first, second = run_ranks(2, _small_updates)
    assert first == second
    assert first[-1] < first[0]


# --- Overflow -------------------------------------------------------------------------------------


def _overflow() -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    model, train = wrapped({**BY_HAND, "fp16": True}, torch.float16)
    optimizer: Any = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2**24, "scale_window": 3},
    )
    data = batch(0).half()
    seen, losses = [], []
    for number in range(24):
        optimizer.zero_grad()
        losses.append(float(train(model, data).reduce_mean()))
        if number == 20 and smp.pp_rank() == 1:  # on one rank only: all skip
            next(iter(model.local_parameters())).grad.view(-1)[0] = float("inf")
        before = [p.detach().clone() for p in model.local_parameters()]
        steps = sum([float(state["step"]) for state in optimizer.state.values()])
        norm = optimizer.clip_master_grads(1.0)
        optimizer.step()
        if optimizer.overflow:
            assert norm == -1.0
            assert all(
                torch.equal(a, b) for a, b in zip(before, model.local_parameters(), strict=True)
            )
            assert sum([float(state["step"]) for state in optimizer.state.values()]) == steps
        else:
            assert norm > 0
        seen.append((optimizer.overflow, optimizer.loss_scale))
    assert model.loss_scaler is optimizer.loss_scaler
    optimizer.loss_scale = 8.0
    assert optimizer.loss_scaler.cur_scale == 8.0
    return {"seen": seen, "losses": losses}


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    first, second = run_ranks(2, _overflow)
    assert first == second
    overflows = [overflow for overflow, _ in first["seen"]]
    assert overflows[0]  # 2**24 is too much for fp16
    assert not all(overflows[:12])  # and is lowered until it is not
    assert overflows[20]
    assert first["seen"][20][1] == first["seen"][19][1] / 2
    assert max(scale for _, scale in first["seen"]) == 2**23
    assert first["losses"][-1] < first["losses"][0] / 2


def _optimizer_first() -> None:
    import smdistributed.modelparallel.torch as smp

    smp.init({"fp16": True})
    module = network(torch.float16)
    optimizer: Any = smp.DistributedOptimizer(
        torch.optim.AdamW(module.parameters()), static_loss_scale=4.0
    )
    model = smp.DistributedModel(module)
    value = torch.ones((), requires_grad=True)
    model.backward(value)
    assert value.grad == optimizer.loss_scale == 4.0


def test_the_model_takes_the_scale_of_an_optimizer_that_was_wrapped_before_it() -> None:
    run_ranks(1, _optimizer_first)


# --- Without a pipeline, and several replicas -----------------------------------------------------


def _replicas() -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    model, _ = wrapped(
        {"ddp": True, "fp16": True, "shard_optimizer_state": True}, torch.float16, (0, 0)
    )
    optimizer: Any = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-3), static_loss_scale=4.0
    )
    norms = []
    for number in range(6):
        optimizer.zero_grad(set_grads_to_None=True)
        for half in batch(number).half().chunk(2):  # each replica sees all: the mean is the same
            optimizer.backward(loss_of(model(half)) / 2, update_master_grads=False)
        optimizer.update_master_grads()
        norms.append(optimizer.clip_master_grads(0.5))
        optimizer.step()
    masters = optimizer._smp_masters.pairs
    part = optimizer.local_state_dict()
    own = optimizer.local_state_dict(gather_if_shard=False)
    optimizer.load_state_dict(part)
    assert set(optimizer._smp_masters.pairs) == set(masters)
    return {
        "norms": norms,
        "masters": part["_smp_precision"]["masters"],
        "own": set(own["_smp_precision"]["masters"]),
    }


def test_masters_are_on_the_replica_that_owns_the_shard() -> None:
    norms, masters = alone(torch.float16, 6, 0.5, 2e-3)
    first, second = run_ranks(2, _replicas)
    assert first["own"] == {0}
    assert second["own"] == {1, 2, 3}
    for one in (first, second):
        assert one["norms"] == pytest.approx(norms, rel=1e-2)
        for index, master in enumerate(masters):
            assert torch.allclose(one["masters"][index], master, atol=1e-4)


# --- Tensor parallelism ---------------------------------------------------------------------------


def _tensor() -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True})
    with smp.tensor_parallelism():
        plain_model = network()
    model = smp.DistributedModel(plain_model)
    assert any(model.is_distributed_parameter(p) for p in model.parameters())
    optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    norms = []
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(number))).backward()
        norms.append(
            (optimizer.clip_master_grads(100.0, float("inf")), optimizer.clip_master_grads(0.3))
        )
        optimizer.step()
    full_state = optimizer.state_dict()
    plain = torch.optim.AdamW(network().parameters(), lr=0.05)
    plain.load_state_dict(full_state)
    averages = {
        index: parameter_state["exp_avg"].clone()
        for index, parameter_state in optimizer.local_state_dict()["state"].items()
    }
    optimizer.load_state_dict(full_state)
    for index, one in optimizer.local_state_dict()["state"].items():
        assert torch.equal(one["exp_avg"], averages[index])
    return {
        "norms": norms,
        "state": {index: state["exp_avg"] for index, state in plain.state_dict()["state"].items()},
    }


def test_clip_counts_split_parameters_once() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(number))).backward()
        largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
        norms.append((largest, float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))))
        optimizer.step()
    for rank_result in run_ranks(2, _tensor):
        assert torch.tensor(rank_result["norms"]).allclose(torch.tensor(norms), rtol=1e-5)
        for index, value in rank_result["state"].items():
            assert torch.allclose(
                value, optimizer.state_dict()["state"][index]["exp_avg"], atol=1e-6
            )


# --- GradScaler -----------------------------------------------------------------------------------


def _scaler() -> list[tuple[bool, float]]:
    import smdistributed.modelparallel.torch as smp

    off = smp.amp.GradScaler()
    assert not off.is_enabled()
    assert isinstance(off, torch.amp.GradScaler)
    model, _ = wrapped(BY_HAND, torch.float32, (1, 1))  # rank 0 owns nothing
    optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    scaler = smp.amp.GradScaler(init_scale=64.0, growth_interval=2, enabled=True)

    @smp.step
    def train(model: Any, data: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = loss_of(model(data))
        model.backward(scaler.scale(loss))
        return loss

    seen = []
    for number in range(5):
        optimizer.zero_grad()
        train(model, batch(number))
        before = [p.detach().clone() for p in model.local_parameters()]
        if number == 3 and smp.pp_rank() == 1:
            next(iter(model.local_parameters())).grad[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        off.step(optimizer) if number == 4 else None
        same = all(torch.equal(a, b) for a, b in zip(before, model.local_parameters(), strict=True))
        seen.append((same or not before, scaler.get_scale()))
    return seen


def test_grad_scaler_finds_infinite_gradients_on_all_ranks() -> None:
    first, second = run_ranks(2, _scaler)
    assert [scale for _, scale in first] == [scale for _, scale in second] == [64, 128, 128, 64, 64]
    assert [same for same, _ in second] == [False, False, False, True, False]
