"""Chooses the tokens to recompute by their scores."""

from dataclasses import dataclass

import torch


def budget(ratio: float, context_tokens: int, stale_tokens: int) -> int:
    """Number of tokens to recompute: `ratio` of the context, at most the stale ones."""
    return min(round(ratio * context_tokens), stale_tokens)


def top_k(scores: torch.Tensor, stale: torch.Tensor, count: int) -> torch.Tensor:
    """Chooses the stale tokens with the highest scores over all chunks. Ties go to the earlier position.

    scores: float32 [positions]. stale: bool [positions]. Returns int64 [count]: positions, ascending.
    """
    order = torch.where(stale, scores, float("-inf")).sort(descending=True, stable=True).indices
    return order[:count].sort().values


@dataclass(frozen=True, slots=True)
class Window:
    """Of the tokens with the highest scores, keeps those in windows with at least `least` of them (CacheClip 3.3).

    This avoids recomputing only half of an entity. The budget of dropped tokens is not used. Windows start at the
    first stale position.
    """

    size: int = 8
    least: int = 5

    def choose(self, scores: torch.Tensor, stale: torch.Tensor, count: int) -> torch.Tensor:
        """Positions int64 [at most count], ascending; arguments as for `top_k`."""
        chosen = top_k(scores, stale, count)
        window = (chosen - stale.nonzero()[0]) // self.size
        return chosen[window.bincount()[window] >= self.least]
