"""Test ``smp.step``: arguments that are split and how, arguments that are passed whole, results,
and errors.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from jobs import BY_HAND, error_of
from ranks import run_ranks

FOUR = {"microbatches": 4}


class Pair(NamedTuple):
    left: Any
    right: Any


class Sliced:
    """A value that a script can pass and that knows how to split itself."""

    def __init__(self, text: str) -> None:
        self.text = text

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> str:
        return f"{self.text} {mb} of {num_mb} along {axis}"


def _arguments() -> None:
    import smdistributed.modelparallel.torch as smp

    smp.init(FOUR)
    seen: dict[str, list[Any]] = collections.defaultdict(list)
    rows = torch.arange(8).reshape(8, 1)

    def look(**values: Any) -> None:
        for name, value in values.items():
            seen[name].append(value)

    @smp.step(
        non_split_inputs=["whole", "key"], input_split_axes={"across": 1, "last": -1, "named": 1}
    )
    def step(positional, across, last, whole, *more, default="a", **others):  # type: ignore[no-untyped-def]
        look(
            positional=positional,
            across=across,
            last=last,
            whole=whole,
            more=more,
            default=default,
            **others,
        )

    module = nn.Linear(1, 1)
    nested = {
        "list": [rows, "text", 3],
        "tuple": (rows, (rows + 1,)),
        "pair": Pair(rows, None),
        "set": {rows},
        "ordered": collections.OrderedDict(a=rows),
        "default": collections.defaultdict(None, {"a": rows}),
    }
    untouched = [1, ("a", None), {"b": module}]
    step(
        rows,
        rows.T,
        rows.T,
        {"x": rows},
        rows,
        Sliced("more"),
        named=rows.T,
        key=rows,
        nested=nested,
        untouched=untouched,
        scalar=torch.tensor(5.0),
        empty=torch.empty(0, 3),
        module=module,
        sliced=[Sliced("one")],
    )
    assert [batch.tolist() for batch in seen["positional"]] == [
        [[0], [1]],
        [[2], [3]],
        [[4], [5]],
        [[6], [7]],
    ]
    for name in ("across", "last", "named"):
        assert [batch.tolist() for batch in seen[name]] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert all(batch["x"] is rows for batch in seen["whole"])
    assert all(batch is rows for batch in seen["key"])
    assert [(part[0].tolist(), part[1]) for part in seen["more"]] == [
        ([[2 * index], [2 * index + 1]], f"more {index} of 4 along 0") for index in range(4)
    ]
    assert seen["default"] == ["a"] * 4
    for index, part in enumerate(seen["nested"]):
        own = [[2 * index], [2 * index + 1]]
        assert {key: type(value) for key, value in part.items()} == {
            key: type(nested[key]) for key in nested
        }
        assert (part["list"][0].tolist(), part["list"][1:]) == (own, ["text", 3])
        assert (part["tuple"][0].tolist(), part["tuple"][1][0].tolist()) == (
            own,
            [[2 * index + 1], [2 * index + 2]],
        )
        assert (part["pair"].left.tolist(), part["pair"].right) == (own, None)
        assert [batch.tolist() for batch in part["set"]] == [own]
        assert part["ordered"]["a"].tolist() == part["default"]["a"].tolist() == own
    # A value without a tensor in it is not even copied.
    assert all(batch is untouched for batch in seen["untouched"])
    assert all(batch is module for batch in seen["module"])
    assert [float(batch) for batch in seen["scalar"]] == [5.0] * 4
    assert [tuple(batch.shape) for batch in seen["empty"]] == [(0, 3)] * 4
    assert seen["sliced"] == [[f"one {index} of 4 along 0"] for index in range(4)]


def _mappings() -> None:
    """Pass and return mappings with attributes of their own, as transformers does."""
    from transformers import BatchEncoding
    from transformers.modeling_outputs import CausalLMOutput

    import smdistributed.modelparallel.torch as smp

    smp.init(FOUR)
    kinds = []

    @smp.step()
    def step(batch: Any) -> Any:
        kinds.append(type(batch))
        return CausalLMOutput(loss=batch["x"].float().mean(), logits=batch.x)

    batch = BatchEncoding({"x": torch.arange(8)})
    result: Any = step(batch)
    assert kinds == [BatchEncoding] * 4
    assert batch["x"].tolist() == list(range(8))
    assert type(result).__name__ == CausalLMOutput.__name__
    assert float(result.loss.reduce_mean()) == 3.5
    assert result["logits"].concat().tolist() == list(range(8))


class Wrapped(MutableMapping[str, Any]):
    """A mapping that keeps its items in a dictionary of its own."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class Shared(Wrapped):
    """A container whose copies share the items, so that there is no copy with others."""

    __slots__ = ("items_",)

    def __copy__(self) -> Shared:
        copied = Shared.__new__(Shared)
        copied.items_ = self.items_
        return copied


def _own_mappings() -> None:
    import smdistributed.modelparallel.torch as smp

    smp.init(FOUR)

    @smp.step()
    def step(batch: Any) -> Any:
        return type(batch)({"y": batch["x"] + 1})

    batch = Wrapped({"x": torch.arange(8)})
    result: Any = step(batch)
    assert batch["x"].tolist() == list(range(8)), "the caller's batch is as it was"
    assert type(result) is Wrapped
    assert result["y"].concat().tolist() == list(range(1, 9))
    for strange in (Shared({"x": torch.arange(8)}), MappingProxyType({"x": torch.arange(8)})):
        with pytest.raises(ValueError, match=r"argument batch: a .* Pass a dict, or name"):
            step(strange)
        assert strange["x"].tolist() == list(range(8))


def _results() -> None:
    import smdistributed.modelparallel.torch as smp

    smp.init(FOUR)
    assert smp.num_microbatches() == 4
    weight = torch.ones((), requires_grad=True)

    @smp.step
    def step(rows: torch.Tensor) -> Any:
        """Return results of many kinds."""
        return {
            "loss": rows.mean() * weight,
            "rows": (rows, [rows + 1]),
            "pair": Pair(rows.sum(), "text"),
            "count": len(rows),
            "nothing": None,
            "sometimes": None if rows[0] else rows,
            "ragged": list(range(int(rows[0]))),
        }

    assert (vars(step)["__name__"], step.__doc__) == ("step", "Return results of many kinds.")
    outputs = step(torch.arange(8.0))
    loss = outputs["loss"]
    assert isinstance(loss, smp.StepOutput)
    assert [float(output) for output in loss.outputs] == [0.5, 2.5, 4.5, 6.5]
    assert not any(output.requires_grad for output in loss)
    assert (float(loss.reduce_mean()), float(loss.reduce_sum())) == (3.5, 14.0)
    assert loss.concat().tolist() == loss.stack().tolist() == [0.5, 2.5, 4.5, 6.5]
    assert outputs["rows"][0].concat().tolist() == list(range(8))
    assert outputs["rows"][0].stack().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert isinstance(outputs["rows"][1][0].detach(), smp.StepOutput)
    assert (float(outputs["pair"].left.reduce_sum()), outputs["pair"].right) == (28.0, ["text"] * 4)
    assert outputs["count"] == [2] * 4
    assert outputs["nothing"] is None
    assert [type(output) for output in outputs["sometimes"]] == [torch.Tensor] + [type(None)] * 3
    assert outputs["ragged"] == [[], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]

    @smp.step(detach_outputs=False)
    def attached(rows: torch.Tensor) -> torch.Tensor:
        return rows.sum() * weight

    attached(torch.arange(8.0)).reduce_sum().backward()
    assert float(weight.grad or 0) == 28.0

    class Trainer:
        def __init__(self) -> None:
            self.scale = 2

        @smp.step
        def step(self, rows: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
            return rows.sum() * self.scale + offset

    assert Trainer().step(torch.arange(8.0), offset=1).concat().tolist() == [3.0, 11.0, 19.0, 27.0]
    assert Trainer.step(Trainer(), torch.arange(4.0)).concat().tolist() == [0.0, 2.0, 4.0, 6.0]

    class Batches(list[Any]):
        """Would be split, if not the object of its own method."""

        @smp.step()
        def step(self) -> int:
            return len(self)

    assert Batches([torch.ones(3)]).step() == [1] * 4


def _errors() -> list[str]:
    import smdistributed.modelparallel.torch as smp

    @smp.step(input_split_axes={"across": 1})
    def step(x: Any, across: Any = None) -> None:
        raise AssertionError(f"no microbatch runs: {x}, {across}")

    texts = []
    for config, arguments in (
        (None, [1]),
        (FOUR, [torch.ones(6, 2)]),
        (FOUR, [{"a": [torch.ones(8), torch.ones(3)]}]),
    ):
        if config is not None:
            smp.init(config)
        with pytest.raises((ValueError, smp.SMPRuntimeError)) as caught:
            step(*arguments)
        texts.append(str(caught.value))
    with pytest.raises(ValueError, match="step") as caught:
        step(torch.ones(4), torch.ones(4))
    return [
        re.sub(r"function \S+step,", "function step,", text) for text in (*texts, str(caught.value))
    ]


def _empty_elsewhere(rank_of_data: int) -> list[float]:
    """Train with data on one rank only; the other has empty rows of the right number."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(3)
    smp.init(BY_HAND)
    with smp.partition(0):
        first = nn.Linear(4, 4)
    with smp.partition(1):
        second = nn.Linear(4, 1)
    model = smp.DistributedModel(nn.Sequential(first, second))
    optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, rows: torch.Tensor) -> Any:
        loss = model(rows).pow(2).mean()
        model.backward(loss)
        return loss

    rows = torch.ones(4, 4) if smp.pp_rank() == rank_of_data else torch.empty(4, 0)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(train(model, rows).reduce_mean()))
        optimizer.step()
    return losses


def test_arguments_are_split_and_the_rest_is_passed_whole() -> None:
    run_ranks(1, _arguments)


def test_mappings_of_a_script_keep_their_class_and_their_items() -> None:
    run_ranks(1, _own_mappings)


def test_mappings_of_transformers_keep_their_class() -> None:
    run_ranks(1, _mappings)


def test_what_comes_back() -> None:
    run_ranks(1, _results)


def test_an_error_names_the_argument_its_size_and_the_number() -> None:
    ((before, rows, nested, axis),) = run_ranks(1, _errors)
    assert before == "the number of microbatches is not known yet: call smp.init() first"
    advice = (
        "; give a batch that they divide (a DataLoader with drop_last=True), or name the argument"
        " in non_split_inputs"
    )
    assert (
        rows
        == "smp.step: function step, argument x: axis 0 has size 6, which 4 microbatches do not"
        f" divide{advice}"
    )
    assert (
        nested
        == "smp.step: function step, argument x['a'][1]: axis 0 has size 3, which 4 microbatches"
        f" do not divide{advice}"
    )
    assert (
        axis
        == "smp.step: function step, argument across: a tensor of shape (4,) has no axis 1 to split"
        " along"
    )


def test_other_ranks_may_have_empty_rows() -> None:
    first, second = run_ranks(2, _empty_elsewhere, 0)
    assert first == second
    assert first[2] < first[0]


def _sources() -> dict[str, str]:
    """Return the message about each argument that batches come from, by its kind."""
    import smdistributed.modelparallel.torch as smp

    smp.init(FOUR)
    dataset = torch.utils.data.TensorDataset(torch.ones(8, 1))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    first_of_source = smp.step(non_split_inputs=["source"])(lambda source, _: next(iter(source))[0])
    assert len(first_of_source(loader, None).concat()) == 16
    counted = smp.step(lambda numbers, x: x + next(numbers))
    assert counted(itertools.count(), torch.zeros(4)).concat().tolist() == [0.0, 1.0, 2.0, 3.0]
    messages = {}
    for name, source in {
        "DataLoader": loader,
        "TensorDataset": dataset,
        "list_iterator": iter([1]),
    }.items():
        with pytest.raises(ValueError, match="argument source") as caught:
            smp.step(lambda source: next(iter(source)))({"train": source})
        messages[name] = str(caught.value)
    return messages


def test_where_batches_come_from_is_no_batch() -> None:
    (messages,) = run_ranks(1, _sources)
    for name, text in messages.items():
        assert (
            f"argument source['train']: a {name} is not split, so each of 4 microbatches would draw"
            in text
        )
        assert "Draw a batch outside of the function, and pass its tensors" in text


class AppendOnly(list[int]):
    """A list whose own code refuses to have its items replaced while `is_sealed` is set."""

    is_sealed = False

    def __setitem__(self, *words: Any) -> None:
        if self.is_sealed:
            raise TypeError("append only")
        super().__setitem__(*words)


class Journal(nn.Module):
    """A module that appends to such a list in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(self.calls))
        return self.linear(x)  # type: ignore[no-any-return]


def _errors_of_the_script() -> list[str]:
    """Return the errors of steps whose own code raises them on rank 0, and of a good step
    afterwards.
    """
    import smdistributed.modelparallel.torch as smp

    smp.init(BY_HAND)
    journal = Journal()
    sealed = AppendOnly()
    sealed.is_sealed = smp.rank() == 0
    journal.calls = sealed
    model = smp.DistributedModel(nn.Sequential(journal, nn.Linear(4, 1)))
    original_setattr = nn.Module.__setattr__

    @smp.step
    def read(_model: Any, _x: torch.Tensor) -> Any:
        if smp.rank() == 0:
            raise FileNotFoundError("no file shard-3")

    @smp.step
    def train(model: Any, x: torch.Tensor) -> Any:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    x = torch.ones(4, 4)
    errors = [error_of(lambda: read(model, x)), error_of(lambda: train(model, x))]
    journal.calls = []
    assert nn.Module.__setattr__ is original_setattr
    errors.append(error_of(lambda: train(model, x)))
    return errors


def test_an_error_of_the_scripts_own_code_ends_the_step_and_leaves_the_next_one_whole() -> None:
    first, second = run_ranks(2, _errors_of_the_script)
    assert first == ["FileNotFoundError: no file shard-3", "TypeError: append only", "nothing"]
    assert second[0] == "PeerError: rank 0 (pp_rank 0) failed: FileNotFoundError: no file shard-3"
    assert second[2] == "nothing"


class Shy(list[int]):
    """A list that cannot be read while `is_closed` is set."""

    is_closed = False

    def __iter__(self) -> Iterator[int]:
        if self.is_closed:
            raise RuntimeError("closed")
        return super().__iter__()


def _error_before_the_first_microbatch() -> str:
    """Return the error of a step whose modules cannot be read on rank 1, which rank 0 needs."""
    import smdistributed.modelparallel.torch as smp

    smp.init(BY_HAND)
    journal = Journal()
    journal.calls = Shy()
    with smp.partition(1):
        head = nn.Linear(4, 1)
    model = smp.DistributedModel(nn.Sequential(journal, head))

    @smp.step
    def train(model: Any, x: torch.Tensor) -> Any:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    x = torch.ones(4, 4)
    train(model, x)
    if smp.rank() == 1:
        journal.calls.is_closed = True
    return error_of(lambda: train(model, x))


def test_an_error_before_the_first_microbatch_is_told_to_the_other_ranks() -> None:
    first, second = run_ranks(2, _error_before_the_first_microbatch)
    assert second == "RuntimeError: closed"
    assert first == "PeerError: rank 1 (pp_rank 1) failed: RuntimeError: closed"
