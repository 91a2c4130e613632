"""Attention by torch's fused kernels, under the name that scripts use."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

__all__ = ["FlashAttentionLayer"]


class FlashAttentionLayer(nn.Module):
    """Scaled dot-product attention of packed queries, keys and values.

    Torch picks the kernel; ``triton_flash_attention`` is accepted and does nothing. Every device
    and floating type works, a mask needs no ALiBi, and dropout is the same with each.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,  # noqa: ARG002
        use_alibi: bool = False,  # noqa: ARG002
    ) -> None:
        """Compute the factor of the scores.

        Args:
            attention_dropout_prob: Of the attention probabilities, in training.
            attention_head_size: Channels of a head.
            scale_attention_scores: Divide the scores by the square root of ``attention_head_size``.
            scale_attn_by_layer_idx: Divide the scores by ``layer_idx + 1``.
            layer_idx: Number of the layer, from 0.
            scale: The factor itself, instead of these.
            triton_flash_attention: Accepted; torch picks the kernel.
            use_alibi: Accepted; a mask is always added to the scores.

        Raises:
            ValueError: A size that the factor needs is missing.
        """
        super().__init__()
        if scale is None:
            scale = 1.0
            if scale_attention_scores:
                if attention_head_size is None:
                    raise ValueError(
                        "FlashAttentionLayer: scale_attention_scores needs attention_head_size"
                    )
                scale /= math.sqrt(attention_head_size)
            if scale_attn_by_layer_idx:
                if layer_idx is None:
                    raise ValueError("FlashAttentionLayer: scale_attn_by_layer_idx needs layer_idx")
                scale /= layer_idx + 1
        self.attention_dropout_prob, self.scale = attention_dropout_prob, scale

    def forward(
        self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False
    ) -> torch.Tensor:
        """Return the attention's output, (batch, heads, sequence, channels).

        In training, dropout draws random numbers. The arguments are not changed.

        Args:
            qkv: (batch, sequence, 3, heads, channels).
            attn_mask: Added to the scores; of a shape that expands to (batch,
                heads, sequence, sequence).
            causal: No position sees a later one.

        Raises:
            RuntimeError: Shapes do not fit (torch's own error).
        """
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        is_causal = causal
        if attn_mask is not None:
            attn_mask = attn_mask.to(qkv.dtype)
            if causal:
                # torch takes a mask or is_causal, and not both.
                is_causal = False
                length = qkv.shape[1]
                later = torch.ones(length, length, dtype=torch.bool, device=qkv.device).triu(1)
                attn_mask = attn_mask.masked_fill(later, float("-inf"))
        dropout = self.attention_dropout_prob if self.training else 0.0
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, is_causal=is_causal, scale=self.scale
        )
