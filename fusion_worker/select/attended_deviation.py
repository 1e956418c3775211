"""Selects tokens by the deviation of cached values at layer 1, times the attention into them (KVShare)."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import FreshLayer, Selector
from fusionkv.fusion_worker.select.fresh_states import FreshStates


@dataclass(frozen=True, slots=True)
class AttendedDeviation(Selector[FreshStates]):
    """L1 distance of fresh to cached values, times all attention into the token, at layer 1.

    Sources: KVShare; ProphetKV app. C.
    """

    needs = FreshLayer()

    def scores(self, inputs: FreshStates) -> torch.Tensor:
        """Distance summed over heads and channels, times attention summed over all rows and heads."""
        return inputs.placed(inputs.values_away().abs().sum((1, 2))) * inputs.attention()
