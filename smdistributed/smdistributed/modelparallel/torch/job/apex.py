"""Mixed precision by NVIDIA's apex, which smp does not work with."""

from __future__ import annotations

import sys

from smdistributed.modelparallel.torch.job.config import SMPConfigError
from trainworks_smdistributed.legacy import APEX_AMP

__all__ = ["refuse_amp_of_apex"]


def refuse_amp_of_apex(call: str) -> None:
    """Refuse a process in which ``apex.amp.initialize`` has changed a model and an optimizer.

    Args:
        call: What the script has called, for the message.

    Raises:
        SMPConfigError: It has.
    """
    module = sys.modules.get("apex.amp._amp_state")
    if module is None:
        return
    # Apex's own mark, which it sets in `initialize`; it has no public one.
    if hasattr(module._amp_state, "opt_properties"):  # noqa: SLF001
        raise SMPConfigError(
            f"apex.amp is on, and {call} cannot divide what it has changed. {APEX_AMP}"
        )
