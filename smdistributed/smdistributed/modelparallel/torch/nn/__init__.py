"""Tensor parallelism: modules that are split over tensor ranks, and the replacement of a model's
own modules by these.
"""

from . import huggingface
from .embedding import DistributedEmbedding
from .flash_attention import FlashAttentionLayer
from .layer_norm import DistributedLayerNorm, FusedLayerNorm
from .linear import DistributedLinear
from .module import DistributedModule, mark
from .replacement import (
    distribute,
    set_tensor_parallelism,
    tag,
    tensor_parallelism,
    tp_register,
    tp_register_with_module,
)
from .transformer import (
    DistributedAttentionLayer,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
)

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "distribute",
    "huggingface",
    "mark",
    "set_tensor_parallelism",
    "tag",
    "tensor_parallelism",
    "tp_register",
    "tp_register_with_module",
]
