"""Compute the coordinates and groups of all ranks from the number of ranks, the degrees and the
placement.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from smdistributed.modelparallel.torch.exceptions import SMPConfigError

__all__ = ["GROUP_OF", "CommGroup", "RankType", "Topology"]


class CommGroup(enum.Enum):
    """A kind of group; each rank is in one group of each kind."""

    WORLD = 0
    PP_GROUP = 1
    TP_GROUP = 2
    RDP_GROUP = 3
    MP_GROUP = 4
    DP_GROUP = 5


class RankType(enum.Enum):
    """A kind of rank: the position in the group of this kind."""

    WORLD_RANK = 0
    PP_RANK = 1
    TP_RANK = 2
    RDP_RANK = 3
    MP_RANK = 4
    DP_RANK = 5


GROUP_OF: Mapping[RankType, CommGroup] = {
    rank_type: CommGroup(rank_type.value) for rank_type in RankType
}
"""Kind of rank -> kind of the group in which it is counted."""

FIXED: Mapping[CommGroup, str] = {
    CommGroup.WORLD: "",
    CommGroup.PP_GROUP: "DT",
    CommGroup.TP_GROUP: "DP",
    CommGroup.RDP_GROUP: "PT",
    CommGroup.MP_GROUP: "D",
    CommGroup.DP_GROUP: "P",
}
"""Kind of group -> letters of the coordinates that are equal for all members of such a group."""


@dataclass(frozen=True)
class Topology:
    """The ranks of a job.

    Attributes:
        world: Number of ranks.
        pipeline: Pipeline-parallel degree.
        tensor: Tensor-parallel degree.
        placement: Permutation of D, P and T; the last letter varies fastest over the global ranks.
        rank: The rank of this process.
    """

    world: int
    pipeline: int
    tensor: int
    placement: str
    rank: int = 0

    def __post_init__(self) -> None:
        """Check that the degrees fit.

        Raises:
            SMPConfigError: The degrees do not divide the number of ranks.
        """
        if self.world % (self.pipeline * self.tensor):
            raise SMPConfigError(
                f"pipeline_parallel_degree = {self.pipeline}"
                f" and tensor_parallel_degree = {self.tensor}:"
                f" their product must divide the number of ranks, which is {self.world}"
            )

    @property
    def degree(self) -> Mapping[str, int]:
        """Letter -> degree; D is reduced data parallelism."""
        return {
            "P": self.pipeline,
            "T": self.tensor,
            "D": self.world // (self.pipeline * self.tensor),
        }

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a global rank, for example ``{"P": 1, "T": 0, "D": 0}``.

        The last letter of the placement varies fastest over the ranks.

        "P" is the pipeline, "T" the tensor, "D" the reduced data parallel coordinate.
        """
        coordinates = {}
        for letter in reversed(self.placement):
            rank, coordinates[letter] = divmod(rank, self.degree[letter])
        return coordinates

    def members(self, group: CommGroup, rank: int | None = None) -> tuple[int, ...]:
        """Return the global ranks of a group, in the order of the ranks in the group.

        Args:
            group: The kind of the group.
            rank: A member, as a global rank; None: this process.

        Raises:
            IndexError: There is no such rank.
        """
        if rank is None:
            rank = self.rank
        return self._group_of[group][rank]

    def all_groups(self, group: CommGroup) -> list[tuple[int, ...]]:
        """Return every group of a kind, in the order of their first members."""
        return sorted(set(self._group_of[group]))

    def group_rank(self, group: CommGroup) -> int:
        """Return the rank of this process in its group of a kind."""
        return self.members(group).index(self.rank)

    @cached_property
    def _group_of(self) -> Mapping[CommGroup, list[tuple[int, ...]]]:
        """Kind of group -> for each global rank the members of its group."""
        coordinates = [self.coords(rank) for rank in range(self.world)]
        group_of: dict[CommGroup, list[tuple[int, ...]]] = {}
        for group, letters in FIXED.items():
            # Ranks with equal fixed coordinates are in the same group.
            members: dict[tuple[int, ...], list[int]] = {}
            keys = []
            for rank in range(self.world):
                key = tuple(coordinates[rank][letter] for letter in letters)
                keys.append(key)
                members.setdefault(key, []).append(rank)
            group_of[group] = [tuple(members[key]) for key in keys]
        return group_of
