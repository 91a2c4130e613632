"""Trees of modules drawn at random, placed at random, equal one process."""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import equality
from ranks import run_ranks

WIDTH = 4
# A job trains several trees. More jobs by hand: SMP_RANDOM_TREES=100.
JOBS, TREES = int(os.environ.get("SMP_RANDOM_TREES", "4")), 4
Spec = tuple[str, int, list[Any]]  # kind, partition, children


class Sum(nn.Module):
    """All children read one input."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.stack([part(x) for part in self.parts]).sum(0)


class Skip(nn.Module):
    """The first tensor goes round all children."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"p{i}": child for i, child in enumerate(children)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for part in self.parts.values():
            h = part(h) + 0.1 * x
        return h


class Twice(nn.Module):
    """The child is called again with its own output."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.part = children[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.part(torch.tanh(self.part(x)))
        return y


class Scaled(nn.Module):
    """Keyword arguments in, a dictionary out."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.part = children[0]

    def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, Any]:
        return {"y": self.part(x) * scale, "x": x, "n": None}


class Asks(nn.Module):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.part = Scaled(children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.part(x=x, scale=0.5)
        y: torch.Tensor = out["y"] + out["x"]
        return y


KINDS: dict[str, Any] = {"sum": Sum, "skip": Skip, "twice": Twice, "asks": Asks}


def build(spec: Spec, tied: nn.Linear) -> nn.Module:
    kind, _, children = spec
    if kind == "linear":
        return nn.Linear(WIDTH, WIDTH)
    if kind == "tied":
        module = nn.Linear(WIDTH, WIDTH)
        module.weight = tied.weight
        return module
    if kind == "norm":
        return nn.LayerNorm(WIDTH)
    if kind == "inplace":  # nothing else reads the changed value
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
    if kind == "chain":
        return nn.Sequential(*[build(child, tied) for child in children])
    module_: nn.Module = KINDS[kind]([build(child, tied) for child in children])
    return module_


class Root(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.tree = build(spec, self.stem)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.tree(self.stem(x))
        return y


def place(root: Root, spec: Spec, degree: int) -> dict[str, int]:
    """Return the partition of each module: by the tree.

    Modules that share the weight stay with the first.
    """
    flat: list[int] = []

    def collect(item: Spec) -> None:
        flat.append(item[1] % degree)
        for child in item[2]:
            collect(child)

    collect(spec)
    owner = {
        name: 0 if name in ("", "stem") else flat[i % len(flat)]
        for i, (name, _) in enumerate(root.named_modules())
    }
    for name, module in root.named_modules():
        if isinstance(module, nn.Linear) and module.weight is root.stem.weight:
            owner[name] = owner["stem"]
    return owner


def leaves() -> st.SearchStrategy[Spec]:
    kind = st.sampled_from(["linear", "linear", "tied", "norm", "inplace"])
    return st.tuples(kind, st.integers(0, 3), st.just([]))


def inner(children: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    kind = st.sampled_from(["chain", "chain", "sum", "skip", "twice", "asks"])
    return st.tuples(kind, st.integers(0, 3), st.lists(children, min_size=1, max_size=4))


SPECS = st.recursive(leaves(), inner, max_leaves=10)


def train(config: dict[str, Any], specs: list[Spec]) -> list[equality.Difference]:
    import smdistributed.modelparallel.torch as smp

    smp.init(config)
    differences = []
    for spec in specs:
        torch.manual_seed(3)
        root = Root(spec).double()
        differences.append(
            equality.compare(
                root, equality.squares, equality.rows, owner=place(root, spec, smp.pp_size())
            )
        )
    smp.barrier()
    return differences


@given(
    st.lists(SPECS, min_size=TREES, max_size=TREES),
    st.sampled_from([(2, 1), (2, 4), (3, 4), (4, 2)]),
    st.sampled_from(["interleaved", "simple"]),
)
@settings(max_examples=JOBS, deadline=None, derandomize=True, phases=[Phase.generate])
def test_random_trees_equal_one_process(
    specs: list[Spec], sizes: tuple[int, int], pipeline: str
) -> None:
    degree, microbatches = sizes
    config = {
        "pipeline_parallel_degree": degree,
        "microbatches": microbatches,
        "pipeline": pipeline,
    }
    for rank, results in enumerate(run_ranks(degree, train, config, specs)):
        for spec, rank_differences in zip(specs, results, strict=True):
            assert rank_differences.largest <= 1e-9, f"{spec} on rank {rank}: {rank_differences}"
