"""Small models, each with one idiom that a partition could get wrong. Each trains as in one process, or is refused."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
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
    """Its own `__call__`."""

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x) * 2


class Tagged(torch.Tensor):
    tag: float


class ReadsTag(OwnCall):
    def forward(self, x: Any) -> Any:
        return self.layer(x.as_subclass(torch.Tensor)) * (x.tag if isinstance(x, Tagged) else getattr(x, "gain", 1.0))


def tagged(self: Any, x: torch.Tensor) -> Any:
    h = self.a(x).as_subclass(Tagged)
    h.tag = 3.0
    return self.c(self.b(h).as_subclass(torch.Tensor))


def attribute(self: Any, x: torch.Tensor) -> Any:
    h = self.a(x)
    h.gain = 3.0
    return self.c(self.b(h))


def force(self: Any, x: torch.Tensor, *, keep: bool = False) -> Any:
    """Return a step along the gradient of what `b` computes."""
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
    "autograd.grad that keeps the graph": lambda: Root(net(), lambda self, x: force(self, x, keep=True)),
}

SHARED: dict[str, Any] = {}
"""What modules of a script may share."""


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
        made = Turns().double()
        made.load_state_dict(self.state_dict())
        return made

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
        self.state = self.cell(x, None if self.state is None else tuple(part.detach() for part in self.state))
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
        self, x: torch.Tensor, torchs: Any = None, pythons: Any = None, array: Any = None, raw: Any = b""
    ) -> Any:
        array *= 2
        raw.append(1)
        return self.layer(x) * torch.rand(1, generator=torchs, dtype=x.dtype) * pythons.random()


def gives_generators(self: Any, x: torch.Tensor) -> Any:
    torchs, pythons, array, raw = torch.Generator().manual_seed(1), random.Random(1), numpy.ones(WIDTH), bytearray(b"a")
    h = self.b(self.a(x), torchs, pythons, array, raw)
    drawn = torch.rand(1, generator=torchs, dtype=x.dtype) + pythons.random()
    return self.c(h) * drawn * torch.from_numpy(array) * len(raw)


EQUAL |= {
    "generators and arrays are arguments": lambda: Root(Draws(), gives_generators),
    "what a module keeps is read": lambda: Root(Lends(), lambda self, x: self.c(self.b(self.a(x))[0])),
    "one tensor is two arguments": lambda: Root(Doubles(), given_twice),
    "the result is an argument": lambda: Root(Doubles(), is_given),
    "iterators": lambda: Root(Turns(), lambda self, x: self.c(self.b(self.b(self.a(x))))),
    "a tuple for the next microbatch": lambda: Root(Cell(), lambda self, x: self.c(self.b(self.a(x)))),
    "defaults of a class": lambda: Root(Defaults(), sets_default),
}


def shares_memory(self: Any, x: torch.Tensor) -> Any:
    h = self.a(x) * 1.0
    return self.b(h[:, :2], h) + h


class Lends(Layer):
    """Returns what it keeps: a buffer and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(WIDTH))
        self.seen = [1.0]

    def forward(self, x: torch.Tensor) -> Any:
        bank: Any = self.bank
        return self.layer(x) * self.seen[-1] + bank.clone(), bank, self.seen


def writes_to_loan(self: Any, x: torch.Tensor, *, bank: bool) -> Any:
    h, kept, seen = self.b(self.a(x))
    kept.mul_(0.9) if bank else seen.append(0.5)
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

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gradients of gradients": (lambda: Root(net(), penalty), "create_graph=True: gradients of gradients do not go th"),
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
    "an iterator": (lambda: Root(net(), iterator), "cannot send the arguments of module b (Sequential) to rank 1"),
}
