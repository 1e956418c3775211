"""Selects tokens by the deviation of cached values at layer 1 (CacheBlend)."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import FreshLayer, Selector
from fusionkv.fusion_worker.select.fresh_states import FreshStates


@dataclass(frozen=True, slots=True)
class ValueDeviation(Selector[FreshStates]):
    """Squared L2 distance of a token's fresh value to its cached one, at layer 1 (CacheBlend; FusionRAG 2.2.2)."""

    needs = FreshLayer()

    def scores(self, inputs: FreshStates) -> torch.Tensor:
        """The distance summed over heads and channels."""
        return inputs.placed(inputs.values_away().square().sum((1, 2)))
