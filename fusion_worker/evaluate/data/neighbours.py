"""Finds the neighbours that a chunk is encoded with: the most similar chunks, as many as fit the model's length."""

import asyncio
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fusionkv.fusion_worker.evaluate.data.prompts import Prompter
from fusionkv.fusion_worker.evaluate.data.samples import Library
from fusionkv.fusion_worker.prompt import Chunk, Prompt

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
        counted = np.zeros(len(index.idf))
        ids, counts = np.unique([i for i in chunk.ids if i < len(counted)], return_counts=True)
        counted[ids.astype(np.int64)] = counts
        counted *= index.idf
        cosines = np.bincount(index.of, index.weights * counted[index.tokens], len(self.chunks))
        cosines = cosines / (np.linalg.norm(counted) or 1.0)
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


class Neighbours:
    """Finds neighbours for one model.

    turn: a lock to hold while neighbours are in the pool, so that only one chunk's neighbours are there at a time.
    """

    def __init__(self, max_tokens: int, prompter: Prompter) -> None:
        """max_tokens: the model's limit."""
        self.turn = asyncio.Lock()
        self._max_tokens = max_tokens
        self._prompter = prompter
        self._known: tuple[str, Similarity] = ("", Similarity(()))

    def among(self, library: Library | None, prompts: Sequence[Prompt]) -> Similarity:
        """Ranks the chunks of a library, or of the prompts without a library."""
        if library is None:
            return Similarity([chunk for prompt in prompts for chunk in prompt.chunks])
        if self._known[0] != library.digest:
            chunks = [Chunk(ids) for sample in library.samples for ids in self._prompter.chunks(sample)]
            self._known = (library.digest, Similarity(chunks))
        return self._known[1]

    def before(self, system: Chunk, chunk: Chunk, near: Sequence[Chunk]) -> list[Chunk]:
        """The nearest chunks, best first, as many as fit between the system prompt and a chunk."""
        room = self._max_tokens - len(system) - len(chunk)
        return [other for other, size in zip(near, itertools.accumulate(map(len, near)), strict=True) if size <= room]
