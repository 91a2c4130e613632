"""Checkpointing by call, where the guide has scripts import it from.

The signatures are not torch's.
"""

from smdistributed.modelparallel.torch.training.activation_checkpointing import (
    checkpoint,
    checkpoint_sequential,
)

__all__ = ["checkpoint", "checkpoint_sequential"]
