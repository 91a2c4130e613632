"""The placed module tree: the owner of each module, and the modules at which work leaves this
rank.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .tail_calls import returned_modules


class Segment(NamedTuple):
    """Neighbours of a Sequential chain with the same owner.

    Attributes:
        owner: The rank that owns the modules.
        modules: The modules, in the order of the chain.
    """

    owner: int
    modules: tuple[nn.Module, ...]


Call = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class Modules:
    """The placed module tree, as this rank sees it.

    Attributes:
        root: The wrapped module.
        rank: This rank in the pipeline.
        names: Name of each module. The index is the number of the module, equal on all ranks.
        modules: Each module.
        owner: For each module the rank that owns it.
        number: ``id()`` of a module -> its number.
        chains: Number of a Sequential that spans ranks -> its segments.
        local: For each module whether a call of it can never leave this rank.
        tails: Number of a remote module or chain with the same result as the model -> the modules
            that return this result.
    """

    def __init__(self, root: nn.Module, owner: Mapping[str, int], rank: int) -> None:
        """Number the modules, and find the chains and tail calls. No module is changed.

        Args:
            root: The wrapped module.
            owner: Name of a module -> the rank that owns it.
            rank: This rank in the pipeline.

        Raises:
            KeyError: A module of the root has no owner.
        """
        named = list(root.named_modules())
        self.root, self.rank = root, rank
        self.names = [name for name, _ in named]
        self.modules = [module for _, module in named]
        self.owner = [owner[name] for name in self.names]
        self.number = {id(module): number for number, module in enumerate(self.modules)}
        self.chains: dict[int, tuple[Segment, ...]] = {}
        self.local: list[bool] = []
        for number, module in enumerate(self.modules):
            segments = self._segments(module)
            if len(segments) > 1:
                self.chains[number] = segments
            owners = {self.owner_of(submodule) for submodule in module.modules()}
            self.local.append(owners == {rank})
        self.tails = self._find_tail_calls()

    def owner_of(self, module: nn.Module) -> int:
        """Return the rank that owns a module."""
        return self.owner[self.number[id(module)]]

    def title(self, number: int) -> str:
        """Return words for a module, such as "encoder.0 (Linear)"."""
        return f"{self.names[number] or 'the root module'} ({type(self.modules[number]).__name__})"

    def is_inline(self, number: int, segment: int | None) -> bool:
        """Return whether a served call cannot wait for another rank.

        Args:
            number: Number of the module.
            segment: Segment of a chain; None for a whole module.
        """
        if segment is None:
            return self.local[number]
        modules = self.chains[number][segment].modules
        return all(self.local[self.number[id(module)]] for module in modules)

    def bind(self, remote: Call, chain: Call) -> None:
        """Replace the forward of each module at which work leaves this rank.

        Other modules are not changed. The former forward is kept as ``_orig_forward``.

        The attribute ``forward`` of such a module is set, which no write of a microbatch is. If
        torch.compile is loaded, the new forward is excluded from its graphs.

        Args:
            remote: Calls a remote module. Gets its number and the arguments.
            chain: Calls a Sequential of this rank that spans ranks, with the same arguments.
        """
        # A graph of torch.compile ends before a remote call: the scheduler cannot be compiled.
        if "torch._dynamo" in sys.modules:
            untraced: Any = torch.compiler.disable
            options = {}
            # Older releases of torch take no reason.
            if "reason" in inspect.signature(untraced).parameters:
                options["reason"] = _NOT_COMPILED
            remote, chain = untraced(remote, **options), untraced(chain, **options)
        for number, module in enumerate(self.modules):
            # The root, number 0, is called by way of the pipeline itself (outputs.py).
            if number and self.owner[number] != self.rank:
                _replace(module, _Entrance(remote, number))
            elif number in self.chains:
                _replace(module, _Entrance(chain, number))

    def _segments(self, module: nn.Module) -> tuple[Segment, ...]:
        """Return the segments of a Sequential; an empty tuple for any other module.

        A Sequential with a forward of its own is another module, too.

        Returns:
            The segments in the order of the chain. A single one if all children have one owner.
        """
        if not isinstance(module, nn.Sequential):
            return ()
        if type(module).forward is not nn.Sequential.forward:
            return ()
        groups: list[tuple[int, list[nn.Module]]] = []
        for child in module:  # not `children()`, which has a module once that is in it twice
            owner = self.owner_of(child)
            if groups and groups[-1][0] == owner:
                groups[-1][1].append(child)
            else:
                groups.append((owner, [child]))
        return tuple(Segment(owner, tuple(children)) for owner, children in groups)

    def _find_tail_calls(self) -> dict[int, tuple[nn.Module, ...]]:
        """Find the remote calls with a result that the root always returns unchanged.

        The code of the modules' forward is read (tail_calls.py), and not run. A module that is used
        twice in the tree is left out.

        Returns:
            As `tails`; empty on a rank that does not own the root.
        """
        tails: dict[int, tuple[nn.Module, ...]] = {}
        if self.owner[0] != self.rank:
            return tails
        uses: dict[int, int] = {}
        for _, module in self.root.named_modules(remove_duplicate=False):
            uses[id(module)] = uses.get(id(module), 0) + 1

        def follow(module: nn.Module, path: tuple[nn.Module, ...]) -> None:
            """Add the remote calls that return the result of a module; `path` leads to it."""
            number = self.number[id(module)]
            # Another use of the module may do more with the result.
            if uses[id(module)] > 1:
                return
            if self.owner[number] != self.rank:
                tails[number] = path
                return
            path = (*path, module)
            if number in self.chains:
                if self.chains[number][-1].owner != self.rank:
                    tails[number] = path
                return
            for child in returned_modules(module):
                if id(child) in self.number:
                    follow(child, path)

        follow(self.root, ())
        return tails


_NOT_COMPILED = (
    "a module in what torch.compile got is on another partition: leave fullgraph out, or place it"
    " with its parent by smp.set_partition"
)
"""Why a graph ends, in torch's own error."""


class _Entrance:
    """The forward of a module at which work leaves this rank.

    Attributes:
        call: Calls the remote module or the chain.
        number: Number of the module.
    """

    def __init__(self, call: Call, number: int) -> None:
        self.call, self.number = call, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.number, args, kwargs)


def run_children(chain: nn.Module, children: Sequence[nn.Module], value: Any) -> Any:
    """Run neighbours of a Sequential one after another, and return the last result.

    If activation checkpointing of groups has set a function for the Sequential, this function runs
    them (activation_checkpointing.py).

    Args:
        chain: The Sequential.
        children: Neighbours in it.
        value: The argument of the first one.

    Raises:
        Exception: An error of a child.
    """
    replaced = chain.__dict__.get("_smp_run_children")
    if replaced is not None:
        return replaced(children, value)
    for child in children:
        value = child(value)
    return value


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of a module, without a call of ``nn.Module.__setattr__``."""
    object.__setattr__(module, "_orig_forward", module.forward)
    object.__setattr__(module, "forward", forward)
