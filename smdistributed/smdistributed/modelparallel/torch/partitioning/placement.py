"""Place modules on partitions by hand: `smp.partition`, `smp.set_partition`, and the placement of a
full model.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn as tnn

from smdistributed.modelparallel.torch import nn
from smdistributed.modelparallel.torch.job.communication import allgather
from smdistributed.modelparallel.torch.job.config import SMPConfigError
from smdistributed.modelparallel.torch.job.ranks import local_rank
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.job.wrapped import wrapped
from trainworks_smdistributed import emulation

_open_partitions: list[int] = []
"""The partitions of the open contexts `partition`, the innermost last."""
_module_init = tnn.Module.__init__


def _tagging_init(self: tnn.Module, *args: Any, **kwargs: Any) -> None:
    """Initialize a module, and tag it with the contexts in which it is created.

    Replaces ``torch.nn.Module.__init__``. The tags are attributes of the module.

    The tags are ``_smp_partition`` and ``_smp_tp``. They are set after torch's own initialization.
    """
    _module_init(self, *args, **kwargs)
    if _open_partitions:
        object.__setattr__(self, "_smp_partition", _open_partitions[-1])
    nn.tag(self)


tnn.Module.__init__ = _tagging_init  # type: ignore[method-assign]


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Put modules that are created in this context on partition ``index``.

    The innermost context counts. With ``auto_partition`` the context has no effect.

    The open contexts are of the process, and not of a thread.

    Raises:
        SMPConfigError: There is no such partition, or ``smp.init`` was not called.
    """
    _check_partition(index)
    _open_partitions.append(index)
    try:
        yield
    finally:
        _open_partitions.pop()


def set_partition(module: tnn.Module, index: int) -> None:
    """Put a module and all its submodules on partition ``index``.

    With ``auto_partition`` the call has no effect.

    The modules get the attribute ``_smp_partition``.

    Raises:
        SMPConfigError: There is no such partition, ``smp.init`` was not called, or the model is
            partitioned already.
    """
    _check_partition(index)
    is_partitioned = wrapped.model is not None and wrapped.model.partitioned
    if is_partitioned and state.cfg.pipeline_parallel_degree > 1:
        raise SMPConfigError(
            "smp.set_partition: the model is already partitioned."
            " Call it before the first step function runs"
        )
    for part in module.modules():
        object.__setattr__(part, "_smp_partition", index)


def by_hand(root: tnn.Module, degree: int, default: int) -> dict[str, int]:
    """Return the partition of each module, by name.

    Modules that share a parameter are placed with the first of them, with a warning.

    The modules are not changed. The warning is given by ``warnings.warn``.

    Args:
        root: The model.
        degree: Number of partitions.
        default: The partition of modules that the script has not placed.

    Raises:
        SMPConfigError: A module's partition does not exist.
    """
    owner = {
        name: getattr(module, "_smp_partition", default) for name, module in root.named_modules()
    }
    for name, index in owner.items():
        if index >= degree:  # tagged before another configuration
            raise SMPConfigError(f"module {name!r}: partition {index} is not in 0 to {degree - 1}")
    holders: dict[int, str] = {}
    for name, module in root.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            first = holders.setdefault(id(parameter), name)
            if owner[first] != owner[name]:
                warnings.warn(
                    f"module {name!r} goes to partition {owner[first]}, not {owner[name]}: "
                    f"its parameter {key!r} is shared with module {first!r}",
                    stacklevel=2,
                )
                owner[name] = owner[first]
    return owner


def compare(root: tnn.Module, owner: Mapping[str, int]) -> None:
    """Check that all ranks have the same parameters, on the same partitions. Collective.

    Args:
        root: The model.
        owner: Name of a module -> its partition.

    Raises:
        SMPConfigError: The ranks differ. The text names the first parameter that differs.
        RuntimeError: The collective broke, because a rank is gone.
    """
    parameters: list[str] = []
    for name, module in root.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            full_name = f"{name}.{key}" if name else key
            shape = tuple(parameter.shape)
            parameters.append(
                f"parameter {full_name!r} of shape {shape} on partition {owner.get(name)}"
            )
    # Mostly equal: the lists are only sent if their hashes differ.
    digest = hashlib.sha256(repr(parameters).encode()).hexdigest()
    if len(set(allgather(digest))) == 1:
        return
    first, *others = allgather(parameters)
    missing = "no further parameter"
    for number, other in enumerate(others, 1):
        for one, another in itertools.zip_longest(first, other, fillvalue=missing):
            if one != another:
                raise SMPConfigError(
                    f"the models of the ranks differ: rank 0 has {one}, rank {number} has"
                    f" {another}\nMake the same model on every rank, whatever its rank is."
                )


def _check_partition(index: int) -> None:
    """Refuse a partition that does not exist.

    Raises:
        SMPConfigError: There is no such partition, or ``smp.init`` was not called.
    """
    if not state.initialized:
        raise SMPConfigError("call smp.init() before smp.partition or smp.set_partition")
    degree = state.cfg.pipeline_parallel_degree
    # A bool is an int; scripts are not typed.
    if type(index) is not int or not 0 <= index < degree:
        raise SMPConfigError(
            f"partition must be an integer from 0 to {degree - 1} (pipeline_parallel_degree is"
            f" {degree}), got {index!r}"
        )


def device() -> torch.device | None:
    """Return the GPU of this rank; None on hosts without a GPU."""
    if emulation.cuda_is_available():
        return torch.device("cuda", gpu_of(local_rank(), torch.cuda.device_count()))
    return None


def gpu_of(local_rank: int, visible: int) -> int:
    """Return the number of a rank's own GPU, among the visible ones, from 0.

    Schedulers let each rank see one GPU, or all GPUs of its host.

    Args:
        local_rank: Rank on the host.
        visible: Number of visible GPUs.
    """
    return local_rank % visible
