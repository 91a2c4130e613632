"""Sharded data parallelism: equal to one process and to PyTorch's fully_shard,
and a part of the memory.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import equality
import networks
from jobs import forget, train_step
from ranks import run_ranks
from test_equality import PLAIN, compare


def config(degree: int, **more: Any) -> dict[str, Any]:
    return {"ddp": True, "sharded_data_parallel_degree": degree, "sdp_gradient_clipping": 0, **more}


# --- Equal to one process -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "degree", "microbatches"),
    [
        pytest.param(2, 2, 4, marks=pytest.mark.core),
        (2, 2, 1),
        (4, 4, 1),
        (4, 4, 4),
        (4, 2, 1),
        (4, 2, 4),
    ],
)
def test_equals_one_process(world: int, degree: int, microbatches: int) -> None:
    for rank, result in enumerate(
        run_ranks(world, compare, config(degree, microbatches=microbatches), PLAIN)
    ):
        for name, worst in result.items():
            assert worst.largest <= 1e-10, f"{name} on rank {rank}: {worst}"


def test_models_of_other_kinds_equal_one_process() -> None:
    results = run_ranks(2, compare, config(2, microbatches=4), networks.SHARED)
    assert max(worst.largest for result in results for worst in result.values()) <= 1e-10, results


class Special(nn.Module):
    """Frozen parameters, one without dimensions, one that two blocks share, a
    buffer, rows that do not divide.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8)) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.norm = nn.LayerNorm(8)
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.out = nn.Linear(8, 10)
        self.blocks[3][0].weight = self.blocks[2][0].weight  # type: ignore[index]
        self.blocks[1].requires_grad_(False)
        self.out.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return functional.log_softmax(self.out(self.norm(x) + self.shift), 1)


def special_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(x)
    return out, functional.nll_loss(out, y)


def _special(settings: dict[str, Any]) -> list[equality.Difference]:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.sharding import mesh, wrap

    smp.init(settings)
    plain = Special().double()
    # Two blocks share a parameter: the other parameters in them are gathered alone.
    assert wrap.blocks(plain) == [*plain.blocks[:2], plain.blocks[2][2], plain.blocks[3][2]]  # type: ignore[index]
    differences = [equality.compare(plain, special_loss, functools.partial(networks.data, ""))]
    assert [name for name, p in plain.named_parameters() if not mesh.is_sharded(p)] == ["scale"]
    gpt2: Any = networks.build("gpt2")
    layers = list(gpt2.transformer.h)
    assert wrap.blocks(gpt2) == layers
    smp.set_activation_checkpointing(gpt2.transformer.h)
    loss = functools.partial(networks.loss_of, "gpt2")
    differences.append(equality.compare(gpt2, loss, functools.partial(networks.data, "gpt2")))
    assert all(isinstance(layer, torch.distributed.fsdp.FSDPModule) for layer in (*layers, gpt2))
    return differences


@pytest.mark.parametrize(("world", "degree", "live"), [(2, 2, None), (4, 2, 10**6)])
def test_special_parameters_and_activation_checkpointing_equal_one_process(
    world: int, degree: int, live: int | None
) -> None:
    settings = config(degree, microbatches=2, sdp_max_live_parameters=live)
    for result in run_ranks(world, _special, settings):
        assert max(worst.largest for worst in result) <= 1e-10, result


def _plain_backward(settings: dict[str, Any], norm: float) -> list[torch.Tensor]:
    """Outside a step; two backward passes in each."""
    import smdistributed.modelparallel.torch as smp

    smp.init(settings)
    plain = Special().double()
    optimizer = smp.DistributedOptimizer(torch.optim.Adagrad(plain.parameters(), lr=0.05))
    model = smp.DistributedModel(plain, backward_passes_per_step=2)

    evaluate = smp.step(lambda model, x: model(x))
    for number in range(6):
        x, y = networks.data("", number, 8)
        with torch.no_grad():  # between two passes that add up
            model(x)
            evaluate(model, x)
        own_rows = slice(4 * smp.rank(), 4 * smp.rank() + 4)
        functional.nll_loss(model(x[own_rows]), y[own_rows]).backward()  # type: ignore[no-untyped-call]
        if number % 2:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm_found = torch.nn.utils.get_total_norm(gradients, norm)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm_found)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.state_dict().values())


@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_a_plain_backward_pass_sums_and_is_clipped(norm: float) -> None:
    plain = Special().double()
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.05)
    for number in range(6):
        x, y = networks.data("", number, 8)
        functional.nll_loss(plain(x), y).backward()  # type: ignore[no-untyped-call]
        if number % 2:
            assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm) > 0.05
            optimizer.step()
            optimizer.zero_grad()
    for values in run_ranks(2, _plain_backward, config(2), norm):
        for ours, theirs in zip(values, plain.state_dict().values(), strict=True):
            assert torch.allclose(ours.double(), theirs.double(), rtol=0, atol=1e-10)


# --- Equal to fully_shard -------------------------------------------------------------------------


def network(width: int = 16, layers: int = 4) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    )


def error_of(out: torch.Tensor) -> torch.Tensor:
    return (out.float() - 1.0).pow(2).mean()


def _against_fully_shard(name: str) -> list[bool]:
    import smdistributed.modelparallel.torch as smp

    options = {name: True} if name else {}
    smp.init(config(2, microbatches=2, **options))
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    direct: Any = network()
    policy = MixedPrecisionPolicy() if half is None else MixedPrecisionPolicy(half, torch.float32)
    for block in direct:
        fully_shard(block, mp_policy=policy)
    fully_shard(direct, mp_policy=policy)
    adam = torch.optim.AdamW(direct.parameters(), lr=0.01)
    model = smp.DistributedModel(network())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    train = train_step(lambda model, x: error_of(model(x)))
    equal = []
    for number in range(4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * number + smp.rank()))
        losses = []
        for last, part in enumerate(x.chunk(2)):
            direct.set_requires_gradient_sync(bool(last))
            losses.append(error_of(direct(part)))
            (losses[-1] / 2).backward()  # type: ignore[no-untyped-call]
        adam.step()
        adam.zero_grad()
        outputs = train(model, x).outputs
        optimizer.step()
        optimizer.zero_grad()
        equal += [torch.equal(a, b) for a, b in zip(outputs, losses, strict=True)]
    ours: Any = model.get_module().parameters()
    pairs = zip(ours, direct.parameters(), strict=True)
    return equal + [torch.equal(a.to_local(), b.to_local()) for a, b in pairs]


@pytest.mark.parametrize("name", ["", "bf16", "fp16"])
def test_equals_fully_shard_to_the_last_bit(name: str) -> None:
    for equal in run_ranks(2, _against_fully_shard, name):
        assert all(equal)
        assert len(equal) == 8 + 8


# --- Memory ---------------------------------------------------------------------------------------

WIDTH, LAYERS = 1024, 16  # 4 MiB a layer


def _resident(field: str) -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def _memory(settings: dict[str, Any]) -> dict[str, int]:
    import smdistributed.modelparallel.torch as smp

    smp.init(settings)
    # Modules that are imported and connected with the first one are not the next one's.
    smp.DistributedModel(network(8, 2))
    forget()
    # -3 is M_MMAP_THRESHOLD: freed memory goes back at once.
    assert ctypes.CDLL(None).mallopt(-3, 1 << 16)
    before = _resident("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    with smp.delay_param_initialization():
        plain = network(WIDTH, LAYERS)
    script = list(plain.parameters())
    model = smp.DistributedModel(plain)
    bytes_made = _resident("VmHWM") - _resident("RssFile") - before
    optimizer: Any = smp.DistributedOptimizer(torch.optim.Adam(script, lr=0.01))
    live = []

    @smp.step
    def train(model: Any, x: torch.Tensor) -> Any:
        loss = error_of(model(x))
        model.backward(loss)
        live.append(max(live_of(block) for block in plain.children()))
        return loss

    def live_of(block: nn.Module) -> int:
        return sum(
            p.untyped_storage().nbytes() for p in block.parameters() if type(p) is nn.Parameter
        )

    train(model, torch.ones(2, WIDTH))
    optimizer.step()
    parameters = list(model.local_parameters())

    def count(tensors: Any) -> int:  # several are in one storage
        storages = [tensor.to_local().untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    return {
        "whole": LAYERS * (WIDTH + 1) * WIDTH * 4,
        "block": (WIDTH + 1) * WIDTH * 4,
        "made": bytes_made,
        "script": sum(p.untyped_storage().nbytes() for p in script),
        "parameters": count(parameters),
        "gradients": count(p.grad for p in parameters),
        "state": count(v for s in optimizer.state.values() for k, v in s.items() if k != "step"),
        "gathered": live[0],
    }


@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_has_a_part_of_parameters_gradients_and_state(degree: int) -> None:
    for result in run_ranks(degree, _memory, config(degree)):
        share = result["whole"] // degree
        assert result["parameters"] == result["gradients"] == share, result
        assert result["state"] == 2 * share, result
        assert result["script"] == result["gathered"] == 0, result
        # The peak memory of a rank while the model was made: its part, a block, and copies of that
        # on their way.
        assert result["made"] <= share + 4 * result["block"], result


def _values(settings: dict[str, Any]) -> list[bool]:
    import smdistributed.modelparallel.torch as smp

    smp.init(settings)
    torch.manual_seed(2)
    expected = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    torch.manual_seed(2)
    with smp.model_creation():
        layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    assert not any(p.count_nonzero() for p in layers.parameters() if p.dim() == 2)
    full_state = smp.DistributedModel(layers).state_dict()
    return [torch.equal(full_state[name], value) for name, value in expected.state_dict().items()]


def test_delayed_parameters_have_the_values_of_a_plain_construction() -> None:
    for equal in run_ranks(2, _values, config(2, delayed_parameter_initialization=True)):
        assert equal == [True] * 6


# --- Half precision and clipping ------------------------------------------------------------------


def _half(name: str) -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    smp.init(config(2, microbatches=2, **{name: True}))
    half = torch.float16 if name == "fp16" else torch.bfloat16
    with smp.model_creation(dtype=half):
        module = network().to(half)
    model = smp.DistributedModel(module)
    optimizer: Any = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**40, "delayed_shift": 1},
    )
    kinds = set()

    @smp.step
    def train(model: Any, x: torch.Tensor) -> Any:
        out = model(x)
        kinds.add(out.dtype)
        loss = error_of(out)
        model.backward(loss)
        return loss

    skipped, norms, losses = 0, [], []
    for _ in range(40):
        optimizer.zero_grad()
        # Only one rank has large gradients at first.
        losses.append(float(train(model, torch.full((4, 16), 0.5 + smp.rank())).reduce_mean()))
        norms.append(optimizer.clip_master_grads(0.25))
        optimizer.step()
        skipped += optimizer.overflow
    return {
        "kinds": kinds | {p.dtype for p in model.parameters()},
        "skipped": skipped,
        "norms": norms,
        "losses": losses,
        "scale": optimizer.loss_scale,
    }


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_precision_trains_with_one_loss_scale(name: str) -> None:
    first, second = run_ranks(2, _half, name)
    assert first["kinds"] == {torch.float32}
    assert first["norms"] == second["norms"]
    assert first["skipped"] == second["skipped"]
    assert (first["skipped"] > 0) == (name == "fp16")
    assert first["norms"].count(-1.0) == first["skipped"] < 35
    assert first["scale"] == second["scale"]
    assert first["losses"][-1] < 0.8 * first["losses"][0]


def _clipped(
    settings: dict[str, Any], make: Callable[[Any], Any], scaled: bool
) -> tuple[list[float], list[Any]]:
    import smdistributed.modelparallel.torch as smp

    smp.init(settings)
    model = smp.DistributedModel(network().double())
    optimizer: Any = smp.DistributedOptimizer(make(model.parameters()))
    scaler = smp.amp.GradScaler(enabled=scaled)

    @smp.step
    def train(model: Any, x: torch.Tensor) -> Any:
        loss = (model(x) - 1.0).pow(2).sum()
        model.backward(scaler.scale(loss))
        return loss

    norms = []
    for number in range(4):
        optimizer.zero_grad()
        train(model, torch.full((2, 16), number + smp.dp_rank() / 2, dtype=torch.float64))
        scaler.step(optimizer)
        scaler.update()
        norms.append(optimizer._global_grad_norm)
    return norms, list(model.state_dict().values())


def _adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.01)


def _lamb(parameters: Any) -> Any:
    import smdistributed.modelparallel.torch as smp

    return smp.optimizers.FusedLAMB(parameters, lr=0.01)


@pytest.mark.parametrize(("world", "limit"), [(2, 0.1), (2, None), (4, 0.1)])
def test_the_step_clips_as_sdp_gradient_clipping_says_and_to_1_without_it(
    world: int, limit: float | None
) -> None:
    plain = network().double()
    adam, norms = _adam(plain.parameters()), []
    for number in range(4):
        x = torch.cat(
            [torch.full((2, 16), number + r / 2, dtype=torch.float64) for r in range(world)]
        )
        adam.zero_grad()
        ((plain(x) - 1.0).pow(2).sum() / world).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), limit or 1.0)))
        adam.step()
    assert max(norms) > 1.0
    for norms_found, values in run_ranks(
        world, _clipped, config(2, sdp_gradient_clipping=limit), _adam, False
    ):
        assert norms_found == pytest.approx(norms, rel=1e-10)
        for ours, theirs in zip(values, plain.state_dict().values(), strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_with_norms_and_a_scaler_equal_data_parallelism(scaled: bool) -> None:
    (_, expected), _ = run_ranks(2, _clipped, {"ddp": True}, _lamb, scaled)
    for _, values in run_ranks(2, _clipped, config(2), _lamb, scaled):
        for ours, theirs in zip(values, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


# --- Checkpoints ----------------------------------------------------------------------------------


def _start(settings: dict[str, Any]) -> tuple[Any, Any, Callable[[int], None]]:
    import smdistributed.modelparallel.torch as smp

    smp.init(settings)
    dtype = torch.float32 if smp.state.cfg.bf16 else torch.float64
    model = smp.DistributedModel(Special().to(dtype))
    optimizer: Any = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))

    forward = train_step(lambda model, x, y: functional.nll_loss(model(x), y))

    def train(number: int) -> None:
        optimizer.zero_grad()
        forward(
            model, *networks.data("", number + 50 * smp.dp_rank(), 8, next(model.buffers()).dtype)
        )
        optimizer.step()

    return model, optimizer, train


def _saves(path: str, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    import smdistributed.modelparallel.torch as smp

    model, optimizer, train = _start(settings)
    train(0)
    smp.save_checkpoint(
        path, "one", partial=True, model=model, optimizer=optimizer, user_content={"steps": 1}
    )
    smp.save_checkpoint(path, "whole.pt", partial=False, model=model)
    smp.save(
        {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()},
        f"{path}/mine",
    )
    state = optimizer.state_dict(gather_to_rank0=True)
    assert bool(state) == (smp.rank() == 0)
    if state:
        smp.save(state, f"{path}/optimizer", partial=False)
    smp.barrier()
    train(1)
    return dict(model.state_dict())


def _resumes(path: str, settings: dict[str, Any], how: str) -> dict[str, torch.Tensor]:
    import smdistributed.modelparallel.torch as smp

    model, optimizer, train = _start(settings)
    if how == "partial":
        assert smp.resume_from_checkpoint(path, tag="one") == {"steps": 1}
    elif how == "full":
        smp.resume_from_checkpoint(path, tag="whole.pt", partial=False)
        optimizer.load_state_dict(smp.load(f"{path}/optimizer", partial=False))
    else:
        mine = smp.load(f"{path}/mine")
        model.load_state_dict(mine["model"])
        optimizer.load_state_dict(mine["optimizer"])
    train(1)
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("world", "how", "half"),
    [
        (2, "partial", False),
        (2, "full", True),
        (2, "saved", False),
        (2, "partial", True),
        (4, "full", False),
    ],
)
def test_a_checkpoint_goes_on(world: int, how: str, half: bool, tmp_path: Path) -> None:
    settings = config(2, bf16=half)
    expected = run_ranks(world, _saves, str(tmp_path), settings)[0]
    names = sorted(path.name for path in (tmp_path / "one_partial").iterdir())
    halves = ["fp16_states_0_0_0.pt", "fp16_states_0_0_1.pt"] if half else []
    parts = [f"{kind}_0_0_{part}.pt" for kind in ("model", "optimizer") for part in (0, 1)]
    assert names == sorted([*halves, *parts, "partition.pt", "user_content.pt"])
    for result in run_ranks(world, _resumes, str(tmp_path), settings, how):
        assert list(result) == list(expected)
        assert all(torch.equal(result[name], value) for name, value in expected.items())


def _alone(path: str) -> dict[str, torch.Tensor]:
    """Go on in one process, without sharding, on the batches of both ranks."""
    import smdistributed.modelparallel.torch as smp

    model, optimizer, _ = _start({})
    with pytest.raises(
        RuntimeError, match="saved with sharded_data_parallel_degree 2, and this job has 1"
    ):
        smp.resume_from_checkpoint(path, tag="one")
    part = smp.load(f"{path}/mine_0_0_0", partial=False)
    for target, key in ((model, "model"), (optimizer, "optimizer")):
        with pytest.raises(RuntimeError, match="the partial state is part 0 of 2"):
            target.load_state_dict(part[key])
    smp.resume_from_checkpoint(path, tag="whole.pt", partial=False)
    optimizer.load_state_dict(smp.load(f"{path}/optimizer", partial=False))
    module = model.get_module()
    optimizer.zero_grad()
    for rank in range(2):
        x, y = networks.data("", 1 + 50 * rank, 8)
        (functional.nll_loss(module(x), y) / 2).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return dict(model.state_dict())


def test_one_process_goes_on_from_a_full_checkpoint(tmp_path: Path) -> None:
    expected = run_ranks(2, _saves, str(tmp_path), config(2))[0]
    plain = Special().double()
    plain.load_state_dict(torch.load(tmp_path / "whole.pt"))
    results = run_ranks(1, _alone, str(tmp_path))[0]
    for name, value in expected.items():
        assert torch.allclose(results[name].double(), value.double(), rtol=0, atol=1e-10), name


# --- Ranks that take different ways, and blocks that are not used as blocks -----------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(x).tanh())  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> Any:
        return self.encode(x)


class Hiding(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return types.SimpleNamespace(value=self.encode(x))


class Ways(nn.Module):
    """Goes the way of its argument.

    ``number`` is the difference: the rank, or the half of the batch in one process.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.way, self.number, self.turns = way, 0, 0
        self.blocks = nn.ModuleList((Hiding if way == "hides" else Block)() for _ in range(3))
        heads = {
            "a": nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)),
            "b": nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8)),
        }
        self.heads = nn.ModuleDict(heads)
        self.words = nn.Embedding(4, 8, sparse=way == "sparse")

    def forward(self, x: torch.Tensor) -> Any:
        way, last, self.turns = self.way, self.number, self.turns + 1
        if way == "method":
            return self.blocks[0].encode(x)  # type: ignore[operator]
        if way == "weight":
            return functional.linear(x, self.blocks[0].a.weight.t())  # type: ignore[union-attr, operator]
        if way == "replaced":
            twice = {name: 2 * p for name, p in self.blocks[0].named_parameters()}
            return torch.func.functional_call(self.blocks[0], twice, (x,))
        if way == "late" and self.turns < 5:
            last = 0
        if way == "gradient":
            x = x.requires_grad_()
            x = x - torch.autograd.grad(self.blocks[0](x).sum(), x)[0]
        kept_input = x
        for number, block in enumerate(self.blocks):
            if way in ("order", "late") and last:
                x = self.blocks[2 - number](x)
            elif not (way == "skips" and number == 1 and last):
                x = block(x)
            kept_input = x if number == 0 else kept_input
        x = kept_input if way == "loss" and last else x
        if way == "summed":
            return x.sum() + sum(p.pow(2).sum() for p in self.blocks.parameters())
        return self.heads["ab"[last] if way in ("heads", "found") else "a"](x)


def _ways(way: str) -> str | list[torch.Tensor]:
    """Train four steps; return the error, or the parameters."""
    import smdistributed.modelparallel.torch as smp

    smp.init(config(2, microbatches=1))
    plain = Ways(way).double()
    plain.number = smp.rank()
    try:
        model = smp.DistributedModel(plain, find_unused_parameters=way == "found")
        make = torch.optim.Rprop if way == "rprop" else torch.optim.SGD
        optimizer: Any = smp.DistributedOptimizer(make(model.parameters(), lr=0.05))

        train = train_step(lambda model, x: model(x).pow(2).mean())
        for number in range(6):
            optimizer.zero_grad()
            train(model, torch.full((2, 8), 0.1 * number + smp.rank(), dtype=torch.float64))
            optimizer.step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return list(model.state_dict().values())


def test_ranks_may_choose_in_a_module_dict() -> None:
    plain = Ways("found").double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for number in range(6):
        optimizer.zero_grad()
        for plain.number in range(2):
            x = torch.full((2, 8), 0.1 * number + plain.number, dtype=torch.float64)
            (plain(x).pow(2).mean() / 2).backward()
        optimizer.step()
    for result in run_ranks(2, _ways, "found"):
        for ours, theirs in zip(result, plain.state_dict().values(), strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (
            "heads",
            (
                "rank 0 has a gradient of heads.a.0.weight, and rank 1 has a gradient of"
                " heads.b.0.weight"
            ),
        ),
        ("order", "rank 0 runs blocks.0 (Block) forward, and rank 1 runs blocks.2 (Block) forward"),
        ("late", "rank 0 runs blocks.0 (Block) forward, and rank 1 runs blocks.2 (Block) forward"),
        ("skips", "rank 0 runs blocks.1 (Block) forward, and rank 1 runs blocks.2 (Block) forward"),
        (
            "loss",
            "rank 0 runs blocks.2 (Block) backward, and rank 1 runs blocks.0 (Block) backward",
        ),
        ("method", "blocks.0.a (Linear) used blocks.0.a.weight outside of its block"),
        ("weight", "the model (Ways) used blocks.0.a.weight outside of its block"),
        ("gradient", "outside of its block"),
        ("replaced", "parameter 'weight' in blocks.0 (Block) was replaced for a call"),
        (
            "hides",
            "blocks.0 (Hiding) returns a tensor in an object of <class 'types.SimpleNamespace'>",
        ),
        ("summed", "the loss was computed from shared parameters"),
        ("sparse", "words (Embedding) has sparse=True"),
        ("rprop", "does not work with torch.optim.Rprop"),
    ],
)
def test_a_rank_is_told_what_it_may_not_do_with_blocks(way: str, words: str) -> None:
    for error in run_ranks(2, _ways, way):
        assert isinstance(error, str), "it trained"
        assert words in error


# --- Refused --------------------------------------------------------------------------------------


def _refused() -> list[str]:
    import smdistributed.modelparallel.torch as smp

    smp.init(config(2, microbatches=2))
    errors = []

    def note_error(action: Callable[[], Any]) -> None:
        try:
            action()
        except (ValueError, RuntimeError) as error:
            errors.append(str(error))
        else:
            errors.append("")

    class Around:
        def __init__(self, inner: Any) -> None:
            self.optimizer = inner

    with torch.device("meta"):
        far = network()
    mixed = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4).double())
    note_error(lambda: smp.DistributedModel(far))
    forget()
    note_error(lambda: smp.DistributedModel(nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))))
    forget()
    note_error(lambda: smp.DistributedModel(mixed))
    forget()
    model = smp.DistributedModel(network())
    note_error(model.join)
    note_error(lambda: model.register_comm_hook(None, lambda *_: torch.futures.Future()))
    note_error(lambda: smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters())))
    note_error(lambda: smp.DistributedOptimizer(torch.optim.Adafactor(model.parameters())))
    note_error(
        lambda: smp.DistributedOptimizer(Around(torch.optim.SGD(model.parameters(), lr=0.1)))
    )
    turns = itertools.count()

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        loss = model(x).sum()
        if next(turns) == 0:
            model.backward(loss)

    note_error(lambda: train(model, torch.ones(2, 16)))
    return errors


def test_what_does_not_work_is_a_clear_error() -> None:
    words = [
        "is on the meta device and has no values",
        "0 (Embedding) has a max_norm",
        "0.weight is float32, 1.weight is float64",
        "join: not with sharded_data_parallel_degree above 1",
        "register_comm_hook: not with sharded_data_parallel_degree above 1",
        "torch.optim.LBFGS works on all parameters at once",
        "does not work with torch.optim.Adafactor",
        "Around keeps copies of whole parameters",
        "the last microbatch ran no backward pass",
    ]
    for errors in run_ranks(2, _refused):
        assert len(errors) == len(words)
        for error, expected in zip(errors, words, strict=True):
            assert expected in error
