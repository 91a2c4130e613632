"""Modules drawn at random, with what a partition could get wrong: they keep state, write to arguments, set each other.

Each equals one process, or is refused by a sentence. More by hand: SMP_RANDOM_IDIOMS=100 jobs.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import equality
from ranks import RankError, run_ranks

WIDTH = 4
JOBS, MODELS = int(os.environ.get("SMP_RANDOM_IDIOMS", "3")), 8
Spec = tuple[str, int, list[Any]]  # kind, partition, children
FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("FACTOR", default=1.0)


@dataclass
class Notes:
    """What modules write into."""

    losses: list[torch.Tensor] = field(default_factory=list)
    calls: int = 0


class Node(nn.Module):
    """A module with children. `way` says how it calls them."""

    def __init__(self, kind: str, children: list[nn.Module]) -> None:
        super().__init__()
        self.own, self.parts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(children)
        self.kind, self.way = kind, WAYS[kind]
        self.scale, self.count, self.on = 1.0, 0, True
        self.kept: Any = None
        self.found: list[torch.Tensor] = []
        self.register_buffer("mean", torch.zeros(WIDTH))
        if kind == "hooked":
            for part in self.parts:
                part.register_forward_hook(self.collect)

    def collect(self, _module: nn.Module, _args: Any, out: torch.Tensor) -> None:
        self.found.append(out)

    def base(self, h: torch.Tensor) -> torch.Tensor:
        """Return what every kind computes by itself: it depends on what others may have set."""
        y: torch.Tensor = torch.tanh(self.own(h)) * self.scale * FACTOR.get()
        return y if self.on and self.training else 0.5 * y

    def forward(self, h: torch.Tensor, notes: Any = None) -> torch.Tensor:
        return self.way(self, self.base(h), notes)


def run(self: Any, h: torch.Tensor, notes: Any) -> Any:
    for part in self.parts:
        h = part(h, notes)
    return h


def keeps(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.kept = h
    return run(self, h, notes) + self.kept


def keeps_and_forgets(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.kept = h.detach()
    h = run(self, h, notes) + self.kept
    self.kept = None
    return h


def lists(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.found = []
    for part in self.parts:
        h = part(h, notes)
        self.found.append(h)
    return torch.stack([h, *self.found]).sum(0)


def clears(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.found.clear()
    for part in self.parts:
        self.found.append(h)
        h = part(h, notes)
    return torch.stack([h, *self.found]).sum(0)


def hooked(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.found.clear()
    return torch.stack([run(self, h, notes), *self.found]).sum(0)


def counts(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.count += 1
    return run(self, h, notes)


def uses_count(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.count += 1
    return run(self, h, notes) * (1 + 0.1 * self.count)


def sets(self: Any, h: torch.Tensor, notes: Any) -> Any:
    for part in self.parts:
        part.scale = 1.0 + 0.1 * float(h.detach().sum() > 0)
    return run(self, h, notes)


def freezes(self: Any, h: torch.Tensor, notes: Any) -> Any:
    for part in self.parts:
        part.eval()
    return run(self, h, notes)


def switches(self: Any, h: torch.Tensor, notes: Any) -> Any:
    for part in self.parts:
        part.on = False
    with torch.no_grad():
        target = run(self, h, None)
    for part in self.parts:
        part.on = True
    return run(self, h, notes) - target


def writes_in_place(self: Any, h: torch.Tensor, notes: Any) -> Any:
    functional.relu_(h)
    return run(self, h * 1.0, notes) + h


def notes_loss(self: Any, h: torch.Tensor, notes: Any) -> Any:
    if notes is not None:
        notes.losses.append(h.square().mean())
        notes.calls += 1
    return run(self, h, notes)


def has_aux(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.aux = h.square().mean()
    return run(self, h, notes)


def averages(self: Any, h: torch.Tensor, notes: Any) -> Any:
    if self.training:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
    return run(self, h, notes) - self.mean


def averages_in_place(self: Any, h: torch.Tensor, notes: Any) -> Any:
    if self.training:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return run(self, h - self.mean.clone(), notes)


def differentiates(self: Any, h: torch.Tensor, notes: Any) -> Any:
    with torch.enable_grad():
        x = h.detach().requires_grad_()
        (grad,) = torch.autograd.grad(run(self, x, None).sum(), x)
    return run(self, h, notes) + grad


def has_variable(self: Any, h: torch.Tensor, notes: Any) -> Any:
    token = FACTOR.set(1.0 + 0.1 * float(h.detach().sum() > 0))
    try:
        return run(self, h, notes)
    finally:
        FACTOR.reset(token)


def nests(self: Any, h: torch.Tensor, notes: Any) -> Any:
    return run(self, h, notes) + torch.stack([part(h) for part in self.parts] or [h]).sum(0)


WAYS: dict[str, Callable[[Any, torch.Tensor, Any], torch.Tensor]] = {
    function.__name__: function
    for function in (
        run, keeps, keeps_and_forgets, lists, clears, hooked, counts, uses_count, sets, freezes, switches,
        writes_in_place, notes_loss, has_aux, averages, averages_in_place, differentiates, has_variable, nests,
    )
}  # fmt: skip


class Root(nn.Module):
    """Adds what its modules have noted, and what they keep as `aux`, to its result."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.tree = build(spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        notes = Notes()
        h: torch.Tensor = self.tree(x, notes)
        aux: list[Any] = [part.aux for part in self.modules() if isinstance(part, Node) and part.kind == "has_aux"]
        return h + torch.stack([h.new_zeros(()), *notes.losses, *aux]).sum() + 0.01 * notes.calls


def build(spec: Spec) -> nn.Module:
    kind, _, children = spec
    return Node(kind, [build(child) for child in children])


def place(spec: Spec, degree: int) -> dict[str, int]:
    owner = {"": 0}

    def collect(item: Spec, name: str) -> None:
        owner[name] = owner[f"{name}.own"] = owner[f"{name}.parts"] = item[1] % degree
        for number, child in enumerate(item[2]):
            collect(child, f"{name}.parts.{number}")

    collect(spec, "tree")
    return owner


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(x)
    return out, ((out - y) ** 2).mean()


def data(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(2, count, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    return both[0], both[1]


def train(config: dict[str, Any], specs: list[Spec], done: Any) -> list[equality.Difference]:
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    found = []
    for number, spec in enumerate(specs):
        torch.manual_seed(3)
        found.append(equality.compare(Root(spec).double(), loss_of, data, owner=place(spec, smp.pp_size())))
        (done / f"{number}.{smp.rank()}").touch()
    smp.barrier()
    return found


KINDS = st.sampled_from(sorted(WAYS))
SPECS: st.SearchStrategy[Any] = st.recursive(
    st.tuples(KINDS, st.integers(0, 3), st.just([])),
    lambda children: st.tuples(KINDS, st.integers(0, 3), st.lists(children, min_size=1, max_size=3)),
    max_leaves=4,
)


@given(
    st.lists(SPECS, min_size=MODELS, max_size=MODELS),
    st.sampled_from([(2, 1), (2, 2), (2, 4), (3, 4)]),
    st.sampled_from(["interleaved", "simple"]),
)
@settings(max_examples=JOBS, deadline=None, derandomize=True, phases=[Phase.generate])
def test_random_idioms_equal_one_process_or_are_refused(
    tmp_path_factory: Any, specs: list[Spec], sizes: tuple[int, int], pipeline: str
) -> None:
    degree, microbatches = sizes
    config = {"pipeline_parallel_degree": degree, "microbatches": microbatches, "pipeline": pipeline}
    left = specs
    while left:
        done = tmp_path_factory.mktemp("done")
        try:
            results = run_ranks(degree, train, config, left, done)
        except RankError as error:
            number = min(len(list(done.glob(f"*.{rank}"))) for rank in range(degree))
            text = str(error)
            print(f"refused: {left[number]} {config}: {text[text.find('StepError: ') :].splitlines()[0]}")
            assert "StepError: " in text and "smp.set_partition" in text, f"{left[number]} {config}: {text}"  # noqa: PT018
            left = left[number + 1 :]
            continue
        for rank, found in enumerate(results):
            for spec, each in zip(left, found, strict=True):
                assert each.largest <= 1e-9, f"{spec} {config} on rank {rank}: {each}"
        return


FOUND: list[Spec] = [
    ("clears", 1, [("run", 0, [("run", 1, [])])]),
    ("differentiates", 2, [("has_aux", 0, []), ("has_aux", 3, [])]),
    ("has_variable", 2, [("averages_in_place", 1, []), ("nests", 3, [])]),
]
"""What was wrong once."""


def test_what_was_found_before_equals_one_process(tmp_path: Any) -> None:
    config = {"pipeline_parallel_degree": 3, "microbatches": 4}
    for results in run_ranks(3, train, config, FOUND, tmp_path):
        for spec, found in zip(FOUND, results, strict=True):
            assert found.largest <= 1e-9, f"{spec}: {found}"
