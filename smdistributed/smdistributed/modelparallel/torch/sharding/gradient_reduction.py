"""Sum the gradients of shared parameters once, in the last backward pass before the optimizer
uses them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.exceptions import StepError
from smdistributed.modelparallel.torch.transport import pytrees

from .misuse import check_unsharded
from .order import BlockOrder

__all__ = ["GradientReduction"]


class GradientReduction:
    """Tells fully_shard which backward pass sums the gradients.

    In the passes before, gradients add up on each rank, unshared. That costs the memory of a full
    gradient, and saves one message for each microbatch but the last.

    Attributes:
        had_backward: Whether a backward pass began since the last step ended.
        compare: Compares the blocks that the ranks ran since its last call.
        guard: Returns the context in which a forward pass of the model runs.
    """

    def __init__(self, root: nn.Module, order: BlockOrder) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._root: Any = root
        self._order = order
        self.compare, self.guard = order.end, order.guard
        self._blocks = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._sums = True
        self._has_unsummed = self.had_backward = False

    def begin(self, *, sums: bool) -> None:
        """Begin a forward pass.

        FSDP sums gradients in the next backward pass, or lets them add up on this rank, as told.

        Args:
            sums: Whether its backward pass sums the gradients that have added up.
        """
        self._sums = self._order.sums = sums
        self._root.set_requires_gradient_sync(sums)
        self._root.set_is_last_backward(sums)

    def watch(self, outputs: Any) -> Any:
        """Register hooks on the outputs of a forward pass, which notice its backward pass.

        Returns the outputs.

        Raises:
            StepError: An output is computed from shared parameters.
        """
        tensors = pytrees.tensors_in(outputs)
        check_unsharded(tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self._record_backward)  # type: ignore[no-untyped-call]
        return outputs

    def _record_backward(self, _: object) -> None:
        """Note that a backward pass has begun. The argument is a gradient."""
        self.had_backward = True
        self._has_unsummed = not self._sums

    def end(self, *, summed: bool) -> None:
        """End a step, or a forward pass without a backward pass.

        Collective over the job: the ranks compare the blocks that they ran. Gathered parameters are
        freed.

        Args:
            summed: Whether the optimizer uses the gradients now.

        Raises:
            StepError: The last microbatch had no backward pass, so the gradients are not summed; or
                ranks ran different blocks.
            RuntimeError: The collective broke, because a rank is gone.
        """
        self.compare()
        is_missing = summed and self._has_unsummed
        self.had_backward = False
        self._has_unsummed = self._has_unsummed and not summed
        for block in self._blocks:
            # Parameters that a forward pass left gathered are stale after the optimizer's step.
            block.reshard()
        if is_missing:
            raise StepError(
                "the last microbatch ran no backward pass, and others did:"
                " with sharded data parallelism it sums the gradients of all."
                " Call model.backward for every microbatch"
            )
