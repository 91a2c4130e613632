"""Ranks that do not do the same are told, and where: another step function, another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from jobs import BY_HAND, error_of
from ranks import run_ranks
from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.pipeline.module_state import MicrobatchRun, ModuleState

HAND = {**BY_HAND, "microbatches": 1}


class Net(nn.Module):
    def __init__(self, width: int, tail: bool) -> None:
        import smdistributed.modelparallel.torch as smp

        super().__init__()
        self.tail, self.first, self.second = tail, nn.Linear(4, 4), nn.Linear(4, width)
        smp.set_partition(self.second, smp.pp_size() - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(x)
        if self.tail:
            return self.second(result)  # type: ignore[no-any-return]
        return torch.tanh(self.second(result))


def two_functions(odd: int, tail: bool) -> list[str]:
    """Return the message of each rank when rank ``odd`` evaluates while the other one trains, and
    then of a common step.
    """
    import smdistributed.modelparallel.torch as smp

    smp.init(HAND)
    model = smp.DistributedModel(Net(4, tail))

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    @smp.step
    def evaluate(model: Any, x: torch.Tensor) -> None:
        model(x)

    train(model, torch.ones(2, 4))
    texts = [error_of(lambda: (evaluate if smp.rank() == odd else train)(model, torch.ones(2, 4)))]
    smp.barrier()
    return [*texts, error_of(lambda: train(model, torch.ones(2, 4)))]


def check(odd: int, tail: bool) -> None:
    for rank, (text, after) in enumerate(run_ranks(2, two_functions, odd, tail)):
        assert "StepError" in text or "PeerError" in text, f"rank {rank}: {text}"
        assert "rank 0 (pp_rank 0) runs the step function two_functions.<locals>." in text, text
        assert after == "nothing"


def test_ranks_in_different_step_functions_are_told() -> None:
    check(0, tail=True)
    check(1, tail=False)


def two_models() -> str:
    import smdistributed.modelparallel.torch as smp

    smp.init(HAND)
    model = smp.DistributedModel(Net(4 + smp.rank(), True))

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    return error_of(lambda: train(model, torch.ones(2, 4)))


def test_ranks_with_different_models_are_told() -> None:
    for text in run_ranks(2, two_models):
        assert text.startswith(
            "SMPConfigError: the models of the ranks differ: rank 0 has parameter 'second.weight' "
        )
        assert (
            "of shape (4, 4) on partition 1, rank 1 has parameter 'second.weight' of shape (5, 4)"
            in text
        )


class Inner(torch.autograd.Function):
    """Runs a backward pass of its own in its forward, as a solver does, and
    returns that gradient.
    """

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            leaf.square().sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def passes(degree: int, microbatches: int) -> dict[str, tuple[str, list[torch.Tensor]]]:
    """Return, for several ways to run a backward pass in a step function, the message and the
    gradients.
    """
    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "pipeline_parallel_degree": degree, "microbatches": microbatches})
    torch.manual_seed(1)
    plain = Net(4, tail=False)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    other = nn.Linear(4, 4)

    def both(loss: torch.Tensor) -> None:
        other(torch.ones(4)).sum().backward()
        other(torch.ones(4)).sum().backward(inputs=other.parameters())
        torch.autograd.backward(get_gradient_edge(other(torch.ones(4)).sum()))
        model.backward(loss + Inner.apply(loss))  # type: ignore[no-untyped-call]

    def updates(loss: torch.Tensor) -> None:
        model.backward(loss)
        optimizer.step()

    ways: dict[str, Callable[[torch.Tensor], None]] = {
        "model.backward": model.backward,
        "own passes": both,
        "loss.backward": lambda loss: loss.backward(),  # type: ignore[no-untyped-call]
        "autograd.backward": lambda loss: torch.autograd.backward([loss], [torch.ones(())]),
        "an edge": lambda loss: torch.autograd.backward(get_gradient_edge(loss)),
        "a list of edges": lambda loss: torch.autograd.backward(
            [get_gradient_edge(loss)], [torch.ones(())]
        ),
        "inputs": lambda loss: loss.backward(inputs=list(plain.first.parameters())),  # type: ignore[no-untyped-call]
        "an iterator of inputs": lambda loss: loss.backward(inputs=plain.first.parameters()),  # type: ignore[no-untyped-call]
        "a dict of inputs": lambda loss: loss.backward(inputs=dict(plain.first.named_parameters())),  # type: ignore[no-untyped-call]
        "edges of inputs": lambda loss: torch.autograd.backward(
            loss, inputs=[get_gradient_edge(value) for value in plain.first.parameters()]
        ),
        "optimizer.step": updates,
    }
    outcomes = {}
    for name, way in ways.items():

        @smp.step
        def train(model: Any, x: torch.Tensor, way: Callable[[torch.Tensor], None] = way) -> None:
            way(model(x).sum())

        optimizer.zero_grad()
        text = error_of(lambda step=train: step(model, torch.ones(4, 4)))  # type: ignore[misc]
        smp.barrier()
        outcomes[name] = (
            text,
            [p.grad.clone() for p in model.local_parameters() if p.grad is not None],
        )
    return outcomes


@pytest.mark.parametrize("degree", [1, 2])
def test_a_plain_backward_pass_in_a_step_is_refused(degree: int) -> None:
    results = run_ranks(degree, passes, degree, 2)
    for result in results:
        for allowed in ("model.backward", "own passes"):
            assert result[allowed][0] == "nothing", allowed
        refused = ["loss.backward", "autograd.backward", "an edge", "a list of edges"]
        if degree == 1:
            refused += [name for name in result if name.endswith("inputs")]
        for name in refused:
            assert (
                "loss.backward() or torch.autograd.backward() was called in a function"
                in result[name][0]
            ), name
        assert (
            "optimizer.step() was called in a function decorated with smp.step"
            in result["optimizer.step"][0]
        )
    # The rank that comes second repeats the words of the first one, in a line.
    for name in refused:
        assert any(
            "Call model.backward(loss) in its place." in result[name][0] for result in results
        )
    assert any(
        "Call it after the step function has" in result["optimizer.step"][0] for result in results
    )


def test_a_plain_backward_pass_that_makes_the_same_gradients_is_none_of_them() -> None:
    (outcomes,) = run_ranks(1, passes, 1, 1)
    assert {text for text, _ in outcomes.values()} == {"nothing"}
    assert all(map(torch.equal, outcomes["loss.backward"][1], outcomes["model.backward"][1]))


class Given(nn.Module):
    """A module on the other partition, and the argument that its parent gives."""

    def __init__(self, kind: str) -> None:
        import smdistributed.modelparallel.torch as smp

        super().__init__()
        self.given, self.first, self.second = kind, nn.Linear(4, 4), Taking(kind)
        smp.set_partition(self.second, smp.pp_size() - 1)
        smp.set_partition(self.second.inner, smp.pp_size() - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.first(x)
        if self.given == "module":
            self.act = nn.ReLU() if x.sum() > 0 else nn.Tanh()
            return self.act(self.second(value))  # type: ignore[no-any-return]
        if self.given == "nested":
            value = torch.nested.nested_tensor_from_jagged(
                value, offsets=torch.tensor([0, 1, len(x)])
            )
        if self.given == "coo":
            value = value.detach().to_sparse()
        if self.given == "csr":
            value = value.detach().to_sparse_csr()
        if self.given == "meta":
            value = value.to("meta")
        return self.second(value)  # type: ignore[no-any-return]


class Taking(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.given, self.inner = kind, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def give(kind: str) -> tuple[str, str]:
    """Return the message of a step, and the message of pickling the model after it."""
    import io

    import smdistributed.modelparallel.torch as smp

    smp.init({**BY_HAND, "microbatches": 4})
    model = smp.DistributedModel(Given(kind))

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    def twice() -> None:
        # The first step runs its microbatches in turn.
        train(model, torch.ones(8, 4))
        train(model, torch.ones(8, 4))

    step = error_of(twice)
    pickled = error_of(lambda: torch.save(model, io.BytesIO()))
    if step == "nothing":
        model.state_dict()
    return step, pickled


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "nested",
            (
                "cannot send the arguments of module second (Taking) to rank 1 (pp_rank 1):"
                " TypeError: a nested tensor"
            ),
        ),
        ("coo", "TypeError: a tensor of layout torch.sparse_coo is several tensors"),
        ("csr", "TypeError: a tensor of layout torch.sparse_csr is several tensors"),
        ("meta", "TypeError: a tensor on the device meta has no values"),
    ],
)
def test_what_another_partition_cannot_have_is_named(kind: str, words: str) -> None:
    results = run_ranks(2, give, kind)
    # The rank of the error says so; the other one may see its connection end first.
    assert any(words in step for step, _ in results), results
    assert all("cannot be pickled" in pickled for _, pickled in results)


def test_a_module_that_a_forward_makes_is_where_its_parent_is() -> None:
    for step, pickled in run_ranks(2, give, "module"):
        assert step == "nothing"
        assert "Save model.state_dict()" in pickled


def test_a_parameter_that_is_written_in_a_step_is_named() -> None:
    """Explain an error of torch's backward pass by the parameters that were written since the step
    began.
    """
    net = nn.Linear(4, 4)
    module_state = ModuleState(
        0, lambda: MicrobatchRun(0), lambda: (0,), lambda number: f"number {number} (Linear)"
    )
    module_state.install([net], [0])
    module_state.begin("train")
    words = r"parameter 'weight' of module number 0 \(Linear\) was written in the step"
    try:
        loss = net(torch.ones(2, 4, requires_grad=True)).sum()
        with torch.no_grad():
            net.weight.clamp_(-0.2, 0.2)
        with pytest.raises(StepError, match=words), module_state.explain_backward_errors():
            loss.backward()
    finally:
        module_state.end()


class Caller(nn.Module):
    """A root with a module of two Linear modules on the other partition."""

    def __init__(self, act: Callable[[nn.Module], None], container: type[nn.Module]) -> None:
        import smdistributed.modelparallel.torch as smp

        super().__init__()
        self.act, self.first = act, nn.Linear(4, 4)
        self.second = container(nn.Linear(4, 4), nn.Linear(4, 4))
        smp.set_partition(self.second, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.first(x)
        self.act(self.second)
        return torch.tanh(self.second(value))


class Pair(nn.Module):
    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))  # type: ignore[no-any-return]


def no_hook(*_: Any) -> None:
    """Change nothing."""


def change_hooks(way: str, kind: str) -> str:
    """Return the message of a step in which the root changes hooks of a remote module.

    Args:
        way: What the root does: "add", "remove" or "replace" a hook, or none of them.
        kind: Where: "called", "submodule" or "chain".
    """
    import smdistributed.modelparallel.torch as smp

    handles: list[Any] = []

    def place(second: nn.Module) -> nn.Module:
        return second if kind == "called" else next(iter(second.children()))

    def act(second: nn.Module) -> None:
        if way in ("remove", "replace"):
            handles.pop().remove()
        if way in ("add", "replace"):
            place(second).register_forward_hook(no_hook)

    smp.init(HAND)
    plain = Caller(act, nn.Sequential if kind == "chain" else Pair)
    if kind == "chain":
        # The Sequential is on the root's partition, and its first child is not.
        smp.set_partition(plain.second, 0)
        smp.set_partition(plain.second[0], 1)  # type: ignore[index]
        smp.set_partition(plain.second[1], 0)  # type: ignore[index]
    handles.append(place(plain.second).register_forward_hook(no_hook))
    model = smp.DistributedModel(plain)

    @smp.step
    def evaluate(model: Any, x: torch.Tensor) -> None:
        model(x)

    return error_of(lambda: evaluate(model, torch.ones(2, 4)))


@pytest.mark.parametrize("kind", ["called", "submodule", "chain"])
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("add", "a hook was registered in a step on module second"),
        ("replace", "a hook was registered in a step on module second"),
        ("remove", "a hook was removed in a step from module second"),
        ("leave", "nothing"),
    ],
)
def test_a_change_of_a_remote_modules_hooks_in_a_step_is_refused(
    kind: str, way: str, words: str
) -> None:
    results = run_ranks(2, change_hooks, way, kind)
    assert any(words in result for result in results), results


class WritesWeight(nn.Module):
    """Writes its weight after the weight was used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return result


class TakesGradient(nn.Module):
    """Returns the gradient of a remote module's result."""

    def __init__(self) -> None:
        import smdistributed.modelparallel.torch as smp

        super().__init__()
        self.first, self.second = nn.Linear(4, 4), WritesWeight()
        smp.set_partition(self.second, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.first(x)
        gradient: torch.Tensor = torch.autograd.grad(self.second(value).sum(), value)[0]
        return gradient


def gradient_after_write() -> str:
    """Return the message of a step that takes a gradient through a weight which was written."""
    import smdistributed.modelparallel.torch as smp

    smp.init(HAND)
    model = smp.DistributedModel(TakesGradient())

    @smp.step
    def train(model: Any, x: torch.Tensor) -> None:
        model(x)

    return error_of(lambda: train(model, torch.ones(2, 4)))


def test_a_parameter_that_is_written_before_a_gradient_is_taken_is_named() -> None:
    words = "parameter 'weight' of module second.linear (Linear) was written in the step"
    results = run_ranks(2, gradient_after_write)
    assert any(words in result for result in results), results
