"""Finds the neighbours that a chunk is encoded with, as many as fit the model's length."""

import asyncio
from collections.abc import Sequence

from fusionkv.bench.quality.data.prompts import Prompter
from fusionkv.bench.quality.data.samples import Library
from fusionkv.bench.quality.data.similarity import Similarity
from fusionkv.fusion_worker.prompt import Chunk, Prompt


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
        room, fitting = self._max_tokens - len(system) - len(chunk), []
        for other in near:
            room -= len(other)
            if room < 0:
                break
            fitting.append(other)
        return fitting
