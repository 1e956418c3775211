"""Selects tokens by the question's attention in a small auxiliary model (CacheClip)."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import SecondModel, Selector


@dataclass(frozen=True, slots=True)
class AuxiliaryAttention(Selector[torch.Tensor]):
    """Last-layer attention of the question into each token in a small auxiliary model (CacheClip 3.3)."""

    needs = SecondModel()

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs
