"""When the gradients of shared parameters are summed: in the last backward pass
before they are used.
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
    """Tells a model whose parameters are shared which backward pass sums the gradients.

    Until then they add up on each rank, unshared, which costs the memory of a whole gradient and
    one message instead of one for each microbatch.

    Attributes:
        seen: A backward pass began since the last step ended.
        compare: Compare what the ranks ran since the last call of this.
        guard: What a forward pass of the model runs in.
    """

    def __init__(self, root: nn.Module, order: BlockOrder) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._root: Any = root
        self._order = order
        self.compare, self.guard = order.end, order.guard
        self._gathered = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._sums = True
        self._waiting = self.seen = False

    def begin(self, *, sums: bool) -> None:
        """Say, before a forward pass, whether its backward pass sums what has added up."""
        self._sums = self._order.sums = sums
        self._root.set_requires_gradient_sync(sums)
        self._root.set_is_last_backward(sums)

    def watch(self, outputs: Any) -> Any:
        """Return the outputs of a forward pass; a backward pass from them is noticed."""
        found = pytrees.tensors_in(outputs)
        check_unsharded(found)
        for output in found:
            if output.requires_grad:
                output.register_hook(self._notice)  # type: ignore[no-untyped-call]
        return outputs

    def _notice(self, _: object) -> None:
        self.seen, self._waiting = True, not self._sums

    def end(self, *, summed: bool) -> None:
        """End a step, or a forward pass that no backward pass follows.

        Args:
            summed: The gradients are to be used now.

        Raises:
            StepError: The last microbatch had no backward pass, and so they were not summed.
        """
        self.compare()
        waiting = summed and self._waiting
        self.seen, self._waiting = False, self._waiting and not summed
        for module in self._gathered:
            # Parameters that a forward pass left gathered are old after the optimizer's step.
            module.reshard()
        if waiting:
            raise StepError(
                "the last microbatch ran no backward pass, and others did:"
                " with sharded data parallelism it sums the gradients of all."
                " Call model.backward for every microbatch"
            )
