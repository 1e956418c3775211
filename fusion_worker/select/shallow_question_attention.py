"""Selects tokens by the question's attention at layer 1, where all states are fresh (A3)."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import FreshLayer, Selector
from fusionkv.fusion_worker.select.fresh_states import FreshStates


@dataclass(frozen=True, slots=True)
class ShallowQuestionAttention(Selector[FreshStates]):
    """Attention of the question's rows into each token, from fresh states at layer 1 (A3, eq. 3)."""

    needs = FreshLayer()

    def scores(self, inputs: FreshStates) -> torch.Tensor:
        """The attention summed over the question's rows and heads."""
        return inputs.attention(first_row=inputs.stale)
