"""Functions that the ranks of most tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BY_HAND: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
}
"""Two partitions; modules are on the first one, but for those that the test places."""


def train_step(loss_of: Callable[..., Any]) -> Any:
    """Return a step function that trains its first argument, a model, by ``loss_of``."""
    import smdistributed.modelparallel.torch as smp

    @smp.step
    def train(model: Any, *batch: Any) -> Any:
        loss = loss_of(model, *batch)
        model.backward(loss)
        return loss

    return train


def error_of(call: Callable[[], Any]) -> str:
    """Return the error that a call raises, with the name of its class, or "nothing"."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing"


def forget() -> None:
    """Let this process wrap another model."""
    from smdistributed.modelparallel.torch.job.wrapped import wrapped

    wrapped.model = None
    wrapped.optimizers.clear()
