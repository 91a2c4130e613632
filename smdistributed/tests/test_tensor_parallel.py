"""Test tensor parallelism against one process: modules that are replaced and those that are not,
and parameters that are made late.
"""

from __future__ import annotations

import copy
import functools
import io
import logging
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from jobs import BY_HAND, train_step
from ranks import RankError, run_ranks

VOCABULARY, WIDTH, LENGTH, CLASSES, SAMPLES = 11, 8, 3, 4, 4
STEPS = 4


class Model(nn.Module):
    """Every supported module, some that are left alone, and a chain that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=2)
        self.first = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.odd = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(5, CLASSES)  # 5 channels: not divisible

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = self.norm(x + self.first(x))
        x = x + self.second(x)
        return functional.cross_entropy(self.head(self.odd(x.mean(1))), targets)


def _data(replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    count = SAMPLES * replicas
    ids = torch.randint(VOCABULARY, (STEPS, count, LENGTH), generator=generator)
    return ids, torch.randint(CLASSES, (STEPS, count), generator=generator)


def _alone(replicas: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in this process on the samples of all replicas."""
    torch.manual_seed(1)
    model = Model().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for ids, targets in zip(*_data(replicas), strict=True):
        optimizer.zero_grad()
        loss: torch.Tensor = model(ids, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def _train(config: dict[str, Any], delayed: bool = False) -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.utils import get_distribution_axis, rmsg

    smp.init({"ddp": True, **config})
    torch.manual_seed(1)
    if delayed:
        import smdistributed.modelparallel.torch.nn.delayed as delay

        delay.SMALLEST = 1  # this model is small
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float64, flash_attention=True):
        torch.set_default_dtype(torch.float32)  # as _alone: drawn in single precision
        if not delayed:
            module: nn.Module = Model().double()
        else:
            torch.set_default_dtype(torch.float64)
            module = Model()
    before = torch.get_rng_state()
    model = smp.DistributedModel(module)
    assert torch.equal(before, torch.get_rng_state())
    optimizer: Any = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))

    step = train_step(lambda model, ids, targets: model(ids, targets))
    replicas, replica = (
        (smp.rdp_size(), smp.rdp_rank())
        if smp.state.cfg.prescaled_batch
        else (
            smp.dp_size(),
            smp.dp_rank(),
        )
    )
    losses = []
    for ids, targets in zip(*_data(replicas), strict=True):
        mine = slice(SAMPLES * replica, SAMPLES * (replica + 1))
        optimizer.zero_grad()
        losses.append(step(model, ids[mine], targets[mine]).reduce_mean().item())
        optimizer.step()
    axes = {
        name: get_distribution_axis(p)
        for name, p in model.get_module().named_parameters()
        if model.is_distributed_parameter(p)
    }
    return {
        "state": {name: value.numpy() for name, value in model.state_dict().items()},
        "losses": losses,
        "axes": axes,
        "split": sorted(type(m).__name__ for m in model.distributed_modules()),
        "said": rmsg("x"),
    }


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {"tensor_parallel_degree": 2}),
        (
            2,
            {
                "tensor_parallel_degree": 2,
                "prescaled_batch": True,
                "optimize": "speed",
                "microbatches": 2,
            },
        ),
        (4, {"tensor_parallel_degree": 2, "microbatches": 2}),
        (4, {"tensor_parallel_degree": 4, "microbatches": 2, "prescaled_batch": True}),
        pytest.param(
            4,
            {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 4},
            marks=pytest.mark.core,
        ),
        (
            4,
            {
                "tensor_parallel_degree": 2,
                "pipeline_parallel_degree": 2,
                "microbatches": 2,
                "prescaled_batch": True,
                "placement_strategy": "spread",
                "pipeline": "simple",
            },
        ),
        (8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2}),
    ],
    ids=lambda value: (
        "-".join(f"{k.split('_')[0]}{v}" for k, v in value.items())
        if isinstance(value, dict)
        else None
    ),
)
def test_training_equals_one_process(ranks: int, config: dict[str, Any]) -> None:
    results = run_ranks(ranks, _train, config)
    shared = config["tensor_parallel_degree"] if config.get("prescaled_batch") else 1
    replicas = ranks // config.get("pipeline_parallel_degree", 1) // shared
    expected, losses = _alone(replicas)
    for rank, result in enumerate(results):
        for name, value in expected.items():
            assert torch.allclose(
                torch.from_numpy(result["state"][name]), value, rtol=0, atol=1e-12
            ), (rank, name)
        assert result["said"] == f"[{rank}] x"
    assert sum(result["losses"][-1] for result in results) / ranks == pytest.approx(
        losses[-1], abs=1e-12
    )
    names = {"embedding.weight": 1, "first.0.weight": 1, "first.2.weight": 1, "odd.weight": 1}
    names |= {"second.0.weight": 1, "second.2.weight": 1}
    if config.get("optimize") != "speed":
        names |= {"norm.weight": 0, "norm.bias": 0}
    assert results[0]["axes"] == names


def test_delayed_parameters_have_the_values_of_one_process() -> None:
    config = {
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "delayed_parameter_initialization": True,
        "prescaled_batch": True,
    }
    results = run_ranks(4, _train, config, True)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        model = Model()
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for ids, targets in zip(*_data(1), strict=True):
        optimizer.zero_grad()
        torch.autograd.backward(model(ids, targets))
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(
            torch.from_numpy(results[0]["state"][name]), value, rtol=0, atol=1e-12
        ), name


class Uneven(nn.Module):
    """Takes longer on one tensor rank, for some microbatches: messages come to
    its stage in another order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import smdistributed.modelparallel.torch as smp

        if int(x[0, 0].detach().abs() * 1e6) % 2 == smp.tp_rank():
            work = torch.rand(300, 300)
            for _ in range(4):
                work = work @ work.softmax(-1)
        y: torch.Tensor = self.linear(x)
        return x + y.tanh()


def _uneven() -> list[float]:
    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "ddp": True, "tensor_parallel_degree": 2, "microbatches": 8})
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        layers = []
        for part in (0, 1, 0, 1):
            with smp.partition(part):
                layers.append(Uneven())
        module = nn.Sequential(*layers)
    model = smp.DistributedModel(module)

    step = train_step(lambda model, x: model(x).pow(2).mean())
    generator = torch.Generator().manual_seed(smp.tp_rank())
    return [
        step(model, torch.randn(16, WIDTH, generator=generator)).reduce_mean().item()
        for _ in range(5)
    ]


def test_tensor_ranks_run_microbatches_in_one_order() -> None:
    """Otherwise their exchanges cross: wrong numbers, or a job that hangs."""
    results = run_ranks(4, _uneven)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    torch.manual_seed(0)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for number in range(5):
        for rank, generator in enumerate(generators):
            x = torch.randn(16, WIDTH, generator=generator)
            for linear in linears:
                x = x + linear(x).tanh()
            for result in (results[rank], results[rank + 2]):  # both partitions have the outputs
                assert result[number] == pytest.approx(x.pow(2).mean().item(), rel=1e-5)


# -- replaced modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


class Block(nn.Module):
    """A script's own module, with an interface of its own."""

    def __init__(self, sizes: dict[str, int], scale: float = 2.0) -> None:
        super().__init__()
        self.inner = nn.Linear(sizes["in"], sizes["out"])
        self.scale = scale

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> dict[str, torch.Tensor]:
        return {"y": self.inner(x) * self.scale + shift}


def _replace() -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch import nn as smp_nn
    from smdistributed.modelparallel.torch.nn.replacement import distribute

    smp.init({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True})
    text = io.StringIO()
    logging.getLogger("smdistributed.modelparallel").addHandler(logging.StreamHandler(text))
    result: dict[str, Any] = {}

    class DistributedBlock(smp_nn.DistributedModule):
        def __init__(self, width: int, out: int, scale: float) -> None:
            super().__init__()
            self.inner = smp_nn.DistributedLinear(width, out)
            self.scale = scale

        def forward(self, x: torch.Tensor, shift: float) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y * self.scale + shift

    early = Block({"in": 4, "out": 3})
    smp.tp_register_with_module(
        Block,
        DistributedBlock,
        init_hook=lambda sizes, scale=2.0: ((sizes["in"], sizes["out"]), {"scale": scale}),
        forward_hook=lambda x, shift=0.0: ((x, shift), {}),
        return_hook=lambda y: {"y": y},
    )
    with smp.tensor_parallelism():
        inside = nn.Linear(4, 4)
        with smp.tensor_parallelism(enabled=False):
            outside = nn.Linear(4, 4)
        with smp.tensor_parallelism(scale=3.0, unknown=1):
            block = Block({"in": 4, "out": 3})
        tied, hooked, frozen = Tied(), nn.Linear(4, 4), nn.Linear(4, 4)
        normed = nn.utils.weight_norm(nn.Linear(4, 4))
    hooked.register_forward_hook(lambda *_: None)
    frozen.requires_grad_(False)
    later, twice = nn.Linear(4, 4), nn.Linear(4, 4)
    smp.set_tensor_parallelism(later)
    smp.set_tensor_parallelism(twice)
    smp.set_tensor_parallelism(early)
    root = nn.ModuleDict(
        {
            "inside": inside,
            "outside": outside,
            "block": block,
            "tied": tied,
            "hooked": hooked,
            "frozen": frozen,
            "normed": normed,
            "later": later,
            "twice": twice,
            "again": twice,
            "early": early,
            "attention": nn.MultiheadAttention(4, 2),
        }
    )
    smp.set_tensor_parallelism(root["attention"])
    x = torch.arange(8.0).view(2, 4)
    expected = block(x, shift=1.0)["y"] / 2.0
    random_state = torch.get_rng_state()
    assert distribute(root, 2) is root
    assert torch.equal(random_state, torch.get_rng_state())
    assert root["twice"] is root["again"]
    assert not root["frozen"].weight.requires_grad
    assert torch.allclose(root["block"](x, shift=1.0)["y"], (expected - 0.5) * 3 + 1.0)
    assert isinstance(distribute(_tagged(smp), 2), smp_nn.DistributedLinear)
    result["types"] = {name: type(module).__name__ for name, module in root.items()}
    result["early"] = type(root["early"].inner).__name__
    result["attention"] = type(root["attention"].out_proj).__name__
    result["text"] = text.getvalue()
    return result


def _tagged(smp: Any) -> nn.Module:
    with smp.tensor_parallelism():
        return nn.Linear(2, 2)


def test_what_is_replaced() -> None:
    first, second = run_ranks(2, _replace)
    assert first["types"] == {
        "inside": "DistributedLinear",
        "outside": "Linear",
        "block": "DistributedBlock",
        "tied": "Tied",
        "hooked": "Linear",
        "frozen": "DistributedLinear",
        "normed": "Linear",
        "later": "DistributedLinear",
        "twice": "DistributedLinear",
        "again": "DistributedLinear",
        "early": "Block",
        "attention": "MultiheadAttention",
    }
    # Its own class was registered too late, the classes in it were not.
    assert first["early"] == "DistributedLinear"
    # Torch reads its weight directly.
    assert first["attention"] == "NonDynamicallyQuantizableLinear"
    lines = first["text"].splitlines()
    assert lines == [
        (
            "tied.embedding (Embedding) is not split over tensor ranks: its weight is shared with"
            " another module"
        ),
        (
            "tied.head (Linear) is not split over tensor ranks:"
            " its weight is shared with another module"
        ),
        "hooked (Linear) is not split over tensor ranks: it has hooks or a forward of its own",
        "normed (Linear) is not split over tensor ranks: it has hooks or a forward of its own",
        "early (Block) is not split over tensor ranks: it was made before Block was registered",
    ]
    assert second["text"] == ""


def _direct() -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    smp.init({"ddp": True, "tensor_parallel_degree": 2, "fp16_params": True})
    torch.manual_seed(0)
    linear, embedding = (
        smp.nn.DistributedLinear(4, 6),
        smp.nn.DistributedEmbedding(8, 4, padding_idx=-1),
    )
    norm = smp.nn.DistributedLayerNorm(4)
    errors = []
    for make in (
        lambda: smp.nn.DistributedLinear(3, 4),
        lambda: smp.nn.DistributedEmbedding(4, 4, max_norm=1.0),
        lambda: smp.tp_register_with_module(nn.Linear, nn.Linear),  # type: ignore[arg-type]
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            make()
        errors.append(str(caught.value))
    return {
        "shapes": [tuple(p.shape) for p in (linear.weight, embedding.weight, norm.weight)],
        "types": {p.dtype for p in (linear.weight, embedding.weight, norm.bias)},
        "padding": embedding.padding_idx,
        "errors": errors,
    }


def test_modules_made_directly() -> None:
    for result in run_ranks(2, _direct):
        assert result["shapes"] == [(6, 2), (8, 2), (2,)]
        assert result["types"] == {torch.float16}
        assert result["padding"] == 7
        assert result["errors"] == [
            (
                "smp.nn.DistributedLinear: weight has 3 channels, which tensor_parallel_degree (2)"
                " does not divide"
            ),
            "smp.nn.DistributedEmbedding cannot use max_norm or sparse; use nn.Embedding",
            (
                "tp_register: <class 'torch.nn.modules.linear.Linear'> is not a subclass of"
                " smp.nn.DistributedModule"
            ),
        ]


# -- parameters made late


def _late(width: int) -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "microbatches": 1})

    def make(context: Any) -> nn.Sequential:
        torch.manual_seed(3)
        with context:
            with smp.partition(0):
                first = nn.Linear(width, width)
            with smp.partition(1):
                second = nn.Linear(width, width)
            model = nn.Sequential(first, second)
            first.weight.data.normal_(0, 0.3)  # as transformers writes
            with torch.no_grad():
                # Several operations.
                second.weight.uniform_(-0.9, 0.9).erfinv_().mul_(0.1).clamp_(-0.1, 0.1)
                second.weight[3].fill_(0.25)  # a part of it
                second.bias.mul_(2)
            nn.init.orthogonal_(first.weight[:8])
        return model

    plain = {
        name: value.clone()
        for name, value in make(smp.delay_param_initialization(False)).state_dict().items()
    }
    after = torch.get_rng_state()
    with smp.delay_param_initialization():  # modules that torch itself loads for it
        nn.Linear(256, 256)
    used = _used()
    module: Any = make(smp.delay_param_initialization())
    used = _used() - used
    assert torch.equal(after, torch.get_rng_state())
    assert not torch.count_nonzero(module[1].weight)
    identity = {id(p) for p in module.parameters()}
    model = smp.DistributedModel(module)

    @smp.step
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(x)
        return output

    forward(model, torch.zeros(1, width))
    mine = model.local_state_dict()
    assert {id(p) for p in model.local_parameters()} <= identity
    return {
        "equal": {n: torch.equal(v, plain[n]) for n, v in mine.items() if n in plain},
        "used": used,
    }


def _used() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_delayed_parameters_take_no_memory_and_get_the_same_values() -> None:
    width = 2048  # 16 MiB each
    first, second = run_ranks(2, _late, width)
    assert first["equal"] == {"0.weight": True, "0.bias": True}
    assert second["equal"] == {"1.weight": True, "1.bias": True}
    # The first weight was read by orthogonal_: it is there. The second is not.
    assert first["used"] < 1.5 * width * width * 4


def _written_late() -> None:
    import smdistributed.modelparallel.torch as smp

    smp.init({})
    with smp.delay_param_initialization():
        module = nn.Linear(256, 256)
    nn.init.ones_(module.weight)
    smp.DistributedModel(module)


def test_writing_after_the_context_is_refused() -> None:
    with pytest.raises(
        RankError, match=r"weight was written to after smp\.delay_param_initialization"
    ):
        run_ranks(1, _written_late)


def _loaded_late() -> bool:
    import smdistributed.modelparallel.torch as smp

    smp.init({})
    values = {"weight": torch.rand(256, 256), "bias": torch.rand(256)}
    with smp.delay_param_initialization():
        module = nn.Linear(256, 256)
        module.load_state_dict(values)
    model = smp.DistributedModel(module)
    return all(torch.equal(v, values[n]) for n, v in model.state_dict().items())


def test_loading_in_the_context_is_kept() -> None:
    assert run_ranks(1, _loaded_late) == [True]


def test_a_delayed_context_keeps_the_layout_of_a_tensor() -> None:
    from smdistributed.modelparallel.torch.nn.delayed import delayed, is_delayed

    with delayed():
        sparse = torch.empty(512, 512, layout=torch.sparse_coo)
        strided = torch.empty(512, 512, layout=torch.strided)
    assert sparse.layout is torch.sparse_coo
    assert is_delayed(strided)


# -- a model of Hugging Face


def _gpt2() -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    smp.init(
        {
            "ddp": True,
            "tensor_parallel_degree": 2,
            "microbatches": 2,
            "delayed_parameter_initialization": True,
        }
    )
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=128,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=1,
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.use_cache = False
    torch.manual_seed(0)
    plain: Any = GPT2LMHeadModel(config)
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True):
        module = GPT2LMHeadModel(config)
    model = smp.DistributedModel(module)
    values = {
        name: torch.equal(value, plain.state_dict()[name])
        for name, value in model.state_dict().items()
    }
    model.module.double()
    plain.double()

    step = train_step(lambda model, ids: model(input_ids=ids, labels=ids).loss)
    ids = torch.arange(64).view(8, 8) % 13
    mine = step(model, ids.chunk(2)[smp.tp_rank()]).reduce_mean()
    torch.autograd.backward(plain(input_ids=ids, labels=ids).loss)
    norm = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)).clip_master_grads(
        1e9
    )
    return {
        "values": all(values.values()) and len(values) > 20,
        "loss": mine.item(),
        "norm": float(norm),
        "expected": float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)),
        "split": sorted({type(m).__name__ for m in model.distributed_modules()}),
    }


def test_the_layers_of_gpt2_are_split() -> None:
    for result in run_ranks(2, _gpt2):
        assert result["values"]
        assert result["norm"] == pytest.approx(result["expected"], rel=1e-6)
        assert result["split"] == [
            "DistributedConv1D",
            "DistributedEmbedding",
            "DistributedLayerNorm",
        ]


def _as_a_gpt_script(config: dict[str, Any], sublayers: bool) -> list[float]:
    """Do the steps of AWS's GPT scripts with `use_distributed_transformer 1`.

    Return the loss, and that of one process.
    """
    import smdistributed.modelparallel.torch as smp

    smp.init(
        {"ddp": True, "auto_partition": False, "default_partition": 0, "microbatches": 2, **config}
    )
    from transformers import AutoModelForCausalLM, GPT2Config

    settings = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=128, n_layer=2, n_head=4, bos_token_id=1
    )
    settings.resid_pdrop = settings.embd_pdrop = settings.attn_pdrop = 0.0
    settings.use_cache = False
    torch.manual_seed(0)
    with smp.model_creation(tensor_parallelism=True):
        random_model: Any = AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]
    plain = copy.deepcopy(random_model).double()
    names = list(random_model.state_dict())
    model = smp.DistributedModel(random_model)
    module: Any = model.get_module()
    layers = module.transformer.seq_layers
    for index, layer in enumerate(layers.children()):
        smp.set_partition(layer, index % smp.pp_size())
    for layer in layers.children() if sublayers else ():
        smp.set_activation_checkpointing(layer.attention)
        smp.set_activation_checkpointing(layer.output)
    if not sublayers:
        smp.set_activation_checkpointing(layers, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(module.parameters()))

    train = train_step(
        lambda model, ids: model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)[
            "loss"
        ]
    )
    model.module.double()
    ids = torch.arange(64).view(8, 8) % 13
    loss = train(model, ids.chunk(smp.tp_size())[smp.tp_rank()]).reduce_mean()
    optimizer.step()
    assert list(model.state_dict()) == names
    expected = torch.stack(
        [plain(input_ids=id_part, labels=id_part).loss for id_part in ids.chunk(smp.tp_size())]
    )
    return [loss.item(), expected[smp.tp_rank()].item()]


@pytest.mark.parametrize(
    "config", [{"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2}], ids=["pp", "tp"]
)
def test_a_script_that_asks_for_the_distributed_transformer_goes_on(config: dict[str, Any]) -> None:
    for loss, expected in run_ranks(
        2, _as_a_gpt_script, config, "tensor_parallel_degree" in config
    ):
        assert loss == pytest.approx(expected, rel=1e-6)  # their losses are float32


SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
NEO = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]}


@pytest.mark.parametrize(
    ("kind", "sizes", "where"),
    [
        ("GPTNeoXForCausalLM", SMALL, "transformer"),
        (
            "GPTJForCausalLM",
            {"n_embd": 8, "n_layer": 2, "n_head": 2, "rotary_dim": 2},
            "transformer",
        ),
        ("GPTNeoForCausalLM", NEO, "transformer"),
        ("BertForMaskedLM", SMALL, "transformer.encoder"),
        ("T5ForConditionalGeneration", {"d_model": 8, "num_layers": 2, "num_heads": 2}, "decoder"),
        ("LlamaForCausalLM", SMALL, "transformer"),
    ],
)
def test_models_of_hugging_face_answer_the_names_of_the_distributed_transformer(
    kind: str, sizes: dict[str, Any], where: str
) -> None:
    import transformers

    import smdistributed.modelparallel.torch as smp

    model_class = getattr(transformers, kind)
    with torch.device("meta"):
        model = model_class(model_class.config_class(vocab_size=16, **sizes))
    before = [name for name, _ in model.named_modules()], list(model.state_dict())
    smp.nn.huggingface.answer(model)
    module = model.get_submodule(where) if where == "decoder" else model
    assert not hasattr(module, "seq_layers")
    smp.set_tensor_parallelism(model)
    smp.nn.huggingface.answer(model)
    stack: Any = functools.reduce(getattr, where.split("."), model)
    assert len(stack.seq_layers) == 2
    assert ([name for name, _ in model.named_modules()], list(model.state_dict())) == before
