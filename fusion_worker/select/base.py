"""The interface of selectors, which score stale tokens; the simplest selector; and the choice of tokens by score."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

# SnapKV's votes are averaged over neighbouring tokens, so that a fact is kept with the words around it (SnapKV 4.1).
_POOL = 5


@dataclass(frozen=True, slots=True)
class Nothing:
    """No forward pass. The selector receives the first position of every chunk and of the question, ascending."""


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """A pass of the question's rows over the reused KV, including stale tokens.

    The selector receives float32 [question_start], on the CPU: the attention into each position before the question,
    summed over the question's rows, the heads and the layers.

    Attributes:
        first, stop: The layers to sum over, as shares of the model's depth. At least one layer is summed over.
    """

    first: float = 0.0
    stop: float = 1.0

    def of(self, count: int) -> frozenset[int]:
        """Indices of these layers in a model of `count` layers."""
        stop = max(1, round(self.stop * count))
        return frozenset(range(min(round(self.first * count), stop - 1), stop))


@dataclass(frozen=True, slots=True)
class FreshLayer:
    """A pass of all stale tokens and the question through layer 0, up to the queries, keys and values of layer 1.

    The selector receives `fresh_layer.FreshStates` and returns a score for every position that they cover, on the
    model's device.
    """


@dataclass(frozen=True, slots=True)
class SecondModel:
    """A pass of the question over each chunk in the auxiliary model, on the CPU, while the KV is loaded.

    The selector receives float32 [question_start], on the CPU: the last layer's attention into each context token,
    summed over rows and heads, mapped to the main model's tokens; 0 for the system prompt.
    """


Need = Nothing | CachedAttention | FreshLayer | SecondModel


Inputs = TypeVar("Inputs")


class Selector(ABC, Generic[Inputs]):
    """Scores stale tokens by how much recomputing them is worth. Implementations are frozen dataclasses.

    A new selector is a class in this package and a row of `RECIPES`: the worker computes what `needs` says and knows
    nothing else about it.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def needs(self) -> Need:
        """The inputs to compute. Selectors with equal needs share one pass."""

    @abstractmethod
    def scores(self, inputs: Inputs) -> torch.Tensor:
        """float32, at least [question_start]: higher is more worth recomputing, and only the order counts.

        Scores of tokens that are not stale are ignored. inputs: what the class of `needs` describes.
        """


@dataclass(frozen=True, slots=True)
class QuestionAttention(Selector[torch.Tensor]):
    """Attention of the question's rows into each token, summed over rows and heads.

    Attributes:
        needs: Layers of the model, over reused KV: all, the sum of which orders tokens like the mean (ProphetKV 4.3,
            eq. 7), the last one (FusionRAG 3.2), or others. Or a small auxiliary model (CacheClip 3.3).
    """

    needs: CachedAttention | SecondModel = CachedAttention()

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


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


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Keeps the `tokens` context tokens that the question attends to most, by layer and head (SnapKV; A3)."""

    tokens: int

    def choose(self, votes: torch.Tensor) -> torch.Tensor:
        """int64 [layers, kv_heads, tokens]: indices of the context tokens to keep, ascending.

        votes: float32 [layers, kv_heads, context tokens], attention of the question's rows, summed.
        """
        smooth = torch.nn.functional.avg_pool1d(votes, _POOL, stride=1, padding=_POOL // 2)
        return smooth.topk(self.tokens, -1).indices.sort(-1).values
