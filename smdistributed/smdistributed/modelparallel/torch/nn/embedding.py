"""An embedding split over tensor ranks by its dimension."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from .collectives import exchange, gather_last
from .module import Arguments, DistributedModule, NotSplitError, same_samples, tensor_group

__all__ = ["DistributedEmbedding"]


class DistributedEmbedding(DistributedModule):
    """``nn.Embedding`` with ``embedding_dim / tensor_parallel_degree`` columns on each tensor rank.

    Each rank has its own samples (the same ones with ``prescaled_batch``) and gets the vectors of
    its own samples; all ranks of a group must call with tensors of one shape.

    Attributes:
        num_embeddings: Rows.
        embedding_dim: Columns of all ranks together.
        padding_idx: Row that gets no gradient.
        scale_grad_by_freq: Whether the gradient of a row is divided by the number of times that the
            row occurs in the group's samples.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        initializer_range: float = 0.02,
    ) -> None:
        """Create the embedding, with normal values of the standard deviation
        ``initializer_range``.

        The values of the full embedding are drawn on each rank, and this rank's columns are kept.

        Raises:
            NotSplitError: ``max_norm`` is set, which needs full rows, or ``sparse``; or the
                tensor-parallel degree does not divide the dimension.
            SMPConfigError: ``smp.init`` was not called.
        """
        super().__init__()
        if max_norm is not None or sparse:
            raise NotSplitError(
                "smp.nn.DistributedEmbedding cannot use max_norm or sparse; use nn.Embedding"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.norm_type, self.scale_grad_by_freq = norm_type, scale_grad_by_freq
        whole = torch.empty(num_embeddings, embedding_dim).normal_(0, initializer_range)
        self.padding_idx = padding_idx
        if padding_idx is not None:
            self.padding_idx = padding_idx % num_embeddings
            whole[self.padding_idx].zero_()
        self.split("weight", whole, 1)

    @classmethod
    def arguments(cls, module: nn.Module) -> Arguments:
        """Return the arguments that make an embedding of the same shape."""
        names = (
            "num_embeddings",
            "embedding_dim",
            "padding_idx",
            "max_norm",
            "scale_grad_by_freq",
            "sparse",
        )
        return (), {name: getattr(module, name) for name in names}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors of this rank's samples. Collective over tensor ranks.

        Raises:
            RuntimeError: The collective broke, because a rank is gone.
            IndexError: An id is out of range.
        """
        group = tensor_group()
        if same_samples():
            return gather_last(self._look_up(ids), group)
        ids_of_all = [
            torch.empty_like(ids, memory_format=torch.contiguous_format)
            for _ in range(group.size())
        ]
        dist.all_gather(ids_of_all, ids.contiguous(), group=group)
        # This rank's columns for all samples, against all columns for this rank's samples.
        columns = self._look_up(torch.stack(ids_of_all))
        own_columns = exchange(columns, group)
        return torch.cat(list(own_columns), -1)

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of the vectors."""
        return functional.embedding(
            ids, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
