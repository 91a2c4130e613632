"""`smp.DistributedOptimizer` and the optimizers of `smp.optimizers`."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from jobs import BY_HAND, train_step
from ranks import RankError, run_ranks

# Every optimizer of torch, with its arguments beside the parameters. LBFGS cannot be split.
NAMES = sorted(
    name
    for name, optimizer_type in vars(torch.optim).items()
    if isinstance(optimizer_type, type)
    and issubclass(optimizer_type, torch.optim.Optimizer)
    and optimizer_type is not torch.optim.Optimizer
)


def network(seed: int = 3) -> nn.Sequential:
    """Return a small network in float64 that has only matrices, as Muon needs."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6, bias=False),
        nn.Tanh(),
        nn.Linear(6, 6, bias=False),
        nn.Tanh(),
        nn.Linear(6, 2, bias=False),
    ).double()


def batch(number: int, size: int = 8) -> torch.Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(number)).double()


def loss_of(output: torch.Tensor) -> Any:
    return (output - 1.0).pow(2).mean()


def alone(make: Any, steps: int = 4, clip: float | None = None) -> dict[str, torch.Tensor]:
    """Train in this process, and return the parameters."""
    model = network()
    optimizer = make(model.parameters())
    for number in range(steps):
        optimizer.zero_grad()
        halves = batch(number).chunk(2)
        for half in halves:
            (loss_of(model(half)) / 2).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def make_named(name: str, parameters: Any) -> Any:
    """Make one of torch's optimizers."""
    return getattr(torch.optim, name)(parameters, lr=0.01)


def split_model(config: dict[str, Any], first_on: tuple[int, ...] = (0, 0, 1)) -> Any:
    """Start smp, and return the network with its three matrices placed by hand."""
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    model = network()
    for layer, place in zip((0, 2, 4), first_on, strict=True):
        smp.set_partition(model[layer], place)
    return smp.DistributedModel(model)


def model_loss(model: Any, data: torch.Tensor) -> Any:
    return loss_of(model(data))


# --- Every optimizer of torch, also on a rank that owns nothing -----------------------------------


def _all_optimizers(first_on: tuple[int, ...]) -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.job.wrapped import wrapped

    model = split_model(BY_HAND, first_on)
    start = copy.deepcopy(network().state_dict())
    train = train_step(model_loss)
    # As scripts do, before the partition: later, Muon would see the parameters of other ranks
    # without their shape.
    plain = {
        name: make_named(name, model.parameters())
        for name in NAMES
        if name not in ("LBFGS", "SparseAdam")
    }
    train(model, batch(0))
    results = {}
    for name, one in plain.items():
        model.load_state_dict(start)
        wrapped.optimizers.clear()
        optimizer: Any = smp.DistributedOptimizer(one)
        for number in range(4):
            optimizer.zero_grad()
            train(model, batch(number))
            optimizer.step()
        results[name] = model.state_dict(), len(optimizer.local_state_dict()["state"])
    return results


@pytest.mark.parametrize("first_on", [(0, 0, 1), (1, 1, 1)])
def test_every_optimizer_of_torch_equals_one_process(first_on: tuple[int, ...]) -> None:
    ranks = run_ranks(2, _all_optimizers, first_on)
    for name in ranks[0]:
        want = alone(lambda parameters, name=name: make_named(name, parameters))
        for state, _ in (ranks[0][name], ranks[1][name]):
            for key, value in want.items():
                assert torch.allclose(state[key], value, atol=1e-10, rtol=0), (name, key)
    if first_on == (1, 1, 1):
        assert all(count == 0 for _, count in ranks[0].values())


def _sparse_adam() -> list[torch.Tensor]:
    import smdistributed.modelparallel.torch as smp

    smp.init(BY_HAND)
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True)
    smp.set_partition(table, 1)
    model = smp.DistributedModel(nn.Sequential(table, nn.Tanh()))
    optimizer: Any = smp.DistributedOptimizer(
        torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    )

    train = train_step(lambda model, ids: model(ids).pow(2).mean())
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(train(model, torch.arange(8)).reduce_mean())
        optimizer.clip_master_grads(1.0)
        optimizer.step()
    return losses


def test_sparse_gradients() -> None:
    first, second = run_ranks(2, _sparse_adam)
    assert first == second
    assert first[-1] < first[0]


def _lbfgs() -> None:
    import smdistributed.modelparallel.torch as smp

    model = split_model(BY_HAND)
    smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))


def test_lbfgs_is_refused_on_a_split_model() -> None:
    with pytest.raises(RankError, match="LBFGS works on all parameters at once"):
        run_ranks(2, _lbfgs)


# --- The object -----------------------------------------------------------------------------------


def _object() -> None:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.job.wrapped import wrapped

    model = split_model(BY_HAND)
    train = train_step(model_loss)
    all_of_it: list[Any] = list(model.parameters())
    bias, rest = all_of_it[:1], all_of_it[1:]
    groups_of_two: list[dict[str, Any]] = [{"params": bias, "weight_decay": 0.0}, {"params": rest}]
    plain = torch.optim.AdamW(groups_of_two, lr=0.1)
    groups = plain.param_groups
    early = torch.optim.lr_scheduler.LambdaLR(plain, lambda n: 1.0 / (n + 1))
    optimizer: Any = smp.DistributedOptimizer(
        plain, static_loss_scale=None, dynamic_loss_scale=True, unknown=1
    )
    assert optimizer is plain
    assert optimizer.param_groups is groups
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, smp.DistributedOptimizer)
    assert smp.DistributedOptimizer(optimizer) is optimizer
    assert wrapped.optimizers == [optimizer]
    assert optimizer.optimizer is optimizer
    assert optimizer.loss_scale == optimizer.loss_scaler.loss_scale == 1.0
    assert optimizer.overflow is False
    late = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for number in range(3):
        optimizer.zero_grad(set_grads_to_None=number == 1)
        before = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
        assert not before if number == 1 else all(not g.any() for g in before)
        train(model, batch(number))
        optimizer.step()
        early.step()
        late.step()
    assert calls == ["before", "after"] * 3
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert calls == ["before", "after"] * 4
    assert early.get_last_lr() != [0.1, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]
    extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra]})
    assert optimizer._param_id_to_index()[id(extra)] == 3


def test_it_is_the_users_object() -> None:
    run_ranks(2, _object, variables={"PYTHONWARNINGS": "error::UserWarning"})


def _scripts_own() -> list[float]:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.job.wrapped import wrapped

    class Own:
        """An optimizer as the fp16 one of AWS's older GPT scripts: masters around a torch
        optimizer.
        """

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.overflow = False
            self.said: list[str] = []

        def init_master_params(self) -> None:
            self.said.append("masters")

        def clip_master_grads(self, limit: float) -> str:
            return f"own clip {limit}"

        def state_dict(self) -> Any:
            return self.optimizer.state_dict()

        def load_state_dict(self, saved: Any) -> None:
            self.optimizer.load_state_dict(saved)

        def step(self) -> None:
            self.optimizer.step()

        @property
        def param_groups(self) -> Any:
            return self.optimizer.param_groups

    model = split_model({**BY_HAND, "fp16_params": True})
    train = train_step(model_loss)
    own: Any = Own(torch.optim.Adam(model.parameters(), lr=0.05))
    optimizer: Any = smp.DistributedOptimizer(own)
    assert optimizer is own
    assert wrapped.optimizers == [own]
    model.register_post_step_hook(lambda _, optimizer: optimizer.init_master_params())
    losses = []
    for _ in range(4):
        for parameter in model.local_parameters() if model.partitioned else []:
            parameter.grad = None
        losses.append(float(train(model, batch(0)).reduce_mean()))
        assert optimizer.clip_master_grads(1.0) == "own clip 1.0"
        optimizer.step()
    assert own.said == ["masters"]
    assert set(optimizer.state_dict()["state"]) == {0, 1, 2}
    assert set(optimizer.local_state_dict()["state"]) == ({0, 1} if smp.pp_rank() == 0 else {2})
    return losses


def test_a_scripts_own_optimizer_keeps_its_methods() -> None:
    first, second = run_ranks(2, _scripts_own)
    assert first == second
    assert first == sorted(first, reverse=True)


# --- State ----------------------------------------------------------------------------------------


def _state(wait: bool) -> list[float]:
    import smdistributed.modelparallel.torch as smp

    model = split_model(BY_HAND)
    train = train_step(model_loss)
    source = network()
    adam = torch.optim.AdamW(source.parameters(), lr=0.02)
    for number in range(3):
        adam.zero_grad()
        loss_of(source(batch(number))).backward()
        adam.step()
    full_state = copy.deepcopy(adam.state_dict())
    optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.5))
    if not wait:
        train(model, batch(9))
    model.load_state_dict(source.state_dict())
    optimizer.load_state_dict(full_state)
    assert optimizer.param_groups[0]["lr"] == 0.02
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        losses.append(float(train(model, batch(number)).reduce_mean()))
        optimizer.step()
    part = optimizer.local_state_dict()
    assert part["_smp_is_partial"] is True
    assert set(part["state"]) == ({0, 1} if smp.pp_rank() == 0 else {2})
    merged = optimizer.state_dict()
    assert set(merged["state"]) == {0, 1, 2}
    assert set(merged) == {"state", "param_groups"}
    empty = optimizer.state_dict(gather_to_rank0=True)
    assert bool(empty) == (smp.rank() == 0)
    torch.optim.AdamW(network().parameters()).load_state_dict(merged)  # a plain program can use it
    for saved in (part, optimizer.save_optimizer_backcompat(gather_if_shard=1)):
        optimizer.load_optimizer_backcompat(saved, 1)
        for index, one in optimizer.local_state_dict()["state"].items():
            assert torch.equal(one["exp_avg"], merged["state"][index]["exp_avg"])
    # A part of another rank: the parts are merged first.
    other = smp.allgather(part, smp.PP_GROUP)[1 - smp.pp_rank()]
    optimizer.load_state_dict(other)
    for index, one in optimizer.local_state_dict()["state"].items():
        assert torch.equal(one["exp_avg"], merged["state"][index]["exp_avg"])
    return losses


@pytest.mark.parametrize("wait", [False, True], ids=["after-partition", "before-partition"])
def test_state_goes_to_and_from_one_process(wait: bool) -> None:
    source = network()
    adam = torch.optim.AdamW(source.parameters(), lr=0.02)
    want = []
    for number in (0, 1, 2, 0, 1, 2):
        adam.zero_grad()
        loss = loss_of(source(batch(number)))
        loss.backward()
        adam.step()
        want.append(loss.item())
    first, second = run_ranks(2, _state, wait)
    assert first == second
    assert first == pytest.approx(want[3:], abs=1e-12)


# --- Sharding -------------------------------------------------------------------------------------


def _sharded(shard: bool) -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    model = split_model({**BY_HAND, "ddp": True, "shard_optimizer_state": shard})
    train = train_step(model_loss)
    optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    norms = []
    for number in range(4):
        optimizer.zero_grad()
        train(model, batch(number).chunk(2)[smp.dp_rank()])
        norms.append(optimizer.clip_master_grads(0.1))
        optimizer.step()
    elements = sum(
        v.numel()
        for parameter_state in optimizer.state.values()
        for v in parameter_state.values()
        if v.dim()
    )
    grads = all(p.grad is not None for p in model.local_parameters())
    own, gathered = optimizer.local_state_dict(gather_if_shard=False), optimizer.local_state_dict()
    full_state = optimizer.state_dict()
    for saved in (own, gathered, full_state):
        optimizer.load_state_dict(saved)
        assert set(optimizer.local_state_dict(gather_if_shard=False)["state"]) == set(own["state"])
    return {
        "parameters": model.state_dict(),
        "elements": elements,
        "grads": grads,
        "own": set(own["state"]),
        "gathered": set(gathered["state"]),
        "whole": full_state,
        "norms": norms,
    }


@pytest.mark.parametrize("shard", [False, True])
def test_two_replicas_of_two_partitions(shard: bool) -> None:
    ranks = run_ranks(4, _sharded, shard)
    plain: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        plain.append(torch.optim.AdamW(parameters, lr=0.05))
        return plain[0]

    want = alone(make, clip=0.1)
    for rank_result in ranks:
        for key, value in want.items():
            assert torch.allclose(rank_result["parameters"][key], value, atol=1e-10, rtol=0)
        assert rank_result["norms"] == ranks[0]["norms"]
        assert rank_result["grads"]
        for index, values in plain[0].state_dict()["state"].items():
            for key, value in values.items():
                assert torch.allclose(
                    rank_result["whole"]["state"][index][key], value, atol=1e-10, rtol=0
                )
    sizes = {0: 24, 1: 36, 2: 12}
    if shard:  # state is on its owner only: two numbers for each element
        assert [rank_result["own"] for rank_result in ranks] == [{1}, {2}, {0}, set()]
        for rank_result in ranks:
            assert rank_result["elements"] == 2 * sum(sizes[i] for i in rank_result["own"])
        assert [rank_result["gathered"] for rank_result in ranks] == [{0, 1}, {2}, {0, 1}, {2}]
    else:
        assert [rank_result["elements"] for rank_result in ranks] == [120, 24, 120, 24]


# --- LAMB, NovoGrad and Adam ----------------------------------------------------------------------


def lamb_reference(steps: int, **options: Any) -> list[torch.Tensor]:
    """Train with LAMB as its paper writes it, one number at a time."""
    model = network()
    params: list[Any] = list(model.parameters())
    decay, limit = options.get("weight_decay", 0.01), 1.0
    m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for step in range(1, steps + 1):
        model.zero_grad()
        for half in batch(step - 1).chunk(2):
            (loss_of(model(half)) / 2).backward()
        norm = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in params))
        with torch.no_grad():
            for i, p in enumerate(params):
                g = p.grad / max(1.0, norm / limit)
                m[i] = 0.9 * m[i] + 0.1 * g
                v[i] = 0.999 * v[i] + 0.001 * g * g
                r = (m[i] / (1 - 0.9**step)) / (
                    (v[i] / (1 - 0.999**step)).sqrt() + 1e-6
                ) + decay * p
                p -= 0.1 * (p.norm() / r.norm()) * r
    return [p.detach() for p in params]


def novograd_reference(steps: int) -> list[torch.Tensor]:
    """Train with NovoGrad as its paper writes it: no correction, decay inside the moment."""
    model = network()
    params: list[Any] = list(model.parameters())
    m: list[Any] = [0.0] * len(params)
    v: list[float] = [0.0] * len(params)
    for step in range(steps):
        model.zero_grad()
        for half in batch(step).chunk(2):
            (loss_of(model(half)) / 2).backward()
        with torch.no_grad():
            for i, p in enumerate(params):
                square = float(p.grad.pow(2).sum())
                v[i] = square if step == 0 else 0.98 * v[i] + 0.02 * square
                m[i] = 0.95 * m[i] + (p.grad / (math.sqrt(v[i]) + 1e-8) + 0.01 * p)
                p -= 0.01 * m[i]
    return [p.detach() for p in params]


def make_lamb(parameters: Any) -> Any:
    """Make LAMB."""
    import smdistributed.modelparallel.torch as smp

    return smp.optimizers.FusedLamb(parameters, lr=0.1)


def make_novograd(parameters: Any) -> Any:
    """Make NovoGrad with the settings of its paper."""
    import smdistributed.modelparallel.torch as smp

    return smp.optimizers.FusedNovoGrad(
        parameters,
        lr=0.01,
        betas=(0.95, 0.98),
        weight_decay=0.01,
        bias_correction=False,
        reg_inside_moment=True,
        grad_averaging=False,
    )


def make_adam(parameters: Any) -> Any:
    """Make Adam whose weight decay is in the gradient."""
    import smdistributed.modelparallel.torch as smp

    return smp.optimizers.FusedAdam(parameters, lr=0.01, adam_w_mode=False, weight_decay=0.1)


def make_adamw(parameters: Any) -> Any:
    """Make AdamW."""
    import smdistributed.modelparallel.torch as smp

    return smp.optimizers.FusedAdam(parameters, lr=0.01, weight_decay=0.1)


def adam_reference(kind: Any) -> list[torch.Tensor]:
    """Train with torch's own class."""
    model = network()
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for half in batch(step).chunk(2):
            (loss_of(model(half)) / 2).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _fused(config: dict[str, Any]) -> list[Any]:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.job.wrapped import wrapped

    model = split_model(config)
    train = train_step(model_loss)
    start, results = copy.deepcopy(network().state_dict()), []
    for make in (make_lamb, make_novograd, make_adam, make_adamw):
        model.load_state_dict(start)
        wrapped.optimizers.clear()
        optimizer: Any = smp.DistributedOptimizer(make(model.parameters()))
        for number in range(3):
            optimizer.zero_grad()
            train(model, batch(number))
            optimizer.step()
        results.append(model.state_dict())
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_fused_optimizers_follow_their_papers_and_torch(ranks: int) -> None:
    config = {**BY_HAND, "ddp": True, "shard_optimizer_state": ranks == 4}
    wants = [
        lamb_reference(3),
        novograd_reference(3),
        adam_reference(torch.optim.Adam),
        adam_reference(torch.optim.AdamW),
    ]
    for gots in run_ranks(ranks, _fused, config):
        for one_got, want in zip(gots, wants, strict=True):
            for value, expected in zip(one_got.values(), want, strict=True):
                assert torch.allclose(value, expected, atol=1e-10, rtol=0)


def _norm_without_init() -> float:
    vars(nn.utils).pop("get_total_norm", None)  # PyTorch 2.5 has no such function
    import smdistributed.modelparallel.torch as smp

    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer: Any = smp.optimizers.FusedLamb([parameter], lr=0.1)
    optimizer.step()
    return float(optimizer._norm)


def test_lamb_without_smp_init_needs_no_function_of_a_newer_torch() -> None:
    assert run_ranks(1, _norm_without_init) == [5.0]
