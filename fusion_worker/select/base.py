"""Scores of stale tokens by a recipe's selector, the simplest of which are here; the choice of tokens by score."""

import itertools
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import torch

from fusionkv.protos.contract.selectors import DistanceToStart, QuestionAttention, Selector, Window


@singledispatch
def scores(selector: Selector, inputs: Any) -> torch.Tensor:
    """float32, at least [question_start]: higher is more worth recomputing, and only the order counts.

    Scores of tokens that are not stale are ignored. inputs: what the class of the selector's `needs` describes.
    """
    raise NotImplementedError(f"{selector} has no function that scores")


@scores.register
def question_attention(selector: QuestionAttention, inputs: torch.Tensor) -> torch.Tensor:
    return inputs


@scores.register
def distance_to_start(selector: DistanceToStart, inputs: Sequence[int]) -> torch.Tensor:
    """The negated distance of a token to its chunk's start, in tokens; -inf outside chunks."""
    distances = torch.full((inputs[-1],), float("-inf"))
    for start, stop in itertools.pairwise(inputs):
        distances[start:stop] = -torch.arange(stop - start, dtype=torch.float32)
    return distances


def budget(ratio: float, context_tokens: int, stale_tokens: int) -> int:
    """Number of tokens to recompute: `ratio` of the context, at most the stale ones."""
    return min(round(ratio * context_tokens), stale_tokens)


def choose(window: Window | None, scores: torch.Tensor, stale: torch.Tensor, count: int) -> torch.Tensor:
    """Chooses the stale tokens with the highest scores over all chunks. Ties go to the earlier position.

    Args:
        window: leaves out those that are too far apart; None leaves out none.
        scores: float32 [positions].
        stale: bool [positions].

    Returns:
        int64 [count], with a window at most so many: positions, ascending.
    """
    order = torch.where(stale, scores, float("-inf")).sort(descending=True, stable=True).indices
    chosen = order[:count].sort().values
    if window is None:
        return chosen
    at = (chosen - stale.nonzero()[0]) // window.size
    return chosen[at.bincount()[at] >= window.least]
