"""The running statistics of batch normalization: each microbatch updates its own, and a step joins
the updates in order.

In training, batch normalization normalizes by the batch, and moves its running statistics by a
fixed share of the batch's. So microbatches may overlap, if their updates are joined in the order of
the microbatches afterwards. Each microbatch updates tensors that are zero at first. After ``n``
updates such a tensor has a value ``updated``. The same updates turn a statistic ``before`` into
``(1 - share) ** n * before + updated``.

Without a momentum the share depends on the number of batches, which is read. That case is not
treated by this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_Norm = nn.modules.batchnorm._NormBase  # noqa: SLF001  the base of all that have running statistics

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of batch normalization."""

_COUNT = "num_batches_tracked"

_UPDATES = frozenset(
    {nn.modules.batchnorm._BatchNorm.forward.__code__, nn.SyncBatchNorm.forward.__code__}  # noqa: SLF001
)
"""The code of torch that takes the buffers to update them. All other code reads their values.

Instance normalization is not in the set, because it does not count its batches.
"""


def is_update(code: Any, module: nn.Module) -> bool:
    """Return whether code that takes a buffer of a module only updates it.

    A module without a momentum, or in evaluation, does not update by this code. Nothing is changed.

    Args:
        code: The code object that takes the buffer.
        module: The module.
    """
    if code not in _UPDATES or not isinstance(module, _Norm):
        return False
    if not module.training or module.momentum is None:
        return False
    return module._buffers.get(_COUNT) is not None  # noqa: SLF001


@dataclass
class _Updates:
    """The updates of one microbatch to the buffers of a module.

    Attributes:
        share: The momentum: the share of a batch in the new statistic.
        updated: Name of a buffer -> the updated tensor, which was zero before.
    """

    share: float
    updated: dict[str, torch.Tensor]


@dataclass
class RunningStatistics:
    """The updates of a step that are not in the modules' buffers yet."""

    _waiting: dict[nn.Module, dict[int, _Updates]] = field(default_factory=dict)

    def buffer(self, module: nn.Module, name: str, microbatch: int) -> torch.Tensor:
        """Return the tensor that a microbatch updates in place of a buffer.

        The tensor is made at the first call, with zeros. `settle` joins the update to the buffer.

        Args:
            module: A module of batch normalization.
            name: Name of the buffer, one of `BUFFERS`.
            microbatch: Number of the microbatch.

        Raises:
            KeyError: The module has no buffer of that name.
        """
        assert isinstance(module, _Norm)
        by_microbatch = self._waiting.setdefault(module, {})
        updates = by_microbatch.get(microbatch)
        if updates is None:
            assert module.momentum is not None
            zeros = {}
            for key in BUFFERS:
                buffer = module._buffers[key]  # noqa: SLF001
                if buffer is not None:
                    zeros[key] = torch.zeros_like(buffer)
            updates = by_microbatch[microbatch] = _Updates(module.momentum, zeros)
        return updates.updated[name]

    def waits(self, module: nn.Module) -> bool:
        """Return whether updates of a module are not in its buffers yet."""
        return module in self._waiting

    @torch.no_grad()
    def settle(self, module: nn.Module) -> None:
        """Put the updates of a module into its buffers, in the order of the microbatches.

        The buffers are written in place. The updates are dropped with that; without any nothing is
        changed.
        """
        by_microbatch = self._waiting.pop(module, {})
        for number in sorted(by_microbatch):
            updates = by_microbatch[number]
            count = int(updates.updated[_COUNT])
            for name, updated in updates.updated.items():
                buffer = module._buffers[name]  # noqa: SLF001
                assert buffer is not None
                # As the microbatch would have done in place: see the module's docstring.
                if name != _COUNT:
                    buffer.mul_((1 - updates.share) ** count)
                buffer.add_(updated)

    def settle_all(self) -> None:
        """Put the updates of all modules into their buffers."""
        for module in list(self._waiting):
            self.settle(module)
