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
        name: Its name in the root, as of ``named_modules``.
        children: Its children, in the order of their definition.
        parameters: Key of each own parameter or buffer -> its bytes. A tensor of two modules has
            the same key in both.
        activations: Bytes of its outputs in one forward pass.
        work: Seconds or operations of one forward pass, with those of its children.
        order: Position of its first call in the traced forward pass; None: it was never called.
        whole: Whether it is never split.
        attached: Whether it is never called, because its parent reads its parameters.
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

    The tree is split from the root into atoms, until each atom costs at most one device's share.
    The atoms are then divided among the devices in the order of their execution, with the smallest
    possible cost of the costliest device. A module that was split is on the partition of its first
    part, so the root is on 0. Modules that share a parameter are on the same partition.

    Args:
        root: The tree.
        degree: Number of devices, 1 or more.
        memory_weight: Weight of memory against work, 0 to 1.

    Returns:
        Name of a node -> partition, from 0. With fewer atoms than devices the last partitions are
        empty.
    """
    tree = _Tree(root, memory_weight)
    atoms = tree.atoms(degree)
    atom_of = _find_atom_of_each_node(tree, {atom.name: i for i, atom in enumerate(atoms)})
    groups = sorted(_find_groups_of_atoms(tree, atom_of, len(atoms)), key=min)
    costs = [sum(tree.atom_cost[atoms[i].name] for i in group) for group in groups]
    device_of_atom: dict[int, int] = {}
    for group, device in zip(groups, split(costs, degree), strict=True):
        device_of_atom.update(dict.fromkeys(group, device))
    return {node.name: device_of_atom[atom_of[node.name]] for node in root.walk()}


def split(costs: Sequence[float], degree: int) -> list[int]:
    """Divide a sequence into at most ``degree`` contiguous runs that are not empty.

    The largest sum of a run is as small as possible. Among these divisions the one with the
    smallest sum of squares is taken.

    Costs may be 0. Without items the result is empty.

    Returns:
        For each item the number of its run. For example costs of 1, 1, 2 and two runs give 0, 0, 1.
    """
    count, runs = len(costs), min(degree, len(costs))
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # Sums of the same items differ in their last bits if they start at other items.
    bound = _find_smallest_bound(before, runs) * (1 + 1e-9)
    first = [0]  # for each end the start of the longest run that may end there
    for end in range(1, count + 1):
        start = first[-1]
        while before[end] - before[start] > bound:
            start += 1
        first.append(start)
    squares: dict[int, float] = {0: 0.0}
    starts: list[dict[int, int]] = []
    for _ in range(runs):
        squares, start_of = _add_run(before, squares, first)
        starts.append(start_of)
    # From the last run back to the first: each start is the end of the run before.
    run_of_item = [0] * count
    end = count
    for run in range(runs, 0, -1):
        start = starts[run - 1][end]
        run_of_item[start:end] = [run - 1] * (end - start)
        end = start
    return run_of_item


def _find_smallest_bound(before: Sequence[float], runs: int) -> float:
    """Return the smallest possible largest sum of a run, by bisection.

    Args:
        before: For each position the sum of the costs before it.
        runs: Number of runs.
    """

    def fits(bound: float) -> bool:
        """Return whether runs with sums of at most ``bound`` reach the last item."""
        end = 0
        for _ in range(runs):
            end = bisect.bisect_right(before, before[end] + bound) - 1
        return end == len(before) - 1

    low, high = 0.0, before[-1]
    for _ in range(64):  # as many as a double has bits
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _add_run(
    before: Sequence[float], squares: Mapping[int, float], first: Sequence[int]
) -> tuple[dict[int, float], dict[int, int]]:
    """Add a run to the best divisions of the items before it.

    A later end never has an earlier start. So the best start of an end bounds the starts of the
    ends on both sides, and each half of the ends is searched with its own bounds.

    Args:
        before: For each position the sum of the costs before it.
        squares: End of the runs so far -> smallest sum of squares.
        first: For each end the first allowed start.

    Returns:
        End of the new run -> smallest sum of squares; end of the new run -> its start.
    """
    best: dict[int, float] = {}
    start_of: dict[int, int] = {}
    ranges = [(1, len(before) - 1, min(squares), max(squares))]
    while ranges:
        low, high, least, most = ranges.pop()
        end = (low + high) // 2
        for start in range(max(least, first[end]), min(most, end - 1) + 1):
            total = squares[start] + (before[end] - before[start]) ** 2
            if end not in best or total < best[end]:
                best[end], start_of[end] = total, start
        if low < end:
            ranges.append((low, end - 1, least, start_of.get(end, most)))
        if end < high:
            ranges.append((end + 1, high, start_of.get(end, least), most))
    return best, start_of


class _Tree:
    """The tree with costs. A cost is a share of the model; a shared parameter is counted once.

    Attributes:
        root: The root.
        traced: Whether the modules were called in a traced pass.
        index: Name of a node -> its position in the walk.
        holders: Key of a parameter -> names of the nodes that have it.
        order: Name of a node -> position of the first call in its subtree, or None.
        inside: Name of a node -> keys of the parameters in its subtree.
        cost: Name of a node -> cost of its subtree.
        own_cost: Name of a node -> cost without its children.
        atom_cost: Name of an atom -> its cost, with a share of the nodes that were split.
    """

    def __init__(self, root: Node, memory_weight: float) -> None:
        self.root = root
        self.traced = root.order is not None
        self.index = {node.name: i for i, node in enumerate(root.walk())}
        self.holders: dict[Key, list[str]] = {}
        memory: dict[str, int] = {}
        for node in root.walk():
            size = 0 if node.children else node.activations
            for key, parameter_size in node.parameters.items():
                if key not in self.holders:
                    size += parameter_size
                self.holders.setdefault(key, []).append(node.name)
            memory[node.name] = size
        work: dict[str, float] = {}
        self.order: dict[str, int | None] = {}
        self.inside: dict[str, set[Key]] = {}
        all_memory: dict[str, int] = {}
        for node in reversed(list(root.walk())):
            names = [child.name for child in node.children]
            self.order[node.name] = self.index[node.name]
            if self.traced:
                orders = [node.order, *(self.order[name] for name in names)]
                known_orders = [order for order in orders if order is not None]
                self.order[node.name] = min(known_orders, default=None)
            work[node.name] = max(node.work, sum(work[name] for name in names))
            all_memory[node.name] = memory[node.name] + sum(all_memory[name] for name in names)
            inside_children = [self.inside[name] for name in names]
            self.inside[node.name] = set(node.parameters).union(*inside_children)
        total_memory, total_work = all_memory[root.name], work[root.name]
        weight = memory_weight if total_work > 0 else 1.0
        if not total_memory:
            weight = 0.0

        def cost(size: float, amount: float) -> float:
            memory_cost = weight * size / max(total_memory, 1)
            work_cost = (1 - weight) * amount / (total_work or 1.0)
            return memory_cost + work_cost

        self.cost = {name: cost(all_memory[name], work[name]) for name in memory}
        self.own_cost: dict[str, float] = {}
        for node in root.walk():
            own_work = work[node.name] - sum(work[child.name] for child in node.children)
            self.own_cost[node.name] = cost(memory[node.name], own_work)
        self.atom_cost: dict[str, float] = {}

    def parts(self, node: Node) -> list[Node]:
        """Return the children that need not be with their parent, in the order of execution.

        Children that are never called are left out: they stay with the parent.
        """
        children = []
        for child in node.children:
            if not child.attached and self.order[child.name] is not None:
                children.append(child)
        return sorted(children, key=lambda c: (self.order[c.name] or 0, self.index[c.name]))

    def is_divisible(self, node: Node) -> bool:
        """Return whether a node can be split: it has children that may be on other devices."""
        return not node.whole and bool(self.parts(node))

    def divides_shared(self, node: Node) -> bool:
        """Return whether a node below shares a parameter with a node outside.

        Then only the node below has to be with the node outside.
        """
        subtree = {descendant.name for descendant in node.walk()}
        for key in self.inside[node.name] - set(node.parameters):
            holders = self.holders[key]
            if len(holders) > 1 and not subtree.issuperset(holders):
                return True
        return False

    def atoms(self, degree: int) -> list[Node]:
        """Return the nodes that are not split further, in the order of their execution.

        Their costs are stored in ``atom_cost``.

        Costs of nodes that were split are stored, too.

        Args:
            degree: Number of devices. There may be fewer atoms, if no more nodes can be split.
        """
        atoms = self._expand(self.root, 0.0, 1 / degree)
        # With fewer atoms than devices the costliest ones are split further.
        while len(atoms) < degree:
            divisible_atoms = [atom for atom in atoms if self.is_divisible(atom)]
            if not divisible_atoms:
                break
            node = max(divisible_atoms, key=lambda atom: self.atom_cost[atom.name])
            index = atoms.index(node)
            pairs = self._divide(node, self.atom_cost[node.name] - self.cost[node.name])
            for part, extra in pairs:
                self.atom_cost[part.name] = self.cost[part.name] + extra
            atoms[index : index + 1] = [part for part, _ in pairs]
        return atoms

    def _expand(self, node: Node, extra: float, share: float) -> list[Node]:
        """Return the atoms of a subtree, in the order of their execution, and store their costs.

        Costs of nodes on the way are stored, too.

        Args:
            node: The root of the subtree.
            extra: Cost of nodes above that this node bears.
            share: Largest cost of an atom, a device's share.
        """
        self.atom_cost[node.name] = self.cost[node.name] + extra
        # A block that fits is not split: a split would only add messages.
        fits = self.cost[node.name] <= share
        if not self.is_divisible(node) or (fits and not self.divides_shared(node)):
            return [node]
        atoms = []
        for part, part_extra in self._divide(node, extra):
            atoms += self._expand(part, part_extra, share)
        return atoms

    def _divide(self, node: Node, extra: float) -> list[tuple[Node, float]]:
        """Return the parts of a node, each with the cost of the node that it bears.

        The first part bears all of this cost, because the node itself is on the same device.

        Args:
            node: The node.
            extra: Cost of nodes above that this node bears.
        """
        parts = self.parts(node)
        names = {part.name for part in parts}
        attached_cost = sum(self.cost[c.name] for c in node.children if c.name not in names)
        pairs = [(part, 0.0) for part in parts]
        pairs[0] = (parts[0], extra + self.own_cost[node.name] + attached_cost)
        return pairs


def _find_atom_of_each_node(tree: _Tree, place: Mapping[str, int]) -> dict[str, int]:
    """Return the number of the atom that each node is placed with.

    A node that was split is placed with its first part.

    Args:
        tree: The tree.
        place: Name of an atom -> its number.

    Returns:
        Name of a node -> number of its atom, for all nodes of the tree.
    """
    atom_of: dict[str, int] = {}

    def visit(node: Node, inherited: int | None) -> int:
        """Number a node and all nodes below it; return the node's number.

        inherited: the number of the node above; None if that node was split, or for the root.
        """
        atom = place.get(node.name, inherited)
        if atom is None:
            # The node was split: its parts have numbers of their own, and are children, too.
            parts = tree.parts(node)
            atom = visit(parts[0], None)
            for part in parts[1:]:
                visit(part, None)
        for child in node.children:
            if child.name not in atom_of:
                visit(child, atom)
        atom_of[node.name] = atom
        return atom

    visit(tree.root, None)
    return atom_of


def _find_groups_of_atoms(tree: _Tree, atom_of: Mapping[str, int], count: int) -> list[set[int]]:
    """Return disjoint sets of atoms that share parameters, and so must be together.

    An atom that shares nothing is a set of its own.

    Nothing is changed.

    Args:
        tree: The tree.
        atom_of: Name of a node -> number of its atom.
        count: Number of atoms.
    """
    group_of = {i: {i} for i in range(count)}
    for holders in tree.holders.values():
        atoms = {atom_of[name] for name in holders}
        groups = [group_of[atom] for atom in atoms]
        if len(groups) > 1:
            merged = set().union(*groups)
            group_of.update(dict.fromkeys(merged, merged))
    unique = {id(group): group for group in group_of.values()}
    return list(unique.values())
