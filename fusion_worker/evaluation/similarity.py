"""Which chunks are like which, by the model's own vectors (FusionRAG 3.1)."""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from fusionkv.fusion_worker.engine.embedder import MAX_TEXTS, Embedder
from fusionkv.fusion_worker.engine.prompt import Chunk
from fusionkv.fusion_worker.models import Model

_KEPT = 4096  # vectors: other tasks ask about the same chunks


class Similarity:
    """Ranks chunks, and embeds none twice while it is remembered."""

    def __init__(self, model: Model, embedder: Embedder) -> None:
        self._model = model
        self._embedder = embedder
        self._vectors: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    async def ranked(self, chunks: Sequence[Chunk]) -> dict[bytes, list[Chunk]]:
        """For each chunk, by digest, all the others, the most similar first. The chunks are different ones."""
        vectors = torch.stack(await self._embed(chunks))
        similarity = vectors @ vectors.T
        similarity.fill_diagonal_(float("-inf"))
        order = similarity.sort(descending=True, stable=True).indices.tolist()
        return {chunk.digest: [chunks[j] for j in row[:-1]] for chunk, row in zip(chunks, order, strict=True)}

    def fitting(self, system: Chunk, chunk: Chunk, near: Sequence[Chunk]) -> list[Chunk]:
        """As many of the chunks before `chunk` as the model's length takes."""
        room, fitting = self._model.max_tokens - len(system) - len(chunk), []
        for other in near:
            room -= len(other)
            if room < 0:
                break
            fitting.append(other)
        return fitting

    async def _embed(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        missing = [chunk for chunk in chunks if chunk.digest not in self._vectors]
        for start in range(0, len(missing), MAX_TEXTS):
            part = missing[start : start + MAX_TEXTS]
            texts = [self._model.tokenizer.decode(chunk.ids) for chunk in part]
            self._vectors |= zip((c.digest for c in part), await self._embedder.embed(texts), strict=True)
        found = []
        for chunk in chunks:
            self._vectors.move_to_end(chunk.digest)
            found.append(self._vectors[chunk.digest])
        while len(self._vectors) > max(_KEPT, len(chunks)):
            self._vectors.popitem(last=False)
        return found
