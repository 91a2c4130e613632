"""Split a tree of modules into contiguous parts of about equal cost: the automatic partition.

Pure: values in, values out. ``tracing.describe`` makes the tree from modules.

cost = memory_weight * (parameters + activations) + (1 - memory_weight) * work,
each a share of the whole model's.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Key = Hashable


@dataclass(frozen=True)
class Node:
    """One module.

    Attributes:
        name: Its name in the root, as ``named_modules`` gives it.
        children: Its children, in the order of their definition.
        parameters: Bytes of its own parameters and buffers by key. What two
            modules share has one key.
        activations: Bytes of its outputs in one forward pass.
        work: Seconds or operations of one forward pass, with those of its children.
        order: When it was called first in the traced forward pass; None: it was never called.
        whole: It is never split.
        attached: It is never called: its parent reads its parameters.
    """

    name: str
    children: tuple[Node, ...] = ()
    parameters: Mapping[Key, int] = field(default_factory=dict)
    activations: int = 0
    work: float = 0.0
    order: int | None = None
    whole: bool = False
    attached: bool = False

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def partition(root: Node, degree: int, memory_weight: float) -> dict[str, int]:
    """Return the partition of each module, by its name.

    The tree is split from the root until each part costs at most one device's share. These parts
    are then divided among the devices in the order of their execution, so that the costliest device
    costs as little as possible. A module that was split is where its first part is: the root is on
    0. Modules that share a parameter are together.

    Args:
        root: The tree.
        degree: Number of devices, 1 or more.
        memory_weight: Weight of memory against work, 0 to 1.
    """
    tree = _Tree(root, memory_weight)
    atoms = tree.atoms(degree)
    atom_of = _atom_of(tree, {atom.name: i for i, atom in enumerate(atoms)})
    groups = _groups(tree, atom_of, len(atoms))
    first = sorted({min(group) for group in groups})
    cost = {min(group): sum(tree.atom_cost[atoms[i].name] for i in group) for group in groups}
    devices = dict(zip(first, split([cost[i] for i in first], degree), strict=True))
    device = {i: devices[min(group)] for group in groups for i in group}
    return {node.name: device[atom_of[node.name]] for node in root.walk()}


def split(costs: Sequence[float], degree: int) -> list[int]:
    """Divide a sequence into at most ``degree`` contiguous runs that are not empty.

    Return the run of each item.

    The largest sum of a run is as small as possible. Among these divisions the one with the
    smallest sum of squares is taken.
    """
    count, runs = len(costs), min(degree, len(costs))
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # Sums of the same items differ in their last bits when they start elsewhere.
    bound = _smallest_largest(before, runs) * (1 + 1e-9)
    first = [0]  # for each end, where the longest run starts that may end there
    for end in range(1, count + 1):
        start = first[-1]
        while before[end] - before[start] > bound:
            start += 1
        first.append(start)
    squares: dict[int, float] = {0: 0.0}
    starts: list[dict[int, int]] = []
    for _ in range(runs):
        squares, start_of = _one_more_run(before, squares, first)
        starts.append(start_of)
    out = [0] * count
    end = count
    for run in range(runs, 0, -1):
        start = starts[run - 1][end]
        out[start:end] = [run - 1] * (end - start)
        end = start
    return out


def _smallest_largest(before: Sequence[float], runs: int) -> float:
    """Return the largest sum of a run in the division in which that is smallest.

    ``before`` has the sums so far.
    """

    def fits(bound: float) -> bool:
        end = 0
        for _ in range(runs):
            end = bisect.bisect_right(before, before[end] + bound) - 1
        return end == len(before) - 1

    low, high = 0.0, before[-1]
    for _ in range(64):  # as many as a double has bits
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _one_more_run(
    before: Sequence[float], squares: Mapping[int, float], first: Sequence[int]
) -> tuple[dict[int, float], dict[int, int]]:
    """Return the smallest sum of squares for each end that one more run can
    have, and where that run starts.

    A later end never has an earlier start. So the end in the middle says where
    to look for those on both sides of it.
    """
    best: dict[int, float] = {}
    start_of: dict[int, int] = {}
    todo = [(1, len(before) - 1, min(squares), max(squares))]
    while todo:
        low, high, least, most = todo.pop()
        end = (low + high) // 2
        for start in range(max(least, first[end]), min(most, end - 1) + 1):
            total = squares[start] + (before[end] - before[start]) ** 2
            if end not in best or total < best[end]:
                best[end], start_of[end] = total, start
        if low < end:
            todo.append((low, end - 1, least, start_of.get(end, most)))
        if end < high:
            todo.append((end + 1, high, start_of.get(end, least), most))
    return best, start_of


class _Tree:
    """The tree with costs: shares of the whole, each shared parameter counted once."""

    def __init__(self, root: Node, memory_weight: float) -> None:
        self.root = root
        self.traced = root.order is not None
        self.index = {node.name: i for i, node in enumerate(root.walk())}
        self.holders: dict[Key, list[str]] = {}
        memory: dict[str, int] = {}
        for node in root.walk():
            size = 0 if node.children else node.activations
            for key, number in node.parameters.items():
                size += number if key not in self.holders else 0
                self.holders.setdefault(key, []).append(node.name)
            memory[node.name] = size
        work: dict[str, float] = {}
        self.order: dict[str, int | None] = {}
        self.inside: dict[str, set[Key]] = {}
        all_memory: dict[str, int] = {}
        for node in reversed(list(root.walk())):
            names = [child.name for child in node.children]
            orders = [o for o in (node.order, *(self.order[n] for n in names)) if o is not None]
            self.order[node.name] = (
                self.index[node.name] if not self.traced else min(orders, default=None)
            )
            work[node.name] = max(node.work, sum(work[n] for n in names))
            all_memory[node.name] = memory[node.name] + sum(all_memory[n] for n in names)
            self.inside[node.name] = set(node.parameters).union(*(self.inside[n] for n in names))
        total_memory, total_work = all_memory[root.name], work[root.name]
        weight = memory_weight if total_work > 0 else 1.0
        if not total_memory:
            weight = 0.0

        def cost(bytes_: float, amount: float) -> float:
            return weight * bytes_ / max(total_memory, 1) + (1 - weight) * amount / (
                total_work or 1.0
            )

        self.cost = {name: cost(all_memory[name], work[name]) for name in memory}
        self.own_cost = {
            node.name: cost(
                memory[node.name], work[node.name] - sum(work[c.name] for c in node.children)
            )
            for node in root.walk()
        }
        self.atom_cost: dict[str, float] = {}

    def parts(self, node: Node) -> list[Node]:
        """Return the children that can be elsewhere than their parent, in the
        order of their execution.
        """
        found = [c for c in node.children if not c.attached and self.order[c.name] is not None]
        return sorted(found, key=lambda c: (self.order[c.name] or 0, self.index[c.name]))

    def divisible(self, node: Node) -> bool:
        return not node.whole and bool(self.parts(node))

    def divides_shared(self, node: Node) -> bool:
        """Is something below this node shared with something outside? Then only
        that part has to go there.
        """
        subtree = {n.name for n in node.walk()}
        keys = self.inside[node.name] - set(node.parameters)
        return any(
            len(self.holders[key]) > 1 and not subtree.issuperset(self.holders[key]) for key in keys
        )

    def atoms(self, degree: int) -> list[Node]:
        """Return the modules that are not split further, in the order of their execution."""

        def expand(node: Node, extra: float) -> list[Node]:
            self.atom_cost[node.name] = self.cost[node.name] + extra
            # A block that fits is not split: that only adds messages.
            fits = self.cost[node.name] <= 1 / degree
            if not self.divisible(node) or (fits and not self.divides_shared(node)):
                return [node]
            return [atom for part, more in self._divide(node, extra) for atom in expand(part, more)]

        atoms = expand(self.root, 0.0)
        while len(atoms) < degree and (rest := [n for n in atoms if self.divisible(n)]):
            node = max(rest, key=lambda n: self.atom_cost[n.name])
            at = atoms.index(node)
            pairs = self._divide(node, self.atom_cost[node.name] - self.cost[node.name])
            for part, more in pairs:
                self.atom_cost[part.name] = self.cost[part.name] + more
            atoms[at : at + 1] = [part for part, _ in pairs]
        return atoms

    def _divide(self, node: Node, extra: float) -> list[tuple[Node, float]]:
        """Return the parts of a node.

        The first has the node's own cost, as it runs on the same device.
        """
        parts = self.parts(node)
        names = {part.name for part in parts}
        attached = sum(self.cost[c.name] for c in node.children if c.name not in names)
        first = extra + self.own_cost[node.name] + attached
        return [(part, first if i == 0 else 0.0) for i, part in enumerate(parts)]


def _atom_of(tree: _Tree, place: Mapping[str, int]) -> dict[str, int]:
    """Return the atom that each module goes with.

    That of a module that was split is its first part's.
    """
    found: dict[str, int] = {}

    def visit(node: Node, inherited: int | None) -> int:
        mine = place.get(node.name, inherited)
        if mine is None:
            parts = tree.parts(node)
            mine = visit(parts[0], None)
            for part in parts[1:]:
                visit(part, None)
        for child in node.children:
            if child.name not in found:
                visit(child, mine)
        found[node.name] = mine
        return mine

    visit(tree.root, None)
    return found


def _groups(tree: _Tree, atom_of: Mapping[str, int], count: int) -> list[set[int]]:
    """Return sets of atoms that must be together, as they share parameters.

    Every atom is in one.
    """
    group_of = {i: {i} for i in range(count)}
    for holders in tree.holders.values():
        groups = [group_of[atom] for atom in {atom_of[name] for name in holders}]
        if len(groups) > 1:
            together = set().union(*groups)
            group_of.update(dict.fromkeys(together, together))
    return list({id(group): group for group in group_of.values()}.values())
