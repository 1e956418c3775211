"""The contract of a selector: what it has to see of a prompt, and how that becomes one score for each stale token."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class Nothing:
    """No model runs. The selector is given `ChunkPlaces`."""


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """A pass of the question's rows over the KV as it is reused, stale tokens included.

    The selector is given float32 [question_start], on the CPU: the attention into each position before the question,
    summed over the question's rows, the heads and the layers.

    Attributes:
        layers: Numbers of the layers to sum over, negative ones from the last; None for all layers.
    """

    layers: tuple[int, ...] | None = None

    def of(self, count: int) -> frozenset[int]:
        """The numbers of the layers to look at, in a model of `count` layers."""
        return frozenset(range(count) if self.layers is None else (number % count for number in self.layers))


@dataclass(frozen=True, slots=True)
class FreshLayer:
    """A pass of all stale tokens and the question through layer 0, up to the queries, keys and values of layer 1.

    The selector is given `fresh_states.FreshStates` and returns a score for every position that these cover, on the
    model's device. The chosen tokens can go on from this pass (`Recipe.from_layer_1`).
    """


@dataclass(frozen=True, slots=True)
class SecondModel:
    """A pass of the question over each chunk in the small second model, on the CPU, while the KV is loaded.

    The selector is given float32 [question_start], on the CPU: the last layer's attention into each context token,
    summed over rows and heads, carried over to the first model's tokens; 0 for the system prompt.
    """


Need = Nothing | CachedAttention | FreshLayer | SecondModel


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """Where the chunks of a prompt stand.

    Attributes:
        starts: Position of each chunk's first token.
        stops: Position behind each chunk's last token.
        length: Tokens of system prompt and context together.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    length: int


Seen = TypeVar("Seen")


class Selector(ABC, Generic[Seen]):
    """Says which stale tokens are most worth recomputing. Implementations are frozen dataclasses.

    A new selector is a file of this package and a row of `methods/recipes.py`: the worker computes what `needs` says
    and knows nothing else of it.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def needs(self) -> Need:
        """What has to be computed for the scores. Selectors with equal needs share one pass."""

    @abstractmethod
    def scores(self, seen: Seen) -> torch.Tensor:
        """Scores of all positions; those of tokens that are not stale are ignored.

        Args:
            seen: What the class of `needs` says.

        Returns:
            float32, at least [question_start]: higher is more worth recomputing. No unit: only the order counts.
        """
