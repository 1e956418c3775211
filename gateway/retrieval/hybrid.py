"""The best chunks of a corpus for a question: candidates by words and by meaning, in one ranking."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from opentelemetry import trace

from fusionkv.gateway import genai
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.embed.base import Embedder, Reranker
from fusionkv.gateway.retrieval.base import NO_FILTER, Candidate, Chunk, ModelIdentity, Retrieval

tracer = trace.get_tracer(__name__)
# Both lists go this deep, so that a chunk which one of them ranks low still gets both its scores.
_DEPTH = 4
_LEAST_DEPTH = 100
# Where no chunk has more of the question than common words, which give less, words count little.
_WEAK = 20.0


class HybridSearch:
    """By words alone where there is no embedder."""

    def __init__(
        self, config: GatewayConfig, embedder: Embedder | None = None, reranker: Reranker | None = None
    ) -> None:
        self._weight = config.dense_weight
        self._reranked = config.rerank_depth
        self.embedder = embedder
        self._reranker = reranker

    def identity(self, model: ModelIdentity) -> ModelIdentity:
        """What a corpus is made with: the worker's model, and this embedder."""
        return replace(model, embedder=self.embedder.name if self.embedder else "")

    async def vectors(self, texts: Sequence[str], known: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32 `[text, dim]` of what is stored; 0 wide without an embedder. known: those that were made before.

        Raises as `Embedder.embed` does.
        """
        if self.embedder is None:
            return np.zeros((len(texts), 0), np.float32)
        new = [*dict.fromkeys(text for text in texts if text not in known)]
        made = dict(zip(new, await self.embedder.embed(new), strict=True)) if new else {}
        found = [made[text] if text in made else known[text] for text in texts]
        return np.stack(found) if found else np.zeros((0, self.embedder.dim), np.float32)

    async def search(
        self,
        retrieval: Retrieval,
        corpus: str,
        question: str,
        count: int,
        model: ModelIdentity,
        where: Mapping[str, str] = NO_FILTER,
    ) -> list[tuple[Chunk, float]]:
        """The `count` best chunks with their scores, best first; a reranker's own where there is one.

        Raises as `Retrieval.candidates`, `Embedder.embed` and `Reranker.score` do.
        """
        vector = None
        if self.embedder is not None:
            asked = genai.embedding(self.embedder.name)
            with tracer.start_as_current_span("gateway.embed", attributes=asked) as span, genai.failures(span):
                vector = (await self.embedder.embed([question], question=True))[0]
        depth = max(_DEPTH * count, _LEAST_DEPTH)
        found = await retrieval.candidates(corpus, question, vector, depth, self.identity(model), where)
        trace.get_current_span().set_attribute("fusionkv.candidates", len(found))
        weight = self._weight if vector is not None else 0.0
        if self._reranker is None:
            return rank(found, weight, count)
        best = rank(found, weight, max(self._reranked, count))
        with tracer.start_as_current_span("gateway.rerank") as span, genai.failures(span):
            scores = await self._reranker.score(question, [chunk.text for chunk, _ in best])
        return _sorted([(chunk, score) for (chunk, _), score in zip(best, scores, strict=True)])[:count]

    async def close(self) -> None:
        """Ends embedder and reranker."""
        for model in (self.embedder, self._reranker):
            if model is not None:
                await model.close()


def rank(candidates: Sequence[Candidate], dense_weight: float, count: int) -> list[tuple[Chunk, float]]:
    """The `count` best chunks with their scores, best first, ties by document and position.

    A convex combination (Bruch et al. 2022, "An Analysis of Fusion Functions for Hybrid Retrieval") of the cosine as
    it is, and of BM25 as a share of the list's best one, plus a constant. Ranks alone, or cosines scaled to 0..1
    within the list, lose how sure each of the two is.
    """
    best = max((c.words for c in candidates), default=0.0) + _WEAK
    return _sorted([(c.chunk, (1 - dense_weight) * c.words / best + dense_weight * c.cosine) for c in candidates])[
        :count
    ]


def _sorted(scored: Sequence[tuple[Chunk, float]]) -> list[tuple[Chunk, float]]:
    return sorted(scored, key=lambda pair: (-pair[1], pair[0].key))
