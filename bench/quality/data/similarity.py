"""Similarity of chunks: cosine of tf-idf vectors over token ids."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fusionkv.fusion_worker.prompt import Chunk

# Cosines are rounded to this many digits, so that rounding errors of sums do not decide ties.
_DIGITS = 9


class _Index(NamedTuple):
    """Sparse unit vectors. of, tokens: int64 [entries]; weights: float64 [entries]; idf: float64 [vocabulary]."""

    of: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray
    idf: np.ndarray


class Similarity:
    """Ranks a pool of chunks by similarity to a chunk.

    A token's weight is its count in the chunk times log(chunks / chunks that contain it), so tokens of all chunks
    have no weight. Mean hidden states of a language model hardly distinguish passages of real text, and need a pass
    of the model over the whole pool.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = tuple({chunk.digest: chunk for chunk in chunks}.values())

    def nearest(self, chunk: Chunk, count: int) -> list[Chunk]:
        """The `count` most similar other chunks, best first; ties in order of the pool."""
        index = self._index
        own = np.zeros(len(index.idf))
        ids, counts = np.unique([i for i in chunk.ids if i < len(own)], return_counts=True)
        own[ids.astype(np.int64)] = counts
        own *= index.idf
        cosines = np.bincount(index.of, index.weights * own[index.tokens], len(self.chunks))
        cosines = cosines / (np.linalg.norm(own) or 1.0)
        order = np.argsort(-cosines.round(_DIGITS), kind="stable")
        others = (self.chunks[i] for i in order if self.chunks[i].digest != chunk.digest)
        return [other for other, _ in zip(others, range(count), strict=False)]

    @cached_property
    def _index(self) -> _Index:
        pairs = [np.unique(chunk.ids, return_counts=True) for chunk in self.chunks]
        of = np.repeat(np.arange(len(pairs)), [len(ids) for ids, _ in pairs])
        tokens = np.concatenate([ids for ids, _ in pairs]).astype(np.int64)
        held = np.bincount(tokens)
        idf = np.log(len(pairs) / np.maximum(held, 1))
        weights = np.concatenate([counts for _, counts in pairs]) * idf[tokens]
        norms = np.sqrt(np.bincount(of, weights**2, len(pairs)))
        return _Index(of, tokens, weights / np.where(norms > 0, norms, 1.0)[of], idf)
