"""From scores to a set of tokens."""

from dataclasses import dataclass

import torch


def budget(ratio: float, context_tokens: int, stale_tokens: int) -> int:
    """How many tokens to recompute: `ratio` of the context, never more than are stale."""
    return min(round(ratio * context_tokens), stale_tokens)


def top_k(scores: torch.Tensor, stale: torch.Tensor, count: int) -> torch.Tensor:
    """Positions int64 [count], ascending, of the best-scored stale tokens over all chunks together.

    scores: float32 [positions]; stale: bool [positions]. Ties go to the earlier position, so that the same scores
    always give the same set.
    """
    order = torch.where(stale, scores, float("-inf")).sort(descending=True, stable=True).indices
    return order[:count].sort().values


@dataclass(frozen=True, slots=True)
class TopK:
    """The best-scored tokens, as many as the budget holds."""

    def choose(self, scores: torch.Tensor, stale: torch.Tensor, count: int) -> torch.Tensor:
        """As `top_k`."""
        return top_k(scores, stale, count)


@dataclass(frozen=True, slots=True)
class Window:
    """Of the best-scored tokens, those in windows that hold at least `least` of them (CacheClip 3.3).

    So that no entity is updated by half; what is left out stays unspent. Windows are counted from the first stale
    position.
    """

    size: int = 8
    least: int = 5

    def choose(self, scores: torch.Tensor, stale: torch.Tensor, count: int) -> torch.Tensor:
        """Positions int64 [at most count], ascending; arguments as for `top_k`."""
        chosen = top_k(scores, stale, count)
        window = (chosen - stale.nonzero()[0]) // self.size
        return chosen[window.bincount()[window] >= self.least]


Choice = TopK | Window
TOP_K = TopK()
