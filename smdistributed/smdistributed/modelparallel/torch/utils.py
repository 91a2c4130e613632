"""Small functions that public scripts import from this module."""

from __future__ import annotations

import torch

from .job.ranks import rank

__all__ = ["get_distribution_axis", "rmsg"]


def rmsg(text: object) -> str:
    """Return a text with the rank in front."""
    return f"[{rank()}] {text}"


def get_distribution_axis(tensor: torch.Tensor) -> int | None:
    """Return the axis on which a parameter or buffer is split over tensor ranks.

    None if it is whole.
    """
    return getattr(tensor, "_smp_axis", None)
