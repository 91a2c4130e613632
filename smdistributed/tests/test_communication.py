"""Test ranks, groups and objects between ranks, as a script sees them; and the objects that cannot
cross.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ranks import RankError, run_ranks


@dataclass
class Point:
    x: float
    tensor: torch.Tensor


def _ranks_and_groups() -> dict[str, Any]:
    import torch.distributed as dist

    import smdistributed.modelparallel.torch as smp

    assert not smp.is_initialized()
    with pytest.raises(smp.SMPRuntimeError, match=r"call smp\.init"):
        smp.rank()
    with pytest.raises(smp.SMPRuntimeError, match=r"call smp\.init"):
        smp.barrier()
    smp.init({"pipeline_parallel_degree": 2, "ddp": True})
    smp.init({"microbatches": 7})  # does nothing
    assert smp.is_initialized()
    assert not smp.is_tracing()
    assert smp.num_microbatches() == 1
    sums = {}
    for name in ("world", "pp", "tp", "rdp", "mp", "dp"):
        total = torch.tensor([smp.rank()])
        dist.all_reduce(total, group=getattr(smp, f"get_{name}_process_group")())
        sums[name] = int(total)
    kinds = (smp.WORLD, smp.PP_GROUP, smp.TP_GROUP, smp.RDP_GROUP, smp.MP_GROUP, smp.DP_GROUP)
    assert list(smp.CommGroup) == list(kinds)
    for kind in kinds:
        smp.barrier(kind)
    for barrier in (
        smp.barrier,
        smp.dp_barrier,
        smp.mp_barrier,
        smp.pp_barrier,
        smp.tp_barrier,
        smp.rdp_barrier,
    ):
        barrier()
    return {
        "rank": (smp.rank(), smp.size(), smp.local_rank(), smp.local_size()),
        "ranks": (smp.pp_rank(), smp.tp_rank(), smp.rdp_rank(), smp.mp_rank(), smp.dp_rank()),
        "sizes": (smp.pp_size(), smp.tp_size(), smp.rdp_size(), smp.mp_size(), smp.dp_size()),
        "groups": (
            smp.get_pp_group(),
            smp.get_tp_group(),
            smp.get_rdp_group(),
            smp.get_mp_group(),
            smp.get_dp_group(),
        ),
        "sums": sums,
    }


def _objects() -> None:
    import smdistributed.modelparallel.torch as smp

    # The mp groups are (0, 1) and (2, 3), the dp groups (0, 2) and (1, 3).
    smp.init({"pipeline_parallel_degree": 2, "ddp": True})
    me = smp.rank()
    objects = [
        None,
        "text",
        b"",
        {"a": [1, (2, 3)]},
        torch.arange(1000, dtype=torch.bfloat16),
        torch.tensor(3.0, requires_grad=True),
        torch.ones(2, 3).T,
        Point(1.5, torch.ones(2)),
        list(range(200_000)),
    ]

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Point):
            return one.x == other.x and same(one.tensor, other.tensor)
        if isinstance(one, torch.Tensor):
            return (
                one.dtype == other.dtype
                and one.requires_grad == other.requires_grad
                and torch.equal(one, other)
            )
        return bool(one == other)

    # To one rank, counted in three ways; sender and receiver may count differently.
    for obj in objects:
        if me == 0:
            smp.send(obj, 3, smp.RankType.WORLD_RANK)
            smp.send(obj, 1, smp.RankType.DP_RANK)
            smp.send(obj, 1, smp.RankType.MP_RANK)
        elif me == 3:
            assert same(smp.recv_from(0, smp.RankType.WORLD_RANK), obj)
        elif me == 2:
            assert same(smp.recv_from(0, smp.RankType.RDP_RANK), obj)
        else:
            assert same(smp.recv_from(0, smp.RankType.PP_RANK), obj)
    # From one rank to its group; the sender alone calls broadcast.
    for kind, rank_type, own in (
        (smp.CommGroup.WORLD, smp.RankType.WORLD_RANK, me),
        (smp.CommGroup.MP_GROUP, smp.RankType.MP_RANK, smp.mp_rank()),
        (smp.CommGroup.DP_GROUP, smp.RankType.DP_RANK, smp.dp_rank()),
    ):
        if own == 0:
            smp.broadcast(("from", me, kind), kind)
        else:
            sender = smp.recv_from(0, rank_type)
            assert sender[0] == "from"
            assert sender[2] is kind
    assert smp.allgather(("me", me)) == [("me", rank) for rank in range(4)]
    assert smp.allgather(me, smp.CommGroup.DP_GROUP) == smp.get_dp_group()
    gathered = smp.allgather(torch.full((me + 1,), float(me)), smp.CommGroup.MP_GROUP)
    assert [tensor.tolist() for tensor in gathered] == [
        [float(rank)] * (rank + 1) for rank in smp.get_mp_group()
    ]
    # Ranks 0 and 2 talk while 1 and 3 are in a barrier of another group, and 3
    # does not wait for them.
    for round_ in range(20):
        if me in (0, 2):
            if me == 0:
                smp.send(round_, 1, smp.RankType.DP_RANK)
            else:
                assert smp.recv_from(0, smp.RankType.DP_RANK) == round_
        smp.mp_barrier()
        if me in (1, 3):
            smp.dp_barrier()
    smp.barrier()


def _mistakes() -> None:
    import smdistributed.modelparallel.torch as smp

    smp.init({})
    with pytest.raises(ValueError, match="DP_RANK = 0 is this process itself"):
        smp.send(1, 0, smp.RankType.DP_RANK)
    with pytest.raises(ValueError, match="WORLD_RANK = 1: must be an integer from 0 to 0"):
        smp.recv_from(1, smp.RankType.WORLD_RANK)
    with pytest.raises(
        TypeError, match=r"rank_type = <CommGroup\.WORLD: 0>: must be one of smp\.RankType"
    ):
        smp.recv_from(0, smp.CommGroup.WORLD)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"group = 'world': must be one of smp\.CommGroup"):
        smp.barrier("world")  # type: ignore[arg-type]
    smp.broadcast("to nobody")
    assert smp.allgather("alone") == ["alone"]


def _init(config: dict[str, Any]) -> None:
    import smdistributed.modelparallel.torch as smp

    smp.init(config)


def test_ranks_and_groups_of_two_pipelines() -> None:
    results = run_ranks(4, _ranks_and_groups)
    assert [rank_result["rank"] for rank_result in results] == [
        (rank, 4, rank, 4) for rank in range(4)
    ]
    assert [rank_result["ranks"] for rank_result in results] == [
        (0, 0, 0, 0, 0),
        (1, 0, 0, 1, 0),
        (0, 0, 1, 0, 1),
        (1, 0, 1, 1, 1),
    ]
    assert all(rank_result["sizes"] == (2, 1, 2, 2, 2) for rank_result in results)
    assert results[3]["groups"] == ([2, 3], [3], [1, 3], [2, 3], [1, 3])
    assert results[3]["sums"] == {"world": 6, "pp": 5, "tp": 3, "rdp": 4, "mp": 5, "dp": 4}


def test_objects_arrive_and_do_not_cross() -> None:
    run_ranks(4, _objects)


def test_mistakes_are_told() -> None:
    run_ranks(1, _mistakes)


def test_torchruns_variables_win_over_open_mpis() -> None:
    from trainworks_smdistributed.environment import Ranks, ranks_of

    open_mpi = {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }
    torchrun = {"RANK": "2", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    assert ranks_of({}) == Ranks(0, 1, 0, 1)
    assert ranks_of(open_mpi) == Ranks(5, 8, 1, 4)
    assert ranks_of({**open_mpi, **torchrun}) == Ranks(2, 6, 0, 3)
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK='five' is not an integer"):
        ranks_of({**open_mpi, "OMPI_COMM_WORLD_RANK": "five"})


def test_a_configuration_that_does_not_fit_the_ranks_ends_every_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _init, {"pipeline_parallel_degree": 3})
    assert (
        str(caught.value).count("their product 3 must divide the number of ranks, which is 2") == 2
    )
