"""Selects tokens by their distance to the chunk's start (EPIC)."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import ChunkPlaces, Nothing, Selector


@dataclass(frozen=True, slots=True)
class DistanceToStart(Selector[ChunkPlaces]):
    """Tokens at the start of a chunk first, because they act as attention sinks (EPIC, LegoLink)."""

    needs = Nothing()

    def scores(self, inputs: ChunkPlaces) -> torch.Tensor:
        """The negated distance of a token to its chunk's start, in tokens; -inf outside chunks."""
        scores = torch.full((inputs.length,), float("-inf"))
        for start, stop in zip(inputs.starts, inputs.stops, strict=True):
            scores[start:stop] = -torch.arange(stop - start, dtype=torch.float32)
        return scores
