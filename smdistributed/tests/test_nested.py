"""Test that no tensor that crosses a partition loses its gradient, in any kind of object."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import equality
from jobs import BY_HAND
from kinds import ANY, REFUSED, TENSORS
from ranks import run_ranks

ALL = {**ANY, **TENSORS}
WIDTH = 4
Spec = "str | tuple[str, Any, Any]"
"""A nested value: "first" or "second" (tensors), "none", or a kind with two values."""


def wrap(spec: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
    if isinstance(spec, str):
        return {"first": first, "second": second, "none": None, "number": 3}[spec]
    kind, one, other = spec
    return ALL[kind][0](wrap(one, first, second), wrap(other, first, second))


def read(spec: Any, value: Any) -> list[torch.Tensor]:
    """Return the tensors of a wrapped value, and check that everything else is as it was."""
    if isinstance(spec, str):
        if spec in ("first", "second"):
            assert isinstance(value, torch.Tensor)
            return [value]
        assert value == {"none": None, "number": 3}[spec]
        return []
    kind, *specs = spec
    assert type(value) is type(ALL[kind][0](torch.ones(2, 2), torch.ones(2, 2)))
    return [
        tensor
        for inner, spec in zip(specs, ALL[kind][1](value), strict=True)
        for tensor in read(inner, spec)
    ]


def added(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return one column, to which each tensor adds in another way."""
    return torch.stack([t.sum(1) * (n + 1) for n, t in enumerate(tensors)]).sum(0)[:, None]


class Gives(nn.Module):
    """Returns a nested value with two tensors that need gradients."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec, self.one, self.two = spec, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return wrap(self.spec, self.one(x).tanh(), self.two(x).tanh())


class Takes(nn.Module):
    """Reads one."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec, self.linear = spec, nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any, *, named: Any) -> torch.Tensor:
        both = [*read(self.spec, value), *read(self.spec, named)]
        result: torch.Tensor = self.linear(added(both).tanh().expand(-1, WIDTH))
        return result


class Net(nn.Module):
    """A network on partition 0, but for `gives` and `takes`: a value is the result of a remote
    module, and twice an argument.
    """

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.spec, self.first, self.last = spec, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gives, self.takes = Gives(spec), Takes(spec)
        self.own = Gives(spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        result: torch.Tensor = self.last(self.takes(self.gives(x), named=self.own(x)))
        return result


class Returns(nn.Module):
    """Returns the output of its last module, which is remote: the runtime's tail call."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.first, self.gives = nn.Linear(WIDTH, WIDTH), Gives(spec)

    def forward(self, x: torch.Tensor) -> Any:
        return self.gives(self.first(x).tanh())


def train(specs: list[Any], config: dict[str, Any], tails: bool) -> list[equality.Difference]:
    import smdistributed.modelparallel.torch as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    differences = []
    for spec in specs:
        for kind in (Net, Returns) if tails else (Net,):
            torch.manual_seed(5)
            plain = kind(spec).double()
            owner = {
                name: int(name.startswith(("gives", "takes"))) for name, _ in plain.named_modules()
            }

            def loss_of(
                model: Any, x: torch.Tensor, y: torch.Tensor, spec: Any = spec, kind: type = kind
            ) -> tuple[torch.Tensor, torch.Tensor]:
                out = model(x)
                if kind is Returns:
                    out = added(read(spec, out))
                return out, ((out - y) ** 2).mean()

            def data(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
                both = torch.randn(
                    2, count, WIDTH, generator=torch.Generator().manual_seed(seed)
                ).double()
                return both[0], both[1]

            differences.append(equality.compare(plain, loss_of, data, owner=owner))
    smp.barrier()
    return differences


def check(specs: list[Any], *, tails: bool = True, **config: Any) -> None:
    for rank, results in enumerate(run_ranks(2, train, specs, config, tails)):
        for n, result in enumerate(results):
            spec = specs[n // 2 if tails else n]
            assert result.largest <= 1e-10, f"{spec} on rank {rank}: {result}"


@pytest.mark.core
def test_every_kind_equals_one_process() -> None:
    check([(kind, "first", "second") for kind in ANY])


def test_kinds_that_hold_only_tensors_equal_one_process() -> None:
    # The order in a set is undefined: no tail call can be sure of it.
    check([(kind, "first", "second") for kind in TENSORS], tails=False)


VALUES = st.recursive(
    st.sampled_from(["first", "second", "first", "none", "number"]),
    lambda inner: st.tuples(st.sampled_from(sorted(ANY)), inner, inner),
    max_leaves=6,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(ANY)), VALUES, st.just("second")), min_size=8, max_size=8
    ),
    st.sampled_from(["interleaved", "simple"]),
)
@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
def test_nested_kinds_equal_one_process(specs: list[Any], pipeline: str) -> None:
    check(specs, pipeline=pipeline)


class Refused(nn.Module):
    """Has an object where a partition ends: as an argument or as a result."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.first, self.other = where, nn.Linear(2, 2), Other(where)

    def forward(self, x: torch.Tensor, make: Any) -> Any:
        x = self.first(x)
        out = self.other(make(x, x) if self.where == "argument" else x, make)
        return x + self.other.linear.in_features if out is None else x


class Other(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.linear = where, nn.Linear(2, 2)

    def forward(self, value: Any, make: Any) -> Any:
        return None if self.where == "argument" else make(self.linear(value), value)


class Make:
    """Makes a value of a kind; it travels by its name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return REFUSED[self.kind](a, b)


def refused(where: str) -> dict[str, str]:
    """Return by kind the error of a step: all ranks fail, and the next step starts anew."""
    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "microbatches": 1})
    plain = Refused(where)
    smp.set_partition(plain.other, 1)
    model = smp.DistributedModel(plain)

    @smp.step(non_split_inputs=["make"])
    def train(model: Any, x: torch.Tensor, make: Any) -> None:
        model.backward(model(x, make).sum())

    out = {}
    for kind in REFUSED:
        try:
            train(model, torch.ones(2, 2), Make(kind))
            out[kind] = "nothing"
        except smp.StepError as error:
            out[kind] = str(error)
        smp.barrier()
    return out


@pytest.mark.parametrize("where", ["argument", "result"])
def test_what_cannot_travel_is_an_error(where: str) -> None:
    ranks = run_ranks(2, refused, where)
    for kind in REFUSED:
        for text in (texts[kind] for texts in ranks):
            assert re.search(
                rf"cannot send the {where}s? of module other \(Other\) to rank ", text
            ), f"{kind}: {text}"
        joined_text = "\n".join(texts[kind] for texts in ranks)
        assert "smp.set_partition" in joined_text, joined_text
        assert re.search(r"\((Linear|list_iterator|generator)\)|pickle", joined_text), joined_text


def arrives_as_kept(value: Any) -> bool:
    from smdistributed.modelparallel.torch.transport import pytrees

    return pytrees.map_tensors(torch.clone, value) is value


def test_objects_without_tensors_stay_what_they_are() -> None:
    assert all(
        arrives_as_kept(ANY[kind][0](1, "b"))
        for kind in ("dataclass", "own list", "own dict", "user dict", "plain object")
    )


def test_tensors_are_found_in_whatever_object() -> None:
    from smdistributed.modelparallel.torch.transport import pytrees

    class Local:
        def __init__(self, *inside: Any) -> None:
            self.inside = inside

    first, second = torch.ones(2), torch.ones(3, requires_grad=True)
    value = Local(
        lambda: 1,
        torch.nn.Linear(2, 2),
        threading.Lock(),
        iter([1]),
        [first, Local(second)],
        first,
        Local,
    )
    assert [id(tensor) for tensor in pytrees.tensors_in({"a": value})] == [id(first), id(second)]
    for kind, (make, _) in {**ANY, **TENSORS}.items():
        both = torch.ones(2, 4), torch.ones(2, 4)
        assert len(pytrees.tensors_in(make(*both))) >= (2 if kind != "packed sequence" else 1), kind
