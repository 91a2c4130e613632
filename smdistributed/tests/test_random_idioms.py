"""Test modules drawn at random, with habits that a partition could get wrong: they keep state,
write to arguments, set each other.

Each equals one process, or is refused by a sentence. More by hand:
SMP_RANDOM_IDIOMS=1000 models for each job.
"""

from __future__ import annotations

import contextvars
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import equality
from equality import rows, squares
from jobs import forget
from ranks import run_ranks

WIDTH = 4
MODELS = int(os.environ.get("SMP_RANDOM_IDIOMS", "20"))
Spec = tuple[str, int, list[Any]]  # kind, partition, children
FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("FACTOR", default=1.0)
GAIN = 1.0


class Settings:
    """Values that modules set and read on a class."""

    gain = 1.0


class Slots:
    """An object without a dictionary."""

    __slots__ = ("value",)


@dataclass
class Notes:
    """Containers that modules write into."""

    losses: list[torch.Tensor] = field(default_factory=list)
    calls: int = 0


class Node(nn.Module):
    """A module with children. `way` says how the module calls its children."""

    def __init__(self, kind: str, children: list[nn.Module]) -> None:
        super().__init__()
        self.own, self.parts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(children)
        self.kind, self.way = kind, WAYS[kind]
        self.scale, self.count, self.on = 1.0, 0, True
        self.kept: Any = None
        self.found: list[torch.Tensor] = []
        self.stats, self.seen, self.slots = {"gain": 1.0, "calls": 0}, [0.0], Slots()
        self.plain = torch.ones(WIDTH, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(WIDTH))
        if kind == "hooked":
            for part in self.parts:
                part.register_forward_hook(self.collect)

    def collect(self, _module: nn.Module, _args: Any, out: torch.Tensor) -> None:
        self.found.append(out)

    def base(self, h: torch.Tensor) -> torch.Tensor:
        """Return the result that every kind computes by itself: it depends on values that others
        may have set.
        """
        y: torch.Tensor = torch.tanh(self.own(h)) * self.scale * FACTOR.get() * GAIN * Settings.gain
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


def rebinds(self: Any, h: torch.Tensor, notes: Any) -> Any:
    global GAIN
    GAIN = 1.0 + 0.1 * float(h.detach().sum() > 0)
    return run(self, h, notes)


def sets_class(self: Any, h: torch.Tensor, notes: Any) -> Any:
    Settings.gain = 1.0 + 0.1 * float(h.detach().sum() > 0)
    return run(self, h, notes)


def uses_number_in_dict(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.stats["calls"] += 1
    h = run(self, h, notes) * self.stats["gain"]
    self.stats["gain"] = 0.9 * self.stats["gain"] + 0.1 * float(h.detach().mean())
    self.stats["calls"] += 1
    return h * (1 + 0.01 * self.stats["calls"])


def uses_log(self: Any, h: torch.Tensor, notes: Any) -> Any:
    gain = 1 + 0.1 * sum(self.seen[-3:])
    h = run(self, h * gain, notes)
    self.seen.append(float(h.detach().mean()))
    return h


def logs(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.seen.append(float(h.detach().mean()))
    h = run(self, h, notes)
    self.seen.append(float(h.detach().mean()))
    return h


def keeps_in_slots(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.slots.value = h
    return run(self, h, notes) + self.slots.value


def writes_plain_tensor(self: Any, h: torch.Tensor, notes: Any) -> Any:
    h = run(self, h * self.plain.clone(), notes)
    self.plain.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h


def bypasses(self: Any, h: torch.Tensor, notes: Any) -> Any:
    object.__setattr__(self, "kept", h)
    return run(self, h, notes) + self.kept


def deletes(self: Any, h: torch.Tensor, notes: Any) -> Any:
    self.extra = h
    h = run(self, h, notes) + self.extra
    del self.extra
    return h + float(hasattr(self, "extra"))


def nests(self: Any, h: torch.Tensor, notes: Any) -> Any:
    return run(self, h, notes) + torch.stack([part(h) for part in self.parts] or [h]).sum(0)


WAYS: dict[str, Callable[[Any, torch.Tensor, Any], torch.Tensor]] = {
    function.__name__: function
    for function in (
        run, keeps, keeps_and_forgets, lists, clears, hooked, counts, uses_count, sets, freezes,
        switches, writes_in_place, notes_loss, has_aux, averages, averages_in_place,
        differentiates, has_variable, nests, rebinds, sets_class, uses_number_in_dict, uses_log,
        logs, keeps_in_slots, writes_plain_tensor, bypasses, deletes,
    )
}  # fmt: skip


class Root(nn.Module):
    """Adds the notes of its modules, and their `aux` values, to its result."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.tree = build(spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global GAIN
        GAIN = Settings.gain = 1.0
        notes = Notes()
        h: torch.Tensor = self.tree(x, notes)
        aux: list[Any] = [
            part.aux for part in self.modules() if isinstance(part, Node) and part.kind == "has_aux"
        ]
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


def drawn(chance: random.Random, depth: int = 0) -> Spec:
    count = chance.choice((0, 1, 1, 2, 3)[: 5 - depth]) if depth < 4 else 0
    return (
        chance.choice(sorted(WAYS)),
        chance.randrange(4),
        [drawn(chance, depth + 1) for _ in range(count)],
    )


def train(config: dict[str, Any], specs: list[Spec]) -> list[equality.Difference | str]:
    """Return how far each model is from one process, or the error that refuses it."""
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.exceptions import StepError

    smp.init(config)
    outcomes: list[equality.Difference | str] = []
    for spec in specs:
        torch.manual_seed(3)
        try:
            outcomes.append(
                equality.compare(
                    Root(spec).double(), squares, rows, owner=place(spec, smp.pp_size())
                )
            )
        except StepError as error:
            outcomes.append(f"{error} {error.__cause__}")
            forget()
    smp.barrier()
    return outcomes


@pytest.mark.parametrize(
    ("degree", "microbatches", "pipeline"),
    [(2, 2, "simple"), (2, 4, "interleaved"), (3, 4, "interleaved"), (3, 4, "simple")],
)
def test_random_idioms_equal_one_process_or_are_refused(
    degree: int, microbatches: int, pipeline: str
) -> None:
    chance = random.Random(f"{degree} {microbatches} {pipeline}")
    specs = [drawn(chance) for _ in range(MODELS)]
    config = {
        "pipeline_parallel_degree": degree,
        "microbatches": microbatches,
        "pipeline": pipeline,
    }
    refused = 0
    for spec, *rank_outcomes in zip(
        specs, *run_ranks(degree, train, config, specs, limit=300 + 20 * MODELS), strict=True
    ):
        texts = [outcome for outcome in rank_outcomes if isinstance(outcome, str)]
        refused += bool(texts)
        if texts:
            print(f"refused: {spec}: {texts}")
            assert len(texts) == degree, f"{spec}: {rank_outcomes}"
            assert any("smp.set_partition" in text for text in texts), f"{spec}: {rank_outcomes}"
        else:
            assert (
                max(outcome.largest for outcome in rank_outcomes if not isinstance(outcome, str))
                <= 1e-9
            ), f"{spec}: {rank_outcomes}"
    assert refused <= MODELS // 10


FOUND: list[Spec] = [
    ("clears", 1, [("run", 0, [("run", 1, [])])]),
    ("differentiates", 2, [("has_aux", 0, []), ("has_aux", 3, [])]),
    ("has_variable", 2, [("averages_in_place", 1, []), ("nests", 3, [])]),
]
"""Specifications that were wrong once."""


def test_what_was_found_before_equals_one_process() -> None:
    config = {"pipeline_parallel_degree": 3, "microbatches": 4}
    for results in run_ranks(3, train, config, FOUND):
        for spec, outcome in zip(FOUND, results, strict=True):
            assert not isinstance(outcome, str), f"{spec}: {outcome}"
            assert outcome.largest <= 1e-9, f"{spec}: {outcome}"
