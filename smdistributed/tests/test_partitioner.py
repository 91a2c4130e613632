"""The automatic partition: tables, and comparison with every division there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdistributed.modelparallel.torch.partitioning.partitioner import Node, partition, split


def leaf(name: str, size: int = 0, *, key: object = None, **more: object) -> Node:
    return Node(name, parameters={key or name: size}, **more)  # type: ignore[arg-type]


def chain(*sizes: int) -> Node:
    return Node("", tuple(leaf(str(i), size) for i, size in enumerate(sizes)))


def devices(root: Node, degree: int, weight: float = 1.0) -> dict[str, int]:
    return partition(root, degree, weight)


@pytest.mark.parametrize(
    ("sizes", "degree", "expected"),
    [
        ((1, 1, 1, 1), 1, (0, 0, 0, 0)),
        ((1, 1, 1, 1), 2, (0, 0, 1, 1)),
        ((1, 1, 1, 1), 4, (0, 1, 2, 3)),
        ((4, 1, 1, 1, 1), 2, (0, 1, 1, 1, 1)),
        ((1, 1, 1, 1, 4), 2, (0, 0, 0, 0, 1)),
        ((9, 1, 1, 1, 1), 3, (0, 1, 1, 2, 2)),  # the rest is balanced, too
        ((1, 1), 4, (0, 1)),  # fewer modules than devices
    ],
)
def test_a_chain_is_divided_evenly(
    sizes: tuple[int, ...], degree: int, expected: tuple[int, ...]
) -> None:
    owner = devices(chain(*sizes), degree)
    owners = tuple(owner[str(i)] for i in range(len(sizes)))
    assert owners == expected
    assert owner[""] == 0


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 4))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_division_is_the_best_of_all(costs: list[int], degree: int) -> None:
    runs = min(degree, len(costs))

    def score(cuts: tuple[int, ...]) -> tuple[int, int]:
        ends = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        return max(sums), sum(s * s for s in sums)

    best = min(score(cuts) for cuts in itertools.combinations(range(1, len(costs)), runs - 1))
    division = split([float(c) for c in costs], degree)
    assert division == sorted(division)
    assert set(division) == set(range(runs))
    sums = [sum(c for c, d in zip(costs, division, strict=True) if d == run) for run in range(runs)]
    assert (max(sums), sum(s * s for s in sums)) == best


@st.composite
def trees(draw: st.DrawFn) -> Node:
    """Trees of modules; some parameters are shared, some modules are never called."""
    count = itertools.count()
    order = itertools.count()
    traced = draw(st.booleans())

    def node(depth: int, called: bool) -> Node:
        name = "" if depth == 0 else f"n{next(count)}"
        called = called and (depth == 0 or draw(st.integers(0, 5)) > 0)
        at = next(order) if traced and called else None
        width = draw(st.integers(0 if depth else 1, 3)) if depth < 3 else 0
        children = tuple(node(depth + 1, called) for _ in range(width))
        parameters: dict[object, int] = {name + "w": draw(st.integers(0, 9))}
        if draw(st.integers(0, 6)) == 0:
            parameters["shared"] = 5
        return Node(name, children, parameters, activations=draw(st.integers(0, 3)), order=at)

    return node(0, called=True)


@given(trees(), st.integers(1, 4), st.sampled_from([0.0, 0.5, 0.8, 1.0]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_tree_gets_a_partition(root: Node, degree: int, weight: float) -> None:
    owner = partition(root, degree, weight)
    nodes = {node.name: node for node in root.walk()}
    assert list(owner) == [node.name for node in root.walk()]
    assert set(owner.values()) <= set(range(degree))
    assert owner[""] == 0
    sharing = {owner[name] for name, node in nodes.items() if "shared" in node.parameters}
    assert len(sharing) <= 1
    traced = root.order is not None
    for node in nodes.values():
        for child in node.children:
            if traced and all(n.order is None for n in child.walk()):
                assert owner[child.name] == owner[node.name], (
                    "what is never called stays with its parent"
                )
    assert owner == partition(root, degree, weight)


def test_a_block_that_fits_is_not_divided() -> None:
    blocks = tuple(Node(f"b{i}", (leaf(f"b{i}.x", 3), leaf(f"b{i}.y", 3))) for i in range(3))
    owner = devices(Node("", blocks), 2)
    assert all(owner[f"b{i}"] == owner[f"b{i}.x"] == owner[f"b{i}.y"] for i in range(3))


def test_a_block_is_divided_when_devices_would_stay_empty() -> None:
    root = Node("", (leaf("big", 90), Node("small", (leaf("small.x", 5), leaf("small.y", 5)))))
    assert devices(root, 3) == {"": 0, "big": 0, "small": 1, "small.x": 1, "small.y": 2}


def test_a_divided_module_is_where_its_first_part_is_and_so_are_its_own_parameters() -> None:
    inner = Node("m", (leaf("m.x", 4), leaf("m.y", 4)), {"own": 8})
    owner = devices(Node("", (leaf("a", 8), inner)), 2)
    assert owner["m"] == owner["m.x"]
    # 8 + 8 + 4 against 4 is worse than 8 against 16.
    assert owner == {"": 0, "a": 0, "m": 1, "m.x": 1, "m.y": 1}


def test_the_order_is_that_of_the_calls() -> None:
    root = Node("", (leaf("last", 1, order=2), leaf("first", 1, order=1)), order=0)
    assert devices(root, 2) == {"": 0, "last": 1, "first": 0}


def test_a_list_takes_order_and_work_from_its_children() -> None:
    listed = Node("list", tuple(leaf(f"list.{i}", work=1.0, order=i + 2) for i in range(4)))
    root = Node(
        "",
        (listed, leaf("head", work=0.0, order=9), leaf("stem", work=0.0, order=1)),
        work=4.0,
        order=0,
    )
    owner = partition(root, 2, 0.0)
    assert [owner[f"list.{i}"] for i in range(4)] == [0, 0, 1, 1]
    assert (owner["stem"], owner["head"]) == (0, 1)


def test_a_shared_parameter_is_counted_once_and_its_modules_are_together() -> None:
    tied = [
        leaf("emb", 6, key="w"),
        *(leaf(f"b{i}", 3) for i in range(4)),
        leaf("head", 6, key="w"),
    ]
    owner = devices(Node("", tuple(tied)), 2)
    assert owner == {"": 0, "emb": 0, "b0": 0, "b1": 1, "b2": 1, "b3": 1, "head": 0}


def test_only_the_module_that_shares_leaves_its_block() -> None:
    block = Node("end", (leaf("end.norm", 1), leaf("end.out", 6, key="w")))
    owner = devices(Node("", (leaf("emb", 6, key="w"), leaf("mid", 6), block)), 2)
    assert owner["end.out"] == owner["emb"] == 0
    assert owner["end.norm"] == 1


def test_what_reads_a_childs_parameters_stays_whole() -> None:
    attention = Node("att", (leaf("att.q", 5), leaf("att.out", 5)), whole=True)
    owner = devices(Node("", (attention, leaf("mlp", 1))), 3)
    assert owner["att"] == owner["att.q"] == owner["att.out"]


def test_memory_weight_decides_between_memory_and_work() -> None:
    root = Node(
        "",
        (
            leaf("a", 9, work=1.0, order=1),
            leaf("b", 1, work=1.0, order=2),
            leaf("c", 1, work=9.0, order=3),
        ),
        work=11.0,
        order=0,
    )
    assert [partition(root, 2, 1.0)[n] for n in "abc"] == [0, 1, 1]
    assert [partition(root, 2, 0.0)[n] for n in "abc"] == [0, 0, 1]


class Counted(float):
    """A cost that counts how often it, or a sum of it, is added or subtracted."""

    done = 0

    def __add__(self, other: float) -> Counted:
        Counted.done += 1
        return Counted(float(self) + other)

    __radd__ = __add__

    def __sub__(self, other: float) -> Counted:
        Counted.done += 1
        return Counted(float(self) - other)

    def __rsub__(self, other: float) -> Counted:
        Counted.done += 1
        return Counted(other - float(self))


@pytest.mark.parametrize("costs", [[1], [1, 9, 2, 5], [0, 0, 3]], ids=["equal", "various", "free"])
def test_the_work_of_a_division_grows_as_the_number_of_modules(costs: list[int]) -> None:
    work = []
    for length in (1000, 2000, 4000):
        Counted.done = 0
        split(
            [Counted(c) for c in [*itertools.islice(itertools.cycle(costs), length), length / 3]], 4
        )
        work.append(Counted.done)
    # The cost is the length times its logarithm. In the square of the length each step would cost 4
    # times the one before.
    assert work[1] < 2.6 * work[0]
    assert work[2] < 2.6 * work[1]


def test_many_modules_may_share_many_parameters() -> None:
    pairs = [leaf(f"{i}", 1, key=f"shared {i // 2}") for i in range(2000)]
    owner = devices(Node("", tuple(pairs)), 2)
    assert all(owner[f"{2 * i}"] == owner[f"{2 * i + 1}"] for i in range(1000))
    assert sum(owner.values()) == 1000
