"""The wrapper before version 1.4: torch's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import parallel

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DistributedDataParallel, with the argument order of the original."""

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: int | None = None,
        **others: Any,
    ) -> None:
        """Wrap a module.

        Args:
            module: The module, the same on all ranks.
            device_ids: The device that the module is on; None: wherever its parameters are.
            output_device: Where the output goes.
            broadcast_buffers: Whether rank 0's buffers are sent to all before each forward pass.
            process_group: The ranks to reduce over; None: all.
            bucket_cap_mb: Size of a bucket of gradients in MiB; None: torch's own.
            others: More arguments of torch's.
        """
        if not broadcast_buffers:
            # True is torch's own way, and newer versions warn of who asks for it.
            others["broadcast_buffers"] = False
        super().__init__(
            module,
            device_ids=device_ids,
            output_device=output_device,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            **others,
        )
