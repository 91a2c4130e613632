"""Test where ranks are: the documented tables, and rules that hold for all worlds of up to 16
ranks.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdistributed.modelparallel.torch.exceptions import SMPConfigError
from smdistributed.modelparallel.torch.job.config import ORDERS
from smdistributed.modelparallel.torch.job.topology import GROUP_OF, CommGroup, RankType, Topology

DOCUMENTED = {
    "DPT": ["000", "001", "010", "011", "100", "101", "110", "111"],
    "PTD": ["000", "100", "001", "101", "010", "110", "011", "111"],
    "DTP": ["000", "010", "001", "011", "100", "110", "101", "111"],
}
"""Reduced-data-, pipeline- and tensor-parallel rank of the global ranks 0 to 7, each degree 2."""

WORLDS = [
    (world, pipeline, tensor)
    for world in range(1, 17)
    for pipeline in range(1, world + 1)
    for tensor in range(1, world + 1)
    if world % (pipeline * tensor) == 0
]


@pytest.mark.parametrize("placement", DOCUMENTED)
def test_the_documented_tables(placement: str) -> None:
    found_ranks = []
    for rank in range(8):
        topology = Topology(8, 2, 2, placement, rank)
        kinds = (CommGroup.RDP_GROUP, CommGroup.PP_GROUP, CommGroup.TP_GROUP)
        found_ranks.append("".join(str(topology.group_rank(kind)) for kind in kinds))
    assert found_ranks == DOCUMENTED[placement]


@pytest.mark.parametrize("placement", ORDERS)
def test_the_last_letter_varies_fastest(placement: str) -> None:
    topology = Topology(2 * 3 * 5, 3, 5, placement)
    places = [topology.coords(rank) for rank in range(30)]
    assert places == sorted(places, key=lambda place: [place[letter] for letter in placement])
    assert len({tuple(place.items()) for place in places}) == 30


def test_groups_of_cluster_and_spread() -> None:
    cluster, spread = Topology(8, 2, 1, "DPT"), Topology(8, 2, 1, "TPD", 6)
    assert cluster.all_groups(CommGroup.MP_GROUP) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert cluster.all_groups(CommGroup.DP_GROUP) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert spread.all_groups(CommGroup.MP_GROUP) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert spread.all_groups(CommGroup.DP_GROUP) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert spread.group_rank(CommGroup.DP_GROUP) == 2


def test_ranks_in_the_figure_of_the_guide() -> None:
    """The third table: pipeline over (0, 1), tensor over (0, 2)."""
    topologies = [Topology(8, 2, 2, "DTP", rank) for rank in range(8)]
    assert topologies[0].members(CommGroup.PP_GROUP) == (0, 1)
    assert topologies[0].members(CommGroup.TP_GROUP) == (0, 2)
    assert [topology.group_rank(CommGroup.MP_GROUP) for topology in topologies] == [0, 1, 2, 3] * 2
    assert [topology.group_rank(CommGroup.DP_GROUP) for topology in topologies] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(WORLDS), st.sampled_from(ORDERS))
def test_what_holds_in_every_world(degrees: tuple[int, int, int], placement: str) -> None:
    world, pipeline, tensor = degrees
    data = world // (pipeline * tensor)
    sizes = {
        CommGroup.WORLD: world,
        CommGroup.PP_GROUP: pipeline,
        CommGroup.TP_GROUP: tensor,
        CommGroup.RDP_GROUP: data,
        CommGroup.MP_GROUP: pipeline * tensor,
        CommGroup.DP_GROUP: tensor * data,
    }
    topology = Topology(world, pipeline, tensor, placement)
    for kind, size in sizes.items():
        groups = topology.all_groups(kind)
        # The groups of a kind share the ranks out.
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for group in groups:
            assert len(group) == size
            assert list(group) == sorted(group)
            for place, rank in enumerate(group):
                assert topology.members(kind, rank) == group
                assert Topology(world, pipeline, tensor, placement, rank).group_rank(kind) == place
    for rank in range(world):
        pp, tp, rdp, mp, dp = (
            set(topology.members(kind, rank))
            for kind in (
                CommGroup.PP_GROUP,
                CommGroup.TP_GROUP,
                CommGroup.RDP_GROUP,
                CommGroup.MP_GROUP,
                CommGroup.DP_GROUP,
            )
        )
        assert pp & tp == pp & rdp == tp & rdp == mp & rdp == pp & dp == {rank}
        assert mp == {
            other for middle in pp for other in topology.members(CommGroup.TP_GROUP, middle)
        }
        assert dp == {
            other for middle in tp for other in topology.members(CommGroup.RDP_GROUP, middle)
        }


def test_a_rank_type_is_counted_in_its_group() -> None:
    assert {
        kind.name.removesuffix("_RANK"): group.name.removesuffix("_GROUP")
        for kind, group in GROUP_OF.items()
    } == {kind: kind for kind in ("WORLD", "PP", "TP", "RDP", "MP", "DP")}
    assert len(RankType) == len(CommGroup)


def test_degrees_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(SMPConfigError, match="must divide the number of ranks, which is 6"):
        Topology(6, 2, 2, "DPT")
