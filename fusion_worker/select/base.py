"""Scores of stale tokens by a recipe's selector, the simplest of which are here; the choice of tokens by score."""

import itertools
from collections.abc import Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import torch

from fusionkv.protos.contract.selectors import DistanceToStart, QuestionAttention, Selector, Window


class Attended(NamedTuple):
    """The question's attention, by position.

    Attributes:
        attention: float32 [question_start], on the CPU.
        starts: the first position of every chunk and of the question, ascending.
    """

    attention: torch.Tensor
    starts: Sequence[int]


@singledispatch
def scores(selector: Selector, inputs: Any) -> torch.Tensor:
    """float32, at least [question_start]: higher is more worth recomputing, and only the order counts.

    Scores of tokens that are not stale are ignored. inputs: what the class of the selector's `needs` describes.
    """
    raise NotImplementedError(f"{selector} has no function that scores")


@scores.register
def question_attention(selector: QuestionAttention, inputs: Attended) -> torch.Tensor:
    attention, starts = inputs
    return attention * (1 + _before(starts)) ** -selector.fade if selector.fade else attention


@scores.register
def distance_to_start(selector: DistanceToStart, inputs: Sequence[int]) -> torch.Tensor:
    """The negated number of tokens before a token in its chunk; -inf outside chunks."""
    return -_before(inputs)


def _before(starts: Sequence[int]) -> torch.Tensor:
    """float32 [question_start]: the number of tokens before each one in its chunk; infinite outside chunks.

    starts: as in `Attended`.
    """
    before = torch.full((starts[-1],), float("inf"))
    for start, stop in itertools.pairwise(starts):
        before[start:stop] = torch.arange(stop - start)
    return before


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
