"""Selects tokens by their distance to the chunk's start (EPIC)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import Nothing, Selector


@dataclass(frozen=True, slots=True)
class DistanceToStart(Selector[Sequence[int]]):
    """Tokens at the start of a chunk first, because they act as attention sinks (EPIC, LegoLink)."""

    needs = Nothing()

    def scores(self, inputs: Sequence[int]) -> torch.Tensor:
        """The negated distance of a token to its chunk's start, in tokens; -inf outside chunks."""
        scores = torch.full((inputs[-1],), float("-inf"))
        for start, stop in itertools.pairwise(inputs):
            scores[start:stop] = -torch.arange(stop - start, dtype=torch.float32)
        return scores
