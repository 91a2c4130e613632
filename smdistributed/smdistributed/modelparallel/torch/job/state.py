"""The one state of a process: what ``smp.init`` made, the model and its optimizers."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel
    from smdistributed.modelparallel.torch.pipeline.runtime import Runtime
    from smdistributed.modelparallel.torch.training.optimizer import DistributedOptimizer

    from .config import Config
    from .groups import Groups
    from .topology import Topology

__all__ = ["State", "state"]


class State:
    """What the parts of the library, and some public scripts, look up.

    Attributes:
        cfg: The configuration. Like ``topo`` and ``groups`` it is None before ``smp.init``; ask ``initialized``.
        topo: Which rank is where.
        groups: The process groups of this rank.
        runtime: The pipeline; None with one partition.
        model: The only model, once it is wrapped.
        optimizers: The wrapped optimizers, in the order of their making.
        tracing: Whether the model runs only to be measured.
        loss_scale: What ``model.backward`` multiplies gradients by. The optimizer sets it under ``fp16``.
        module_manager: What scripts look up: ``translate_functions``, which are to and from Hugging Face's names.
    """

    cfg: Config
    topo: Topology
    groups: Groups
    runtime: Runtime | None
    model: DistributedModel | None
    optimizers: list[DistributedOptimizer]
    tracing: bool
    loss_scale: float
    module_manager: types.SimpleNamespace

    def __init__(self) -> None:
        """Make the state of a process that has not called ``smp.init``."""
        # Typed as if always there: a use before `smp.init` is a mistake, which `initialized` tells.
        self.cfg = self.topo = self.groups = None  # type: ignore[assignment]
        self.runtime = self.model = None
        self.optimizers = []
        self.tracing = False
        self.loss_scale = 1.0
        self.module_manager = types.SimpleNamespace(translate_functions=[])

    @property
    def initialized(self) -> bool:
        """Whether ``smp.init`` has been called."""
        return vars(self)["cfg"] is not None


state = State()
