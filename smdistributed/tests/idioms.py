"""Small models, each with one idiom that a partition could get wrong. Each trains as in one process, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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


class OwnCall(nn.Module):
    """Its own `__call__`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x) * 2

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


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

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gradients of gradients": (lambda: Root(net(), penalty), "create_graph=True: gradients of gradients do not go th"),
    "functional_call": (
        lambda: Root(net(), swapped),
        "parameter 'weight' of module 'b.0' (Linear) was replaced in a step",
    ),
}
