"""Selects the context tokens that are kept for decoding after the first token (SnapKV)."""

from dataclasses import dataclass

import torch

# Votes are averaged over neighbouring tokens, so that a fact is kept with the words around it (SnapKV 4.1).
_POOL = 5


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Keeps the `tokens` context tokens that the question attends to most, by layer and head (A3)."""

    tokens: int

    def choose(self, votes: torch.Tensor) -> torch.Tensor:
        """Chooses the context tokens to keep.

        Args:
            votes: float32 [layers, kv_heads, context tokens], attention of the question's rows, summed.

        Returns:
            int64 [layers, kv_heads, tokens]: indices of context tokens, ascending.
        """
        smooth = torch.nn.functional.avg_pool1d(votes, _POOL, stride=1, padding=_POOL // 2)
        return smooth.topk(self.tokens, -1).indices.sort(-1).values
