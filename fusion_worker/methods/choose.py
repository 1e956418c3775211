"""From scores to a set of tokens."""

from collections.abc import Sequence
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


def in_turn(lists: Sequence[tuple[torch.Tensor, float]], stale: torch.Tensor) -> torch.Tensor:
    """Joins rankings: scores float32 [positions] by which the best of each list are taken in turn.

    lists: scores, and how many are taken for each one of a list of weight 1; what scores 0 is not in a list.
    stale: bool [positions], those that may be taken.
    """
    best = torch.full(stale.shape, float("inf"))
    for number, (scores, weight) in enumerate(lists):
        order = torch.where(stale, scores, float("-inf")).sort(descending=True, stable=True).indices
        rank = torch.empty(len(order)).scatter_(0, order, torch.arange(len(order), dtype=torch.float32))
        # A thousandth: at the same turn the earlier list comes first.
        turn = torch.where(scores > 0, rank / weight + 1e-3 * number, float("inf"))
        best = torch.minimum(best, turn)
    return -best.clamp(max=2.0 * len(best))


def spread(scores: torch.Tensor, chunk: torch.Tensor, reach: int, fade: float, both: bool = True) -> torch.Tensor:
    """float32 [positions]: for each token the best score within `reach` in its chunk, times `fade` for each step.

    scores: float32 [positions], not below 0; chunk: int64, the number of each token's chunk, or sentence. both:
    whether the tokens before one get its score as well as those behind it.
    """
    best = scores.clone()
    for distance in range(1, reach + 1):
        same = chunk[distance:] == chunk[:-distance]
        ways = ((slice(distance, None), slice(-distance)), (slice(-distance), slice(distance, None)))
        for to, of in ways[: 1 + both]:
            best[to] = torch.maximum(best[to], torch.where(same, scores[of] * fade**distance, 0.0))
    return best


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
