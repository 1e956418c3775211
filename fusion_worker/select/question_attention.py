"""Selects tokens by the question's attention over the reused KV (FusionRAG, ProphetKV)."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import ALL_LAYERS, CachedAttention, Selector


@dataclass(frozen=True, slots=True)
class QuestionAttention(Selector[torch.Tensor]):
    """Attention of the question's rows into each token over reused KV, summed over rows and heads.

    Attributes:
        needs: The layers: all, the sum of which orders tokens like the mean (ProphetKV 4.3, eq. 7), the last one
            (FusionRAG 3.2), or others.
    """

    needs: CachedAttention = ALL_LAYERS

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs
