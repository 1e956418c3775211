"""Scores: one number for every stale token, higher is more worth recomputing. What each looks at; who computes it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DistanceToStart:
    """Tokens at the start of a chunk first: they draw the attention that has no better place (EPIC, LegoLink)."""

    def scores(self, starts: list[int], stops: list[int], length: int) -> torch.Tensor:
        """float32 [length]: minus the distance of each position in `[start, stop)` to its start."""
        scores = torch.full((length,), float("-inf"))
        for start, stop in zip(starts, stops, strict=True):
            scores[start:stop] = -torch.arange(stop - start, dtype=torch.float32)
        return scores


@dataclass(frozen=True, slots=True)
class QuestionAttention:
    """Attention of the question's rows into each token over the stale cache, summed over rows and heads.

    last_only: the last layer's alone (FusionRAG 3.2); otherwise all layers summed, which orders tokens as their mean
        does (ProphetKV 4.3, eq. 7).
    """

    last_only: bool

    def layers(self, count: int) -> frozenset[int]:
        """Which of the model's layers are looked at."""
        return frozenset({count - 1} if self.last_only else range(count))


@dataclass(frozen=True, slots=True)
class ValueDeviation:
    """Squared L2 distance of a token's fresh value to its stale one, layer 1 (CacheBlend; FusionRAG 2.2.2)."""


@dataclass(frozen=True, slots=True)
class AttendedDeviation:
    """L1 distance of the values times all attention into the token, layer 1 (KVShare; ProphetKV app. C)."""


@dataclass(frozen=True, slots=True)
class ShallowAttention:
    """Attention of the question's rows into each token from fresh states, layer 1 (A3, eq. 3)."""


@dataclass(frozen=True, slots=True)
class InterChunkAttention:
    """How much a token attends to chunks before its own, from fresh states, layer 1 (Cache-Craft).

    The papers at hand name the criterion and no layer; fresh rows of every token are there at layer 1 only.
    """


@dataclass(frozen=True, slots=True)
class AuxiliaryAttention:
    """Last-layer attention of the question into each token in a small second model (CacheClip 3.3)."""


# Computed from the states of all stale tokens behind layer 0: see `shallow`.
ShallowScore = ValueDeviation | AttendedDeviation | ShallowAttention | InterChunkAttention
Score = DistanceToStart | QuestionAttention | AuxiliaryAttention | ShallowScore
