"""Selects by the question's attention over the reused KV (FusionRAG, ProphetKV)."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import CachedAttention, Selector


@dataclass(frozen=True, slots=True)
class QuestionAttention(Selector[torch.Tensor]):
    """Attention of the question's rows into each token over the stale cache, summed over rows and heads.

    Attributes:
        last_only: The last layer's alone (FusionRAG 3.2); otherwise all layers summed, which orders tokens as their
            mean does (ProphetKV 4.3, eq. 7).
    """

    last_only: bool

    @property
    def needs(self) -> CachedAttention:
        """The last layer or all."""
        return CachedAttention((-1,) if self.last_only else None)

    def scores(self, seen: torch.Tensor) -> torch.Tensor:
        """The attention as it is."""
        return seen
