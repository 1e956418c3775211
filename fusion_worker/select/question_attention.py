"""Selects tokens by the question's attention over the reused KV (FusionRAG, ProphetKV)."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import CachedAttention, Selector


@dataclass(frozen=True, slots=True)
class QuestionAttention(Selector[torch.Tensor]):
    """Attention of the question's rows into each token over reused KV, summed over rows and heads.

    Attributes:
        last_only: Whether to use only the last layer (FusionRAG 3.2); otherwise the sum over all layers, which orders
            tokens like the mean (ProphetKV 4.3, eq. 7).
    """

    last_only: bool

    @property
    def needs(self) -> CachedAttention:
        """The last layer or all layers."""
        return CachedAttention((-1,) if self.last_only else None)

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        """The attention, unchanged."""
        return inputs
