"""What the script has wrapped: one model, and its optimizers.

A step function, an optimizer and torch's `clip_grad_norm_` are not told which model they are for,
and there is one in a process. None of those who ask imports its class.
"""

from __future__ import annotations

from typing import Any

__all__ = ["wrapped"]


class Wrapped:
    """What is wrapped.

    Attributes:
        model: The only `smp.DistributedModel`; None before it is made.
        optimizers: In the order of their making.
    """

    model: Any = None

    def __init__(self) -> None:
        self.optimizers: list[Any] = []


wrapped = Wrapped()
