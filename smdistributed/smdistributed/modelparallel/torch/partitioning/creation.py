"""How a model is made: ``smp.model_creation``, ``smp.delay_param_initialization``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from smdistributed.modelparallel.torch import nn
from smdistributed.modelparallel.torch.job.config import SMPConfigError
from smdistributed.modelparallel.torch.job.state import state
from smdistributed.modelparallel.torch.nn.delayed import delayed

__all__ = ["delay_param_initialization", "model_creation"]


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Give parameters made in this context memory and values only on the rank
    that owns them, after the partition.

    The values are those of a construction without this context. Until the partition, the parameters
    read as zeros; to write them, stay in the context.
    """
    with delayed(enabled):
        yield


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    **tensor_parallel_config: object,
) -> Iterator[None]:
    """Make a model in this context: of one data type, with tensor parallelism,
    and delayed where configured.

    Within the block torch's default type is ``dtype``, for the whole process.

    Args:
        tensor_parallelism: Whether supported modules are split over tensor ranks.
        dtype: Floating type of the parameters; the default is torch's.
        tensor_parallel_config: See ``smp.tensor_parallelism``.

    Raises:
        SMPConfigError: ``smp.init`` was not called.
        TypeError: torch does not take the type as a default.
    """
    if not state.initialized:
        raise SMPConfigError("call smp.init() before smp.model_creation")
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with (
            nn.tensor_parallelism(tensor_parallelism, **tensor_parallel_config),
            delayed(state.cfg.delayed_parameter_initialization),
        ):
            yield
    finally:
        torch.set_default_dtype(before)
