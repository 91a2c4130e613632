"""Send objects between ranks outside steps.

Every call returns when its part is done. Objects travel between two ranks on a process group that
is used for nothing else, so they cannot mix with a barrier of another rank. Objects are pickled:
the ranks of a job trust each other, and every process that reaches the job's store.
"""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

from smdistributed.modelparallel.torch.exceptions import SMPRuntimeError

from .collective_calls import calls
from .ranks import rank
from .state import state
from .topology import GROUP_OF, CommGroup, RankType

__all__ = [
    "allgather",
    "barrier",
    "broadcast",
    "dp_barrier",
    "mp_barrier",
    "pp_barrier",
    "rdp_barrier",
    "recv_from",
    "send",
    "tp_barrier",
]


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send an object to one rank, which calls ``recv_from``. Returns when the object is sent.

    Args:
        obj: Any object that can be pickled, also tensors.
        dest_rank: The receiver.
        rank_type: Kind of ``dest_rank``, in this rank's group of this kind.

    Raises:
        TypeError: ``rank_type`` is not a ``RankType``.
        ValueError: The receiver does not exist, or is this process.
        SMPRuntimeError: ``smp.init`` has not been called.
        RuntimeError: The receiver is gone (torch's own error).
        Exception: The object cannot be pickled.
    """
    _send(_packed(obj), _global_rank(dest_rank, rank_type))


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Receive the next object that a rank sends to this one with ``send`` or ``broadcast``.

    Waits for the object, and returns it. Tensors from a GPU arrive on the current device of this
    rank.

    Args:
        src_rank: The sender.
        rank_type: Kind of ``src_rank``, in this rank's group of this kind.

    Raises:
        TypeError: ``rank_type`` is not a ``RankType``.
        ValueError: The sender does not exist, or is this process.
        SMPRuntimeError: ``smp.init`` has not been called.
        RuntimeError: The sender is gone (torch's own error).
        Exception: The object cannot be unpickled on this rank.
    """
    source = _global_rank(src_rank, rank_type)
    # First the number of bytes, then the bytes.
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source, group=state.groups.objects)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, source, group=state.groups.objects)
    return _unpacked(data)


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Send an object to the other ranks of a group; each of them calls ``recv_from``.

    Raises:
        TypeError: ``group`` is not a ``CommGroup``.
        SMPRuntimeError: ``smp.init`` has not been called.
        RuntimeError: A receiver is gone (torch's own error).
        Exception: The object cannot be pickled.
    """
    data = _packed(obj)
    for member in _members(group):
        if member != rank():
            _send(data, member)


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Gather an object from each rank of a group, in the order of the ranks. Collective.

    The call is recorded, for the comparison of ranks that wait (collective_calls.py).

    Raises:
        TypeError: ``group`` is not a ``CommGroup``.
        SMPRuntimeError: ``smp.init`` has not been called.
        RuntimeError: The collective broke, because a rank is gone (torch's own error).
        Exception: An object cannot be pickled, or unpickled on this rank.
    """
    members = _members(group)
    packed = _packed(obj).numpy().tobytes()
    gathered: list[Any] = [None] * len(members)
    with calls.inside("smp.allgather", group):
        dist.all_gather_object(gathered, packed, group=state.groups[group])
    objects = []
    for data in gathered:
        objects.append(_unpacked(torch.frombuffer(bytearray(data), dtype=torch.uint8)))
    return objects


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait until all ranks of a group have called this.

    Raises:
        TypeError: ``group`` is not a ``CommGroup``.
        SMPRuntimeError: ``smp.init`` has not been called.
        RuntimeError: The barrier broke, because a rank is gone (torch's own error).
    """
    _members(group)
    with calls.inside("smp.barrier", group):
        dist.barrier(group=state.groups[group])


def dp_barrier() -> None:
    """Return when all ranks that have the same partition have called this."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """Return when all ranks that hold this replica of the model have called this."""
    barrier(CommGroup.MP_GROUP)


def pp_barrier() -> None:
    """Return when all ranks of this pipeline have called this."""
    barrier(CommGroup.PP_GROUP)


def tp_barrier() -> None:
    """Return when all ranks that share split modules with this one have called this."""
    barrier(CommGroup.TP_GROUP)


def rdp_barrier() -> None:
    """Return when all ranks with the same partition and the same slices have called this."""
    barrier(CommGroup.RDP_GROUP)


def _members(group: CommGroup) -> tuple[int, ...]:
    """Return the global ranks of this rank's group of a kind.

    Returns:
        The global ranks, in the order of the ranks in the group.

    Raises:
        TypeError: It is not a ``CommGroup``.
        SMPRuntimeError: ``smp.init`` has not been called.
    """
    if not isinstance(group, CommGroup):
        raise TypeError(
            f"group = {group!r}: must be one of smp.CommGroup, for example smp.CommGroup.DP_GROUP"
        )
    if not state.initialized:
        raise SMPRuntimeError("ranks cannot communicate yet: call smp.init() first")
    return state.topo.members(group)


def _global_rank(place: int, rank_type: RankType) -> int:
    """Return the global rank of another process, named by its place in this rank's group.

    Raises:
        TypeError: The type is not a ``RankType``.
        ValueError: The rank does not exist, or is this process.
        SMPRuntimeError: ``smp.init`` has not been called.
    """
    if not isinstance(rank_type, RankType):
        raise TypeError(
            f"rank_type = {rank_type!r}: must be one of smp.RankType, for example"
            " smp.RankType.PP_RANK"
        )
    members = _members(GROUP_OF[rank_type])
    if not 0 <= place < len(members):
        raise ValueError(
            f"{rank_type.name} = {place!r}: must be an integer from 0 to {len(members) - 1}"
        )
    if members[place] == rank():
        raise ValueError(
            f"{rank_type.name} = {place!r} is this process itself: it cannot send to itself"
        )
    return members[place]


def _packed(obj: Any) -> torch.Tensor:
    """Return an object as bytes: a tensor of uint8."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    """Return the object of which `_packed` has made these bytes.

    A tensor of another rank's GPU comes to this rank's.

    Raises:
        Exception: The object cannot be unpickled on this rank.
    """

    def place(storage: Any, location: str) -> Any:
        """Return the memory of a tensor on this rank's device, as `torch.load` asks for."""
        if location.startswith("cuda"):
            return storage.cuda(torch.cuda.current_device())
        return storage

    # It is a rank of this job that sent the object, and it may be of any class.
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location=place, weights_only=False)


def _send(data: torch.Tensor, destination: int) -> None:
    """Send the number of bytes, and the bytes, to a global rank."""
    dist.send(torch.tensor([data.numel()]), destination, group=state.groups.objects)
    dist.send(data, destination, group=state.groups.objects)
