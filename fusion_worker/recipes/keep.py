"""What of the context stays for decoding once the first token is there."""

from dataclasses import dataclass

import torch

# Neighbours share their votes, so that a fact is kept with the words around it (SnapKV 4.1).
_POOL = 5


@dataclass(frozen=True, slots=True)
class SnapKV:
    """The `tokens` context tokens that the question attended to most, by layer and head; S and Q whole (A3)."""

    tokens: int

    def choose(self, votes: torch.Tensor) -> torch.Tensor:
        """int64 [layers, kv_heads, tokens], ascending: which context tokens to keep.

        votes: float32 [layers, kv_heads, context tokens], attention of the question's rows, summed.
        """
        smooth = torch.nn.functional.avg_pool1d(votes, _POOL, stride=1, padding=_POOL // 2)
        return smooth.topk(self.tokens, -1).indices.sort(-1).values
