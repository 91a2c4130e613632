"""Which ranks share a parameter, and the parameters that are shared.

It is PyTorch's fully_shard that shares them: a shared parameter is a DTensor, of which each rank of
a shard group has some rows. With more replicas than ``sharded_data_parallel_degree`` there are
several shard groups of consecutive ranks, with equal parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from smdistributed.modelparallel.torch.exceptions import SMPConfigError, SMPRuntimeError
from smdistributed.modelparallel.torch.job.config import NEEDS_TORCH
from smdistributed.modelparallel.torch.job.ranks import dp_rank, dp_size, rank
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.partitioning import placement

PART = "_smp_shard"
"""The entry of a partial state that says whose it is: the part and the number of parts."""


class _Made(NamedTuple):
    """What is made once in a process: the mesh (replicas, parts), and the class
    of what is shared over it.
    """

    mesh: Any
    kind: Any


_made: _Made | None = None


def degree() -> int:
    """Return the number of ranks that share parameters; 1: nothing is shared."""
    return state.cfg.sharded_data_parallel_degree if state.initialized else 1


def part() -> int:
    """Return which part of each parameter this rank has."""
    return dp_rank() % degree() if degree() > 1 else 0


def check_torch() -> None:
    """See whether this PyTorch can share parameters.

    Raises:
        SMPConfigError: It has no ``torch.distributed.fsdp.fully_shard``.
    """
    import torch.distributed.fsdp as fsdp

    if not hasattr(fsdp, "fully_shard"):
        least = NEEDS_TORCH["sharded_data_parallel_degree"]
        raise SMPConfigError(
            f"sharded_data_parallel_degree = {degree()}: needs PyTorch {least} or later, this is"
            f" {torch.__version__}; shard_optimizer_state saves memory with every version"
        )


def mesh() -> Any:
    """Return the mesh of all ranks, with the dimensions replicate (where there
    are replicas) and shard. Collective.
    """
    global _made
    if _made is None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        gpu = placement.device()
        if gpu is not None:
            torch.cuda.set_device(gpu)  # fully_shard uses the present one
        replicas, names = dp_size() // degree(), ("replicate", "shard")
        shape = (replicas, degree()) if replicas > 1 else (degree(),)
        made = init_device_mesh(
            "cpu" if gpu is None else "cuda", shape, mesh_dim_names=names[-len(shape) :]
        )
        _made = _Made(made, DTensor)
    return _made.mesh


def group() -> dist.ProcessGroup | None:
    """Return the ranks that have the other parts; None: nothing is shared."""
    return (
        None
        if _made is None or degree() == 1
        else cast("dist.ProcessGroup", _made.mesh.get_group("shard"))
    )


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is shared."""
    return _made is not None and isinstance(tensor, _made.kind)


def local(value: Any) -> Any:
    """Return this rank's part of a shared tensor, in the same memory; anything else as it is."""
    return value.to_local() if is_sharded(value) else value


def gather(value: Any) -> Any:
    """Return all of a shared tensor, in the host's memory; anything else as it is.

    Collective over the shard group.
    """
    return value.full_tensor().cpu() if is_sharded(value) else value


def shard_like(parameter: torch.Tensor, value: Any, name: str) -> Any:
    """Return a value that belongs to a shared parameter, shared in the same way.

    Anything else as it is.

    Args:
        parameter: The parameter.
        value: The whole, or this rank's part.
        name: Its name, for the error.

    Raises:
        SMPRuntimeError: It is neither.
    """
    if (
        not is_sharded(parameter)
        or not isinstance(value, torch.Tensor)
        or value.dim() == 0
        or is_sharded(value)
    ):
        return value
    assert _made is not None
    mine = local(parameter)
    if value.shape == parameter.shape:  # where one rank has all the rows, the whole is its part
        rows = -(-parameter.shape[0] // degree())
        value = value[rows * part() : rows * (part() + 1)]
    if value.shape != mine.shape:
        raise SMPRuntimeError(
            f"{name}: a value of shape {tuple(value.shape)} belongs neither to a parameter of shape"
            f" {tuple(parameter.shape)} nor to this rank's part of shape {tuple(mine.shape)}"
        )
    placed = cast("Any", parameter)
    return _made.kind.from_local(
        value.to(mine.device).contiguous(),
        placed.device_mesh,
        placed.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def mark() -> dict[str, Any]:
    """Return the entry of a partial state that says which part it is of."""
    return {PART: (part(), degree())} if degree() > 1 else {}


def check_part(saved: Any) -> None:
    """See whether a partial state is this rank's part.

    Raises:
        SMPRuntimeError: It is another one, or of another degree.
    """
    was, now = saved.get(PART, (0, 1)), (part(), degree())
    if tuple(was) != now:
        raise SMPRuntimeError(
            f"the partial state is part {was[0]} of {was[1]}, and rank {rank()} has part"
            f" {now[0]} of {now[1]}: sharded_data_parallel_degree must be as it was saved."
            " A full state goes to any degree"
        )
