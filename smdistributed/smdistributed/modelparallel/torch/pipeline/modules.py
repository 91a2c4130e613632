"""Which rank owns which module, and which modules of this rank are entrances to other ranks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .tail_calls import returned_modules


class Segment(NamedTuple):
    """Neighbours of a Sequential chain that one rank owns."""

    owner: int
    modules: tuple[nn.Module, ...]


Call = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class Modules:
    """The placed module tree, as this rank sees it.

    Attributes:
        root: The wrapped module.
        names: Name of each module, by its number; the same on all ranks.
        modules: Each module, by its number.
        owner: The rank that owns it.
        chains: Numbers of the Sequential modules that span ranks, with their segments.
        local: Whether a call of the module stays on this rank whatever it does.
        tails: Remote modules and chains whose result is the model's own, with
            the modules that pass it on.
    """

    def __init__(self, root: nn.Module, owner: Mapping[str, int], me: int) -> None:
        named = list(root.named_modules())
        self.root, self.me = root, me
        self.names = [name for name, _ in named]
        self.modules = [module for _, module in named]
        self.owner = [owner[name] for name in self.names]
        self.number = {id(module): number for number, module in enumerate(self.modules)}
        self.chains = {
            n: segments
            for n, m in enumerate(self.modules)
            if len(segments := self._segments(m)) > 1
        }
        self.local = [
            all(self.owner_of(m) == me for m in module.modules()) for module in self.modules
        ]
        self.tails = self._tails()

    def owner_of(self, module: nn.Module) -> int:
        """Return the rank that owns a module."""
        return self.owner[self.number[id(module)]]

    def title(self, number: int) -> str:
        """Return words for a module."""
        return f"{self.names[number] or 'the root module'} ({type(self.modules[number]).__name__})"

    def is_inline(self, number: int, segment: int | None) -> bool:
        """Return whether a served call cannot wait for another rank."""
        if segment is None:
            return self.local[number]
        return all(self.local[self.number[id(m)]] for m in self.chains[number][segment].modules)

    def bind(self, remote: Call, chain: Call) -> None:
        """Replace the forward of each module at which work leaves this rank.

        All others stay as they are.

        Args:
            remote: Called with the number of a remote module, and arguments.
            chain: The same for a Sequential of this rank that spans ranks.
        """
        # What a torch.compile around a remote module traces ends before the
        # call: the scheduler cannot be compiled.
        if "torch._dynamo" in sys.modules:
            untraced: Any = torch.compiler.disable
            why = {"reason": _PARTED} if "reason" in inspect.signature(untraced).parameters else {}
            remote, chain = untraced(remote, **why), untraced(chain, **why)
        for number, module in enumerate(self.modules):
            if number and self.owner[number] != self.me:
                _replace(module, _Entrance(remote, number))
            elif number in self.chains:
                _replace(module, _Entrance(chain, number))

    def _segments(self, module: nn.Module) -> tuple[Segment, ...]:
        if (
            not isinstance(module, nn.Sequential)
            or type(module).forward is not nn.Sequential.forward
        ):
            return ()
        groups: list[tuple[int, list[nn.Module]]] = []
        for child in module:  # `children` has one that is called twice once
            owner = self.owner_of(child)
            if groups and groups[-1][0] == owner:
                groups[-1][1].append(child)
            else:
                groups.append((owner, [child]))
        return tuple(Segment(owner, tuple(children)) for owner, children in groups)

    def _tails(self) -> dict[int, tuple[nn.Module, ...]]:
        """Find the remote calls whose result the root returns unchanged,
        whatever happens before.
        """
        found: dict[int, tuple[nn.Module, ...]] = {}
        if self.owner[0] != self.me:
            return found
        uses: dict[int, int] = {}
        for _, module in self.root.named_modules(remove_duplicate=False):
            uses[id(module)] = uses.get(id(module), 0) + 1

        def follow(module: nn.Module, path: tuple[nn.Module, ...]) -> None:
            number = self.number[id(module)]
            if uses[id(module)] > 1:
                return
            if self.owner[number] != self.me:
                found[number] = path
                return
            path = (*path, module)
            if number in self.chains:
                if self.chains[number][-1].owner != self.me:
                    found[number] = path
                return
            for child in returned_modules(module):
                if id(child) in self.number:
                    follow(child, path)

        follow(self.root, ())
        return found


_PARTED = (
    "a module in what torch.compile got is on another partition: leave fullgraph out, or place it"
    " with its parent by smp.set_partition"
)


class _Entrance:
    """The forward of a module at which work leaves this rank."""

    def __init__(self, call: Call, number: int) -> None:
        self.call, self.number = call, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.number, args, kwargs)


def run_children(chain: nn.Module, children: Sequence[nn.Module], value: Any) -> Any:
    """Run neighbours of a Sequential.

    Activation checkpointing of groups replaces how (activation_checkpointing.py).
    """
    replaced = chain.__dict__.get("_smp_run_children")
    if replaced is not None:
        return replaced(children, value)
    for child in children:
        value = child(value)
    return value


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    object.__setattr__(module, "_orig_forward", module.forward)
    object.__setattr__(module, "forward", forward)
