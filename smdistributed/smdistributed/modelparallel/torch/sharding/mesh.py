"""The mesh of ranks that share parameters, and conversions of shared tensors.

PyTorch's fully_shard shares the parameters. A shared parameter is a DTensor: each rank of a shard
group has some of its rows. With more replicas than ``sharded_data_parallel_degree`` there are
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
"""Key of a partial state. The value is (number of the part, number of parts), such as (1, 4)."""


class _MeshOfJob(NamedTuple):
    """The mesh of the job.

    Attributes:
        mesh: The mesh, with the dimensions replicate (where there are replicas) and shard.
        kind: The class of shared tensors, DTensor.
    """

    mesh: Any
    kind: Any


_mesh_of_job: _MeshOfJob | None = None


def degree() -> int:
    """Return the number of ranks that share parameters; 1: nothing is shared.

    Shared is FSDP's sharded: each rank has some rows of each parameter.
    """
    if not state.initialized:
        return 1
    return state.cfg.sharded_data_parallel_degree


def part() -> int:
    """Return the number of this rank's part of each parameter, from 0."""
    if degree() == 1:
        return 0
    return dp_rank() % degree()


def check_torch() -> None:
    """Check that this PyTorch can share parameters.

    Raises:
        SMPConfigError: PyTorch has no ``torch.distributed.fsdp.fully_shard``.
    """
    import torch.distributed.fsdp as fsdp

    if not hasattr(fsdp, "fully_shard"):
        least = NEEDS_TORCH["sharded_data_parallel_degree"]
        raise SMPConfigError(
            f"sharded_data_parallel_degree = {degree()}: needs PyTorch {least} or later, this is"
            f" {torch.__version__}; shard_optimizer_state saves memory with every version"
        )


def mesh() -> Any:
    """Return the mesh of all ranks, with the dimensions replicate (where there are replicas) and
    shard. Collective at the first call.

    With a GPU the first call makes this rank's GPU the current device of the process. The mesh is
    kept.

    Raises:
        RuntimeError: A rank is gone (torch's own error).
    """
    global _mesh_of_job
    if _mesh_of_job is None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        gpu = placement.device()
        if gpu is not None:
            torch.cuda.set_device(gpu)  # fully_shard uses the present one
        replicas = dp_size() // degree()
        shape: tuple[int, ...] = (degree(),)
        names: tuple[str, ...] = ("shard",)
        if replicas > 1:
            shape, names = (replicas, degree()), ("replicate", "shard")
        device_type = "cpu" if gpu is None else "cuda"
        device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        _mesh_of_job = _MeshOfJob(device_mesh, DTensor)
    return _mesh_of_job.mesh


def group() -> dist.ProcessGroup | None:
    """Return the process group of the ranks with the other parts; None: nothing is shared."""
    if _mesh_of_job is None or degree() == 1:
        return None
    return cast("dist.ProcessGroup", _mesh_of_job.mesh.get_group("shard"))


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is shared."""
    return _mesh_of_job is not None and isinstance(tensor, _mesh_of_job.kind)


def local(value: Any) -> Any:
    """Return this rank's part of a shared tensor, in the same memory; any other value unchanged."""
    if not is_sharded(value):
        return value
    return value.to_local()


def gather(value: Any) -> Any:
    """Return a shared tensor as a full one, in host memory; any other value unchanged.

    Collective over the shard group.

    Raises:
        RuntimeError: The collective broke, because a rank is gone.
    """
    if not is_sharded(value):
        return value
    return value.full_tensor().cpu()


def shard_like(parameter: torch.Tensor, value: Any, name: str) -> Any:
    """Share a tensor in the same way as a parameter.

    The parameter is not changed. The shared tensor may use the memory of the value.

    Args:
        parameter: The parameter.
        value: A full tensor with the parameter's shape, or this rank's part of such a tensor.
        name: Name of the value, for the error.

    Returns:
        The shared tensor. The value itself, if the parameter is not shared, or if the value is a
        number, is shared already, or is no tensor.

    Raises:
        SMPRuntimeError: The value has another shape.
    """
    if not is_sharded(parameter) or is_sharded(value):
        return value
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    assert _mesh_of_job is not None
    own_part = local(parameter)
    # If one rank has all the rows, its part is the full tensor.
    if value.shape == parameter.shape:
        rows = -(-parameter.shape[0] // degree())
        value = value[rows * part() : rows * (part() + 1)]
    if value.shape != own_part.shape:
        raise SMPRuntimeError(
            f"{name}: a value of shape {tuple(value.shape)} belongs neither to a parameter of shape"
            f" {tuple(parameter.shape)} nor to this rank's part of shape {tuple(own_part.shape)}"
        )
    placed = cast("Any", parameter)
    return _mesh_of_job.kind.from_local(
        value.to(own_part.device).contiguous(),
        placed.device_mesh,
        placed.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def mark() -> dict[str, Any]:
    """Return the entry of a partial state with the number of the part: ``{PART: (1, 4)}``.

    Empty if nothing is shared.
    """
    if degree() == 1:
        return {}
    return {PART: (part(), degree())}


def check_part(saved: Any) -> None:
    """Check that a partial state is this rank's part.

    Args:
        saved: A state with the entry of `mark`. Without the entry it is the only part.

    Raises:
        SMPRuntimeError: The state is another part, or of another degree.
    """
    saved_part, saved_degree = saved.get(PART, (0, 1))
    if (saved_part, saved_degree) != (part(), degree()):
        raise SMPRuntimeError(
            f"the partial state is part {saved_part} of {saved_degree}, and rank {rank()} has part"
            f" {part()} of {degree()}: sharded_data_parallel_degree must be as it was saved."
            " A full state goes to any degree"
        )
