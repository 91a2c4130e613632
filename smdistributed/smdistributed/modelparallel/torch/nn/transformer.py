"""The names of smp's own transformer modules.

They can be imported and registered; making one raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

from smdistributed.modelparallel.torch.exceptions import SMPUnsupportedError

from .module import DistributedModule

__all__ = [
    "DistributedAttentionLayer",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
]

INSTEAD = (
    "use the model's own layers: tensor parallelism splits their nn.Linear, nn.Embedding and"
    " nn.LayerNorm. In AWS's GPT scripts that is --use_distributed_transformer 0"
)


class _NotThere(DistributedModule):
    """A transformer module that this library does not have."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise.

        Raises:
            SMPUnsupportedError: Always.
        """
        raise SMPUnsupportedError(
            f"smp.nn.{type(self).__name__} is not part of this library: {INSTEAD}"
        )


def _not_there(name: str) -> type[DistributedModule]:
    return type(name, (_NotThere,), {"__module__": __name__})


DistributedTransformer = _not_there("DistributedTransformer")
DistributedTransformerLayer = _not_there("DistributedTransformerLayer")
DistributedTransformerLMHead = _not_there("DistributedTransformerLMHead")
DistributedAttentionLayer = _not_there("DistributedAttentionLayer")
DistributedTransformerOutputLayer = _not_there("DistributedTransformerOutputLayer")
