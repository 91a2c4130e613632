"""Models that tests train on several ranks and in one process. All are deterministic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

Batch = tuple[torch.Tensor, torch.Tensor]


class Convolutions(nn.Module):
    """The network of the MNIST scripts, smaller, in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 8, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(8 * 4 * 4, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(self.head(self.features(x)), 1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


class LanguageModel(nn.Module):
    """Tied embedding and head.

    The blocks are a chain, or a list with a long skip: its tensor is used everywhere.
    """

    def __init__(self, *, chain: bool, words: int = 30, width: int = 8, layers: int = 5) -> None:
        super().__init__()
        self.emb = nn.Embedding(words, width)
        blocks = [Block(width) for _ in range(layers)]
        self.blocks: nn.Module = nn.Sequential(*blocks) if chain else nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        first = h = self.emb(ids)
        if isinstance(self.blocks, nn.ModuleList):
            for block in self.blocks:
                h = block(h) + 0.1 * first
        else:
            h = self.blocks(h)
        logits = self.head(self.norm(h))
        return {
            "loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return torch.tanh(self.lin(x)) * scale


class _Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Linear(8, 8)
        self.inner = _Inner()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, flag: bool) -> Any:
        y = self.act(self.pre(x))
        z = self.inner(y, scale=2.0)
        return (z + y, x) if flag else z


class Revisit(nn.Module):
    """Placed by hand so that one forward pass goes 0, 1, 0, 1, 0.

    Modules that work in place come first remotely.
    """

    places: ClassVar = {"mid": 1, "mid.inner": 0, "act": 1, "last": 1}

    def __init__(self) -> None:
        super().__init__()
        self.mid = _Middle()
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.mid(x, flag=True)
        return functional.log_softmax(self.last(self.act(a * 1.0) + b), 1)


class Chain(nn.Sequential):
    """A Sequential that comes back to the partition where it began."""

    places: ClassVar = {"2": 1, "3": 1}

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.ReLU(inplace=True),
            nn.Linear(8, 10),
            nn.LogSoftmax(1),
        )


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, *, extra: dict[str, Any], factor: float = 1.0
    ) -> tuple[Any, ...]:
        unused = self.b(x)
        return (
            self.a(x + extra["shift"]) * factor,
            None,
            {"side": self.b(extra["shift"]).sigmoid(), "n": 3},
            unused,
        )


class Arguments(nn.Module):
    """Keyword arguments, nested and tuple outputs, outputs and tensors that nothing uses, a
    parameter without use.
    """

    places: ClassVar = {"second": 1, "second.b": 0, "out": 1}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = _Pair(), _Pair(), nn.Linear(8, 10)
        self.idle = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, _, side, _ = self.first(x, extra={"shift": x.tanh()})
        z, nothing, other, unused = self.second(
            y, extra={"shift": side["side"], "unused": y}, factor=0.5 * side["n"]
        )
        assert nothing is None
        return functional.log_softmax(self.out(z + other["side"]), 1), unused


class Loop(nn.Module):
    """The number of calls depends on the data, and modules are called several times."""

    places: ClassVar = {"b": 1}

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + int(x.sum() > 0)):
            x = torch.relu(self.b(self.a(x)))
        return functional.log_softmax(self.c(x), 1)


class _Holder(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.own = part, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.part(self.own(x))
        return y


class Named(nn.Module):
    """A module object with two names; the second one's parent is on another partition."""

    places: ClassVar = {"part": 1}

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.holder, self.out = _Holder(self.part), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(self.out(self.holder(x)), 1)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=30,
            n_positions=8,
            n_embd=8,
            n_layer=4,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",  # type: ignore[call-arg]
        )
    )


class Experts(nn.Module):
    """Which expert computes a row, and so the shapes of the tensors that cross, depends on the
    data.

    Some compute nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)
        )
        self.out = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.gate(x).softmax(1).topk(2)
        y = x
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                y = y.index_add(0, row, expert(x[row]) * share[row, place, None])
        return functional.log_softmax(self.out(y), 1)


class _Average(nn.Module):
    """Puts new buffers in the place of old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().square().mean(0)
        return torch.tanh(y - self.mean)


class _Score(nn.Module):
    """Gives the gradient of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (score,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return score


class _Recomputed(nn.Module):
    """Recomputes the modules in it, which do the same."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = _Recomputed(depth - 1) if depth else nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + checkpoint(self.inner, self.linear(x), use_reentrant=False)
        return y


class Positions(nn.Module):
    """A module is given a part of a parameter of its parent, as DeBERTa's positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(16, 8))
        self.key, self.out = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(self.out(x @ self.key(self.positions[:8])), 1)


def _row(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts, nn.Linear(8, 10), nn.LogSoftmax(1))


def _adapted() -> nn.Module:
    """Return frozen layers, each with an adapter beside it."""
    layers = [nn.Linear(8, 8).requires_grad_(False) for _ in range(4)]
    return _row(
        *(_Beside(layer, nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8))) for layer in layers)
    )


class _Beside(nn.Module):
    def __init__(self, base: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, adapter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.adapter(x)
        return y


KINDS: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "buffers": lambda: _row(*(_Average() for _ in range(4))),
    "weight-norm": lambda: _row(*(weight_norm(nn.Linear(8, 8)) for _ in range(4))),
    "spectral-norm": lambda: _row(*(spectral_norm(nn.Linear(8, 8)) for _ in range(4))),
    "scores": lambda: _row(nn.Linear(8, 8), _Score(), nn.Linear(8, 8)),
    "recomputed": lambda: _row(*(_Recomputed(2) for _ in range(3))),
    "positions": Positions,
    "adapters": _adapted,
}
"""Models of other kinds, for one configuration each."""

SHARED = ("weight-norm", "recomputed", "positions", "adapters")
"""Those that equal one process with sharded data parallelism.

With the others replicas have buffers of their own, run different blocks, or
need gradients of gradients.
"""

BUILD: dict[str, Callable[[], nn.Module]] = {
    "convolutions": Convolutions,
    "chained-blocks": lambda: LanguageModel(chain=True),
    "listed-blocks": lambda: LanguageModel(chain=False),
    "revisit": Revisit,
    "chain-0-1-0": Chain,
    "arguments": Arguments,
    "loop": Loop,
    "named-twice": Named,
    "gpt2": gpt2,
}
TEXT = ("chained-blocks", "listed-blocks", "gpt2")


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    return (BUILD | KINDS)[name]().to(dtype)


def places(model: nn.Module, degree: int) -> dict[str, int] | None:
    """Return the partition of each module for a model that is placed by hand.

    The last partition stands for 1.
    """
    own_places: dict[str, int] | None = getattr(model, "places", None)
    if own_places is None:
        return None
    out: dict[str, int] = {}
    for name, _ in model.named_modules():
        parent = name.rpartition(".")[0]
        default_place = out[parent] if name else 0
        index = own_places.get(name, default_place)
        out[name] = degree - 1 if index else 0
    return out


def data(name: str, seed: int, count: int, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(100 + seed)
    if name in TEXT:
        ids = torch.randint(0, 30, (count, 6), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    shape = (count, 1, 12, 12) if name == "convolutions" else (count, 8)
    return torch.randn(shape, generator=generator).to(dtype), torch.randint(
        0, 10, (count,), generator=generator
    )


def loss_of(
    name: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the loss."""
    if name in TEXT:
        out = model(input_ids=x, labels=y) if name == "gpt2" else model(x, labels=y)
        return out["logits"], out["loss"]
    out = model(x)
    out = out[0] if name == "arguments" else out
    return out, functional.nll_loss(out, y)
