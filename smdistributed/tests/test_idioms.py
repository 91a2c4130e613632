"""Idioms of models that a partition could get wrong in silence: each equals one
process, or ends with a sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import equality
import idioms
from equality import rows, squares
from ranks import RankError, run_ranks


def train(names: list[str], config: dict[str, Any]) -> dict[str, equality.Difference]:
    import smdistributed.modelparallel.torch as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    table: dict[str, Callable[[], nn.Module]] = idioms.EQUAL | {
        n: make for n, (make, _) in idioms.REFUSED.items()
    }
    differences = {}
    for name in names:
        torch.manual_seed(3)
        model = table[name]().double()
        owner = {n: int(n == "b" or n.startswith("b.")) for n, _ in model.named_modules()}
        differences[name] = equality.compare(model, squares, rows, owner=owner)
    smp.barrier()
    return differences


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
def test_idioms_equal_one_process(pipeline: str) -> None:
    for rank, results in enumerate(run_ranks(2, train, list(idioms.EQUAL), {"pipeline": pipeline})):
        for name, result in results.items():
            assert result.largest <= 1e-9, f"{name} on rank {rank}: {result}"


OVERLAP_DECIDES = "an average that starts late"
"""Refused where microbatch 1 began before microbatch 0 wrote.

On a busy machine the overlap may begin later, and the result is equal.
"""


def test_what_only_an_overlap_makes_wrong_is_refused_or_equal() -> None:
    message = ""
    results = []
    try:
        results = run_ranks(2, train, [OVERLAP_DECIDES], {})
    except RankError as error:
        message = str(error)
    is_equal = bool(results) and max(result[OVERLAP_DECIDES].largest for result in results) <= 1e-9
    assert is_equal or f"StepError: {idioms.REFUSED[OVERLAP_DECIDES][1]}" in message


@pytest.mark.parametrize("name", [name for name in idioms.REFUSED if name != OVERLAP_DECIDES])
def test_what_cannot_be_equal_is_refused(name: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, train, [name], {})
    assert f"StepError: {idioms.REFUSED[name][1]}" in str(caught.value)


SCOPES: dict[str, Callable[[], Any]] = {
    "Negated": idioms.Negated,
    "saved_tensors_hooks": lambda: saved_tensors_hooks(torch.clone, idioms.halves),
    "save_on_cpu": save_on_cpu,
    "Doubled": idioms.Doubled,
}
"""Scopes that a script may enter around the call of a step function, or around a backward pass."""


def around_the_step(name: str) -> float:
    """Return the largest difference of a training, and of its reference, within a scope."""
    import smdistributed.modelparallel.torch as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = idioms.Root(idioms.net(), lambda self, x: self.c(self.b(self.a(x)))).double()
    owner = {n: int(n == "b" or n.startswith("b.")) for n, _ in model.named_modules()}
    with SCOPES[name]():
        return equality.compare(model, squares, rows, owner=owner).largest


@pytest.mark.parametrize("name", ["Negated", "saved_tensors_hooks"])
def test_a_step_within_a_scope_of_the_callers_thread_is_refused(name: str) -> None:
    with pytest.raises(RankError, match=rf"StepError: step function \S+ was called within {name}"):
        run_ranks(2, around_the_step, name)


@pytest.mark.parametrize("name", ["save_on_cpu", "Doubled"])
def test_a_step_within_a_scope_that_holds_everywhere_is_equal(name: str) -> None:
    assert max(run_ranks(2, around_the_step, name)) <= 1e-9


def around_backward(name: str) -> None:
    import smdistributed.modelparallel.torch as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    plain = idioms.Root(idioms.net(), lambda self, x: self.c(self.b(self.a(x)))).double()
    owner = {n: int(n == "b" or n.startswith("b.")) for n, _ in plain.named_modules()}
    model = smp.DistributedModel(plain)
    model.preset_partition(owner)

    @smp.step
    def train(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        _, loss = squares(model, x, y)
        with SCOPES[name]():
            model.backward(loss)

    train(model, *rows(0, 8))


@pytest.mark.parametrize("name", ["Negated", "saved_tensors_hooks"])
def test_a_backward_pass_within_a_scope_of_its_thread_is_refused(name: str) -> None:
    with pytest.raises(RankError, match=f"StepError: model.backward was called within {name}"):
        run_ranks(2, around_backward, name)


def attacked(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(squares(model, x, y)[1], x)
    return squares(model, (x + grad.sign()).detach(), y)


def attacks() -> None:
    import smdistributed.modelparallel.torch as smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = idioms.EQUAL["own __call__"]().double()
    owner = {n: int(n == "b" or n.startswith("b.")) for n, _ in model.named_modules()}
    equality.compare(model, attacked, rows, owner=owner)


def test_a_gradient_in_the_step_function_is_refused() -> None:
    with pytest.raises(
        RankError, match=r"StepError: torch.autograd.grad was called in the step function"
    ):
        run_ranks(2, attacks)


def warnings() -> list[str]:
    """Return a list that gets the library's warnings from now on."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smdistributed.modelparallel").addHandler(handler)
    return messages


def differs() -> list[str]:
    """Return a rank's warnings about a model that keeps a list on one rank and a dictionary on the
    other.
    """
    import smdistributed.modelparallel.torch as smp

    messages = warnings()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = idioms.Root(idioms.Notes(), lambda self, x: self.c(self.b(self.a(x)))).double()
    notes: Any = [] if smp.rank() == 0 else {}
    model.b.notes = notes
    owner = {n: int(n == "b" or n.startswith("b.")) for n, _ in model.named_modules()}
    assert equality.compare(model, squares, rows, owner=owner).largest <= 1e-9
    assert model.b.notes == ([] if smp.rank() == 0 else {"calls": 10})
    smp.barrier()
    return messages


def test_a_place_of_another_kind_on_two_ranks_is_said_once() -> None:
    root, _ = run_ranks(2, differs)
    assert len(root) == 1
    assert (
        "attribute 'notes' of module b (Notes): something in it is of another kind on another rank"
        in root[0]
    )


def keeps_arrays() -> list[str]:
    """Return the warnings of the root's rank: it has two arrays of 65 MiB, and one is read-only."""
    import smdistributed.modelparallel.torch as smp

    messages = warnings()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model: Any = idioms.Root(idioms.Layer(), lambda self, x: self.c(self.b(self.a(x)))).double()
    constant = numpy.zeros(65 << 20, numpy.uint8)
    constant.flags.writeable = False
    model.constant, model.bank = constant, numpy.zeros(65 << 20, numpy.uint8)
    owner = {n: int(n == "b" or n.startswith("b.")) for n, _ in model.named_modules()}
    assert equality.compare(model, squares, rows, owner=owner).largest <= 1e-9
    smp.barrier()
    return messages


def test_an_array_that_is_too_large_to_be_compared_is_said_once() -> None:
    root, _ = run_ranks(2, keeps_arrays)
    assert len(root) == 1, root
    assert root[0].startswith("attribute 'bank' of module the root module (Root) has an array of")


def notebook() -> Callable[[torch.Tensor], None]:
    seen: list[Any] = []
    last: dict[str, Any] = {}
    calls = 0

    def note(value: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        seen.append(value.detach().mean())
        last["value"] = value

    return note


NOTE = notebook()


class NotesInClosure(idioms.Layer):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        NOTE(y)
        return y


class RootNotesInClosure(idioms.Root):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        NOTE(y)
        return y


def notes_in_closure() -> list[str]:
    import smdistributed.modelparallel.torch as smp

    messages = warnings()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = RootNotesInClosure(NotesInClosure(), lambda self, x: self.c(self.b(self.a(x))))
    owner = {n: int(n == "b" or n.startswith("b.")) for n, _ in model.named_modules()}
    assert equality.compare(model.double(), squares, rows, owner=owner).largest <= 1e-9
    smp.barrier()
    return messages


def test_what_is_only_noted_in_a_closure_does_not_put_microbatches_in_turn() -> None:
    assert run_ranks(2, notes_in_closure) == [[], []]
