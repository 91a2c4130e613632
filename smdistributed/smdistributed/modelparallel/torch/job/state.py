"""What `smp.init` found out about the job of this process, once and for all."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Config
    from .groups import Groups
    from .topology import Topology

__all__ = ["State", "state"]


class State:
    """What the parts of the library, and some public scripts, look up.

    Attributes:
        cfg: The configuration. Like ``topo`` and ``groups`` it is None before
            ``smp.init``; ask ``initialized``.
        topo: Which rank is where.
        groups: The process groups of this rank.
        module_manager: Of scripts, for ``smp.save_checkpoint``: ``translate_functions`` are to and
            from Hugging Face's names.
    """

    cfg: Config
    topo: Topology
    groups: Groups
    module_manager: types.SimpleNamespace

    def __init__(self) -> None:
        # Typed as if always there: a use before `smp.init` is a mistake, which `initialized` tells.
        self.cfg = self.topo = self.groups = None  # type: ignore[assignment]
        self.module_manager = types.SimpleNamespace(translate_functions=[])

    @property
    def initialized(self) -> bool:
        """Whether ``smp.init`` has been called."""
        return vars(self)["cfg"] is not None


state = State()
