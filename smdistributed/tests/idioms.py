"""Small models, each with one idiom that a partition could get wrong.

Each trains as in one process, or is refused.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

WIDTH = 4
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def net() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear())


class Root(nn.Module):
    """A layer on each side of `b`, which is on the other partition."""

    def __init__(self, b: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.c, self.way = linear(), b, linear(), forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class OwnCall(Layer):
    """A module with its own `__call__`."""

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x) * 2


class Tagged(torch.Tensor):
    tag: float


class ReadsTag(OwnCall):
    def forward(self, x: Any) -> Any:
        return self.layer(x.as_subclass(torch.Tensor)) * (
            x.tag if isinstance(x, Tagged) else getattr(x, "gain", 1.0)
        )


def tagged(self: Any, x: torch.Tensor) -> Any:
    h = self.a(x).as_subclass(Tagged)
    h.tag = 3.0
    return self.c(self.b(h).as_subclass(torch.Tensor))


def attribute(self: Any, x: torch.Tensor) -> Any:
    h = self.a(x)
    h.gain = 3.0
    return self.c(self.b(h))


def force(self: Any, x: torch.Tensor, *, keep: bool = False) -> Any:
    """Return a step along the gradient of the result of `b`."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = self.b(self.a(x))
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=keep)
    return self.c(y if keep else self.b(x.detach())) + grad


def penalty(self: Any, x: torch.Tensor) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.b(self.a(x)).sum(), x, create_graph=True)
    return grad


def swapped(self: Any, x: torch.Tensor) -> Any:
    return torch.func.functional_call(self.b, {"0.weight": self.a.weight * 2}, (x,))


EQUAL: dict[str, Callable[[], nn.Module]] = {
    "own __call__": lambda: Root(OwnCall(), lambda self, x: self.c(self.b(self.a(x)))),
    "tensor subclass": lambda: Root(ReadsTag(), tagged),
    "tensor with an attribute": lambda: Root(ReadsTag(), attribute),
    "autograd.grad": lambda: Root(net(), force),
    "autograd.grad that keeps the graph": lambda: Root(
        net(), lambda self, x: force(self, x, keep=True)
    ),
}

SHARED: dict[str, Any] = {}
"""State that modules of a script may share."""


class SharesLoss(OwnCall):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.layer(x)
        SHARED["loss"] = h.square().mean()
        return h


class Evaluates(nn.Sequential):
    """Runs a second time as in an evaluation."""

    def __init__(self) -> None:
        super().__init__(linear(), nn.BatchNorm1d(WIDTH))


def evaluates(self: Any, x: torch.Tensor) -> Any:
    h = self.b(self.a(x))
    self.b.eval()
    with torch.no_grad():
        target = self.b(x)
    self.b.train()
    return self.c(h) - target


EQUAL["module-level dictionary"] = lambda: Root(
    SharesLoss(), lambda self, x: self.c(self.b(self.a(x))) + SHARED["loss"]
)

EQUAL["batch normalization that trains and evaluates"] = lambda: Root(Evaluates(), evaluates)


class Doubles(Layer):
    """Writes to its first argument, and returns the second one."""

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        x.mul_(2)
        self.kept = self.layer(other * 1.0)
        return other


def given_twice(self: Any, x: torch.Tensor) -> Any:
    h = self.a(x) * 1.0
    return self.c(self.b(h, h)) + h


def is_given(self: Any, x: torch.Tensor) -> Any:
    h = self.a(x).detach() * 1.0
    self.b(h.clone(), h).add_(self.b.kept.detach())
    return self.c(h) + self.b.kept


class Turns(Layer):
    """Takes its factors from iterators: who has read one cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.start()

    def start(self) -> None:
        self.cycle, self.factors = itertools.cycle([1.0, 0.5, 2.0]), iter([1.0, 1.5] * 100)

    def __deepcopy__(self, memo: Any) -> Turns:
        copy_made = Turns().double()
        copy_made.load_state_dict(self.state_dict())
        return copy_made

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * next(self.cycle) * next(self.factors)


class Notes(Layer):
    """Writes into a dictionary, where it was given one."""

    notes: Any

    def forward(self, x: torch.Tensor) -> Any:
        if isinstance(self.notes, dict):
            self.notes["calls"] = self.notes.get("calls", 0) + 1
        return self.layer(x)


class Cell(nn.Module):
    """Keeps a tuple of tensors for the next microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.state: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.state = self.cell(
            x, None if self.state is None else tuple(part.detach() for part in self.state)
        )
        return self.state[0]


class Defaults(Layer):
    """Attributes that the class has until an object gets its own."""

    gain: float = 1.0
    aux: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.aux = self.layer(x)
        return self.aux * self.gain


def sets_default(self: Any, x: torch.Tensor) -> Any:
    self.b.gain = 1.0 + float(x.mean() > 0)
    return self.c(self.b(self.a(x))) + self.b.aux


class Draws(Layer):
    """Writes to arguments that are no containers."""

    def forward(
        self,
        x: torch.Tensor,
        torchs: Any = None,
        pythons: Any = None,
        array: Any = None,
        raw: Any = b"",
    ) -> Any:
        array *= 2
        raw.append(1)
        return self.layer(x) * torch.rand(1, generator=torchs, dtype=x.dtype) * pythons.random()


def gives_generators(self: Any, x: torch.Tensor) -> Any:
    torchs, pythons, array, raw = (
        torch.Generator().manual_seed(1),
        random.Random(1),
        numpy.ones(WIDTH),
        bytearray(b"a"),
    )
    h = self.b(self.a(x), torchs, pythons, array, raw)
    drawn = torch.rand(1, generator=torchs, dtype=x.dtype) + pythons.random()
    return self.c(h) * drawn * torch.from_numpy(array) * len(raw)


EQUAL |= {
    "generators and arrays are arguments": lambda: Root(Draws(), gives_generators),
    "what a module keeps is read": lambda: Root(
        Lends(), lambda self, x: self.c(self.b(self.a(x))[0])
    ),
    "one tensor is two arguments": lambda: Root(Doubles(), given_twice),
    "the result is an argument": lambda: Root(Doubles(), is_given),
    "iterators": lambda: Root(Turns(), lambda self, x: self.c(self.b(self.b(self.a(x))))),
    "a tuple for the next microbatch": lambda: Root(
        Cell(), lambda self, x: self.c(self.b(self.a(x)))
    ),
    "defaults of a class": lambda: Root(Defaults(), sets_default),
}


class Held(Layer):
    """Holds the module that its caller holds, too, and uses or writes it in some way."""

    def __init__(self, held: Any, use: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.held, self.use = held, use

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        return y * (self.use(self.held, y.detach()) or 1.0)


class Holder(Root):
    """The caller of such a module."""

    def __init__(
        self, held: Any, use: Callable[[Any, torch.Tensor], Any], forward: Forward
    ) -> None:
        super().__init__(Held(held, use), forward)
        self.held = held


def appends(held: list[float], y: torch.Tensor) -> None:
    held.append(float(y.mean()))


def counts(held: dict[int, int], y: torch.Tensor) -> None:
    for number in (y.abs() * 100).long().flatten().tolist():
        held[number] = held.get(number, 0) + 1


def reads_last(self: Any, x: torch.Tensor) -> Any:
    return self.c(self.b(self.a(x))) * (1 + abs(self.held[-1]))


def reads_sum(self: Any, x: torch.Tensor) -> Any:
    return self.c(self.b(self.a(x))) * (1 + sum(self.held.values()) * 0.01)


def writes_inner(held: Any, y: torch.Tensor) -> None:
    """Write into a dictionary that is the last of many, or deep in others."""
    inner = held[-2] if isinstance(held, list) else held
    while "in" in inner:
        inner = inner["in"]
    inner["value"] = 1.0 + float(y.abs().mean())


def reads_inner(self: Any, x: torch.Tensor) -> Any:
    y = self.c(self.b(self.a(x)))
    inner = self.held[-2] if isinstance(self.held, list) else self.held
    while "in" in inner:
        inner = inner["in"]
    return y * inner["value"]


def nested(depth: int) -> dict[str, Any]:
    nested_value: dict[str, Any] = {"value": 1.0}
    for _ in range(depth):
        nested_value = {"in": nested_value}
    return nested_value


def scale(held: Any, _: torch.Tensor) -> Any:
    return held["scale"] if isinstance(held, collections.UserDict) else held.scale


def sets_scale(self: Any, x: torch.Tensor) -> Any:
    value = 2.0 + float(x.mean() > 0)
    if isinstance(self.held, collections.UserDict):
        self.held["scale"] = value
    else:
        self.held.scale = value
    return self.c(self.b(self.a(x)))


def sets_scale_and_back(self: Any, x: torch.Tensor) -> Any:
    before, self.held.scale = self.held.scale, 3.0
    try:
        y = self.b(self.a(x))
    finally:
        self.held.scale = before
    return self.c(y) * self.held.scale


ARGUMENTS = argparse.Namespace(scale=1.0)


class ReadsArguments(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * ARGUMENTS.scale


def sets_arguments(self: Any, x: torch.Tensor) -> Any:
    ARGUMENTS.scale = 2.0 + float(x.mean() > 0)
    return self.c(self.b(self.a(x)))


class Scopes:
    """State in a library's classes: a stack of scopes, and the only object of a class."""

    stack: ClassVar[list[float]] = []
    only: Any = None
    late: Any = None

    def __init__(self) -> None:
        self.scale = 1.0


Scopes.only = Scopes()


class ReadsScopes(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * (Scopes.stack[-1] if Scopes.stack else 1.0) * Scopes.only.scale


def sets_scopes(self: Any, x: torch.Tensor) -> Any:
    Scopes.stack.append(1.5 + float(x.mean() > 0))
    Scopes.only.scale = 2.0 - float(x.mean() > 0)
    try:
        return self.c(self.b(self.a(x)))
    finally:
        Scopes.stack.pop()


class ReadsLate(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * (1.0 if Scopes.late is None else Scopes.late.scale)


def makes_late(self: Any, x: torch.Tensor) -> Any:
    if Scopes.late is None:
        Scopes.late = Scopes()
    Scopes.late.scale = 2.0 + float(x.mean() > 0)
    return self.c(self.b(self.a(x)))


EQUAL |= {
    "a list that gets its 4096th item": lambda: Holder([0.1] * 4092, appends, reads_last),
    "5000 counts": lambda: Holder(dict.fromkeys(range(5000), 0), counts, reads_sum),
    "300 dictionaries": lambda: Holder(
        [{"value": 1.0} for _ in range(300)], writes_inner, reads_inner
    ),
    "a dictionary nine deep": lambda: Holder(nested(9), writes_inner, reads_inner),
    "an object of an installed class": lambda: Holder(
        argparse.Namespace(scale=1.0), scale, sets_scale
    ),
    "and what is put back": lambda: Holder(
        argparse.Namespace(scale=1.0), scale, sets_scale_and_back
    ),
    "a mapping of an installed class": lambda: Holder(
        collections.UserDict(scale=1.0), scale, sets_scale
    ),
    "an installed class at module level": lambda: Root(ReadsArguments(), sets_arguments),
    "a list and an object in a class": lambda: Root(ReadsScopes(), sets_scopes),
}


class Doubled(TorchFunctionMode):
    """Makes a linear layer give twice as much."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is nn.functional.linear else result


class Negated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes products of matrices give the negative."""

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return -result if function is torch.ops.aten.addmm.default else result


def within(self: Any, x: torch.Tensor, scope: Any) -> Any:
    with scope:
        y = self.b(self.a(x))
    return self.c(y)


def looks_up(self: Any, x: torch.Tensor) -> Any:
    """Call `b` with integers alone, within hooks."""
    with saved_tensors_hooks(torch.clone, halves):
        y = self.b(x[:, 0].abs().long())
    return self.c(self.a(x) + y)


def halves(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 0.5 if tensor.is_floating_point() else tensor


def halves_large(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 0.5 if tensor.numel() > 40 else tensor


EQUAL |= {
    "saved on the CPU": lambda: Root(net(), lambda self, x: within(self, x, save_on_cpu())),
    "a device around a call": lambda: Root(
        net(), lambda self, x: within(self, x, torch.device("cpu"))
    ),
    "checkpoint around a call": lambda: Root(
        net(),
        lambda self, x: self.c(checkpoint(lambda t: self.b(self.a(t)), x, use_reentrant=False)),
    ),
}


def counts_late(held: dict[str, Any], y: torch.Tensor) -> None:
    held["calls"] = held.get("calls", 0) + 1
    if held["calls"] > 3:  # of the second step
        counts(held["table"], y)


def reads_table(self: Any, x: torch.Tensor) -> Any:
    return self.c(self.b(self.a(x))) * (1 + sum(self.held["table"].values()) * 0.01)


class StartsLate(Root):
    """Keeps an average, or a value that it computes once, in a dictionary; not from its first call
    on.
    """

    def __init__(self, forward: Forward) -> None:
        super().__init__(net(), forward)
        self.calls, self.kept = 0, {}  # type: ignore[var-annotated]


def averages_late(self: Any, x: torch.Tensor) -> Any:
    self.calls += 1
    y = self.b(self.a(x) + self.kept.get("mean", 0.0))
    if self.calls > 2:  # in the second step
        self.kept["mean"] = y.detach().mean(0) * 0.5
    return self.c(y)


def computes_late(self: Any, x: torch.Tensor) -> Any:
    self.calls += 1
    y = self.b(self.a(x))
    if self.calls > 2:
        if "ramp" not in self.kept:
            self.kept["ramp"] = torch.linspace(1, 2, WIDTH, dtype=x.dtype)
        y = y * self.kept["ramp"]
    return self.c(self.b(y))


EQUAL["what is computed once, late"] = lambda: StartsLate(computes_late)


def shares_memory(self: Any, x: torch.Tensor) -> Any:
    h = self.a(x) * 1.0
    return self.b(h[:, :2], h) + h


class Lends(Layer):
    """Returns its own state: a buffer and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(WIDTH))
        self.seen = [1.0]

    def forward(self, x: torch.Tensor) -> Any:
        bank: Any = self.bank
        return self.layer(x) * self.seen[-1] + bank.clone(), bank, self.seen


def writes_to_loan(self: Any, x: torch.Tensor, *, bank: bool) -> Any:
    h, loaned, seen = self.b(self.a(x))
    loaned.mul_(0.9) if bank else seen.append(0.5)
    return self.c(h)


def iterator(self: Any, x: torch.Tensor) -> Any:
    return self.b(iter([self.a(x)]))


class Remembers(Layer):
    """Keeps its results by the tensors that it was given."""

    def __init__(self, memo: Any) -> None:
        super().__init__()
        self.memo = memo

    def forward(self, x: torch.Tensor) -> Any:
        if isinstance(self.memo, type):
            self.memo = self.memo()
        self.memo[x] = self.layer(x)
        return x * 1.0


def remembered(self: Any, x: torch.Tensor) -> Any:
    h = self.a(x)
    y = self.b(h)
    return self.c(self.b.memo.get(h, y))


WEAK = "attribute 'memo' of module b (Remembers) has tensors as weak keys"

HOOKS = "module b (Sequential) was called within saved_tensors_hooks, and is on another partition"

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gradients of gradients": (
        lambda: Root(net(), penalty),
        "create_graph=True: gradients of gradients do not go th",
    ),
    "functional_call": (
        lambda: Root(net(), swapped),
        "parameter 'weight' of module 'b.0' (Linear) was replaced in a step",
    ),
    "memory of two arguments": (
        lambda: Root(Doubles(), shares_memory),
        "module b (Doubles) writes to memory that two of its arguments share",
    ),
    "a buffer that was returned": (
        lambda: Root(Lends(), lambda self, x: writes_to_loan(self, x, bank=True)),
        "module b (Lends) keeps what it returned, and its caller wrote to that",
    ),
    "a list that was returned": (
        lambda: Root(Lends(), lambda self, x: writes_to_loan(self, x, bank=False)),
        "module b (Lends) keeps what it returned, and its caller wrote to that",
    ),
    "weak keys": (lambda: Root(Remembers(weakref.WeakKeyDictionary()), remembered), WEAK),
    "weak keys of a step": (lambda: Root(Remembers(WeakTensorKeyDictionary), remembered), WEAK),
    "5000 counts that start late": (
        lambda: Holder({"table": dict.fromkeys(range(5000), 0)}, counts_late, reads_table),
        (
            "attribute 'held' of module the root module (Holder)"
            " has more than 4096 items or 256 containers"
        ),
    ),
    "an object that a step makes in a class": (
        lambda: Root(ReadsLate(), makes_late),
        "attribute 'Scopes' of module the root module (Root) cannot be sent",
    ),
    "a function mode around a call": (
        lambda: Root(net(), lambda self, x: within(self, x, Doubled())),
        "module b (Sequential) was called within Doubled, and is on another partition",
    ),
    "a dispatch mode around a call": (
        lambda: Root(net(), lambda self, x: within(self, x, Negated())),  # type: ignore[no-untyped-call]
        "module b (Sequential) was called within Negated, and is on another partition",
    ),
    "hooks that change what is saved": (
        lambda: Root(
            net(),
            lambda self, x: within(self, x, saved_tensors_hooks(lambda t: t, lambda t: t * 0.5)),
        ),
        HOOKS,
    ),
    "hooks that return what is saved": (
        lambda: Root(
            net(), lambda self, x: within(self, x, saved_tensors_hooks(torch.clone, torch.clone))
        ),
        HOOKS,
    ),
    "hooks that change large tensors alone": (
        lambda: Root(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)),
            lambda self, x: within(self, x, saved_tensors_hooks(torch.clone, halves_large)),
        ),
        HOOKS,
    ),
    "hooks around a call with integers": (
        lambda: Root(nn.Sequential(nn.Embedding(8, WIDTH), net()), looks_up),
        HOOKS,
    ),
    "an average that starts late": (
        lambda: StartsLate(averages_late),
        (
            "attribute 'kept' of module the root module (StartsLate) was written by microbatch 0"
            " after microbatch 1"
        ),
    ),
    "an iterator": (
        lambda: Root(net(), iterator),
        "cannot send the arguments of module b (Sequential) to rank 1",
    ),
}
