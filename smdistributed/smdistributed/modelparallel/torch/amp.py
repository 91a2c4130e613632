"""`smp.amp.GradScaler`: torch's, which finds infinite gradients on all partitions of a model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trainworks_smdistributed import emulation

from .job.ranks import mp_size
from .job.state import state
from .job.topology import CommGroup


class GradScaler(torch.amp.GradScaler):
    """Scale the loss for automatic mixed precision, as ``torch.amp.GradScaler`` does.

    All ranks of a model skip the same steps and have the same scale.

    Args:
        init_scale: First factor.
        growth_factor: Factor of growth after ``growth_interval`` good steps.
        backoff_factor: Factor after a step with infinite gradients.
        growth_interval: Number of good steps before growth.
        enabled: False makes every method a plain pass-through. The default is
            True with CUDA and False on CPUs.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool | None = None,
    ) -> None:
        cuda = emulation.cuda_is_available()
        super().__init__(
            "cuda" if cuda else "cpu",
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            cuda if enabled is None else enabled,
        )

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Divide the gradients by the scale, and find infinite ones on any rank of the model.

        Collective over the model-parallel group. torch calls this method.

        The gradients are written in place.

        Args:
            optimizer: The optimizer with the gradients.
            inv_scale: 1 / scale.
            found_inf: A zero: the form of the results.
            allow_fp16: Whether gradients of float16 are allowed.

        Returns:
            Device -> 1.0 if a gradient of any rank is infinite or NaN, else 0.0.

        Raises:
            ValueError: A gradient is of float16, and that is not allowed (torch's own error).
            RuntimeError: The collective broke, because a rank is gone.
        """
        found_by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # A rank without parameters takes part, too.
        found_anywhere = found_inf.clone()
        for value in found_by_device.values():
            found_anywhere = torch.maximum(found_anywhere, value.to(found_anywhere.device))
        if state.initialized and mp_size() > 1:
            group = state.groups[CommGroup.MP_GROUP]
            dist.all_reduce(found_anywhere, op=dist.ReduceOp.MAX, group=group)
        devices = {*found_by_device, found_anywhere.device}
        return {device: found_anywhere.to(device) for device in devices}
