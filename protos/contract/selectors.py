"""Selectors of tokens to recompute, as data: what each needs. `fusion_worker/select` computes their scores."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nothing:
    """No forward pass. The selector receives the first position of every chunk and of the question, ascending."""


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """A pass of the question's rows over the reused KV, including stale tokens.

    The selector receives `base.Attended`: the attention into each position before the question, summed over the
    question's rows, the heads and the layers.

    first: The first layer to sum over, as a share of the model's depth. At least the last layer is summed over.
    """

    first: float = 0.0

    def of(self, count: int) -> frozenset[int]:
        """Indices of these layers in a model of `count` layers."""
        return frozenset(range(min(round(self.first * count), count - 1), count))


@dataclass(frozen=True, slots=True)
class FreshLayer:
    """A pass of all stale tokens and the question through layer 0, up to the queries, keys and values of layer 1.

    The selector receives `fresh_layer.FreshStates` and returns a score for every position that they cover, on the
    model's device.
    """


@dataclass(frozen=True, slots=True)
class SecondModel:
    """A pass of the question over each chunk in the auxiliary model, on the CPU, while the KV is loaded.

    The selector receives `base.Attended`: the last layer's attention into each context token, summed over rows and
    heads, mapped to the main model's tokens; 0 for the system prompt.
    """


Need = Nothing | CachedAttention | FreshLayer | SecondModel


class Selector(ABC):
    """Scores stale tokens by how much recomputing them is worth. Implementations are frozen dataclasses."""

    __slots__ = ()

    @property
    @abstractmethod
    def needs(self) -> Need:
        """The inputs to compute. Selectors with equal needs share one pass."""


@dataclass(frozen=True, slots=True)
class QuestionAttention(Selector):
    """Attention of the question's rows into each token, summed over rows and heads.

    Attributes:
        needs: Layers of the model, over reused KV: all, the sum of which orders tokens like the mean (ProphetKV 4.3,
            eq. 7), the last one (FusionRAG 3.2), or others. Or a small auxiliary model (CacheClip 3.3).
        fade: Power of the tokens before a token in its chunk by which its score falls, as its staleness does: it was
            encoded after them, and is read after them. 0 is the attention itself.
    """

    needs: CachedAttention | SecondModel = CachedAttention()
    fade: float = 0.0


@dataclass(frozen=True, slots=True)
class DistanceToStart(Selector):
    """Tokens at the start of a chunk first, because they act as attention sinks (EPIC, LegoLink)."""

    needs = Nothing()


@dataclass(frozen=True, slots=True)
class ValueDeviation(Selector):
    """Squared L2 distance of a token's fresh value to its cached one, at layer 1 (CacheBlend; FusionRAG 2.2.2)."""

    needs = FreshLayer()


@dataclass(frozen=True, slots=True)
class AttendedDeviation(Selector):
    """L1 distance of fresh to cached values, times all attention into the token (KVShare; ProphetKV app. C)."""

    needs = FreshLayer()


@dataclass(frozen=True, slots=True)
class ShallowQuestionAttention(Selector):
    """Attention of the question's rows into each token, from fresh states at layer 1 (A3, eq. 3)."""

    needs = FreshLayer()


@dataclass(frozen=True, slots=True)
class InterChunkAttention(Selector):
    """A token's attention to the chunks before its own, from fresh states at layer 1 (Cache-Craft).

    The papers give the criterion but no layer; layer 1 is the only one with fresh states of every token.
    """

    needs = FreshLayer()


@dataclass(frozen=True, slots=True)
class Window:
    """Of the tokens with the highest scores, keeps those in windows with at least `least` of them (CacheClip 3.3).

    This avoids recomputing only half of an entity. The budget of dropped tokens is not used. Windows start at the
    first stale position.
    """

    size: int = 8
    least: int = 5


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Keeps the `tokens` context tokens that the question attends to most, by layer and head (SnapKV; A3)."""

    tokens: int
