"""Selects tokens by the question's attention (FusionRAG, ProphetKV, CacheClip)."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import ALL_LAYERS, CachedAttention, SecondModel, Selector


@dataclass(frozen=True, slots=True)
class QuestionAttention(Selector[torch.Tensor]):
    """Attention of the question's rows into each token, summed over rows and heads.

    Attributes:
        needs: Layers of the model, over reused KV: all, the sum of which orders tokens like the mean (ProphetKV 4.3,
            eq. 7), the last one (FusionRAG 3.2), or others. Or a small auxiliary model (CacheClip 3.3).
    """

    needs: CachedAttention | SecondModel = ALL_LAYERS

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs
