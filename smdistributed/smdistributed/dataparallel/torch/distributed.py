"""The interface before version 1.4: torch.distributed on the backend ``smddp``."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    get_rank,
    get_world_size,
    group,
    is_initialized,
    reduce,
)

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  registers the backend
from smdistributed.dataparallel.torch.backend import NAME
from trainworks_smdistributed import legacy
from trainworks_smdistributed.environment import OPEN_MPI, ranks_of

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
    "reduce",
]

legacy.install()


def is_available() -> bool:
    """Return whether this process was started as a rank of a job."""
    return any(os.environ.get(name) for name in ("WORLD_SIZE", OPEN_MPI["WORLD_SIZE"]))


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Create the default process group on the backend ``smddp``. A second call does nothing.

    Args:
        args: Arguments of torch's function. The first one, the backend, is dropped.
        kwargs: Keyword arguments of torch's function. ``backend`` is dropped.

    Raises:
        RuntimeError: The ranks cannot connect (torch's own error).
        ValueError: torch refuses an argument.
    """
    if not dist.is_initialized():
        kwargs.pop("backend", None)
        dist.init_process_group(NAME, *args[1:], **kwargs)


def get_local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return ranks_of(os.environ).local_rank


def all_to_all_single(
    output_t: torch.Tensor,
    input_t: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Send a part of the input to each rank, and receive the parts of the output, as torch's
    function does.
    """
    return dist.all_to_all_single(
        output_t, input_t, output_split_sizes, input_split_sizes, group, async_op
    )
