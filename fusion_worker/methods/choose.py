"""From scores to a set of tokens."""

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
