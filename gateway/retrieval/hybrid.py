"""Ranks a corpus's chunks for a question by BM25 and embeddings, optionally with a reranker."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from opentelemetry import trace

from fusionkv.gateway import genai
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.embed.base import Embedder, Reranker
from fusionkv.gateway.retrieval.base import NO_FILTER, Candidate, Chunk, ModelIdentity, Retrieval, best

tracer = trace.get_tracer(__name__)
# Candidates per requested chunk in each list: deep enough that chunks usually have both scores.
_DEPTH = 4
_MIN_DEPTH = 100
# Added to the best BM25 score: if chunks share only common words with the question, whose scores are low, BM25
# then has little weight.
_WEAK = 20.0


class HybridSearch:
    """Searches by BM25 and embeddings, or by BM25 only if there is no embedder."""

    def __init__(
        self, config: GatewayConfig, embedder: Embedder | None = None, reranker: Reranker | None = None
    ) -> None:
        self._weight = config.dense_weight
        self._reranked = config.rerank_depth
        self.embedder = embedder
        self._reranker = reranker

    def identity(self, model: ModelIdentity) -> ModelIdentity:
        """The models that a corpus is built with: the worker's, and this embedder."""
        return replace(model, embedder=self.embedder.name if self.embedder else "")

    async def vectors(self, texts: Sequence[str], known: Mapping[str, np.ndarray]) -> np.ndarray:
        """Vectors of texts to store, float32 `[text, dim]`, computed unless known; of width 0 without an embedder.

        Raises as `Embedder.embed`.
        """
        if self.embedder is None:
            return np.zeros((len(texts), 0), np.float32)
        new = [*dict.fromkeys(text for text in texts if text not in known)]
        computed = dict(zip(new, await self.embedder.embed(new), strict=True)) if new else {}
        vectors = [computed[text] if text in computed else known[text] for text in texts]
        return np.stack(vectors) if vectors else np.zeros((0, self.embedder.dim), np.float32)

    async def search(
        self,
        retrieval: Retrieval,
        corpus: str,
        question: str,
        count: int,
        model: ModelIdentity,
        where: Mapping[str, str] = NO_FILTER,
    ) -> list[tuple[Chunk, float]]:
        """The `count` best chunks with their scores, best first; the reranker's scores if there is one.

        Raises as `Retrieval.candidates`, `Embedder.embed` and `Reranker.score`.
        """
        vector = None
        if self.embedder is not None:
            attributes = genai.embedding(self.embedder.name)
            with tracer.start_as_current_span("gateway.embed", attributes=attributes) as span, genai.failures(span):
                vector = (await self.embedder.embed([question], question=True))[0]
        depth = max(_DEPTH * count, _MIN_DEPTH)
        candidates = await retrieval.candidates(corpus, question, vector, depth, self.identity(model), where)
        trace.get_current_span().set_attribute("fusionkv.candidates", len(candidates))
        weight = self._weight if vector is not None else 0.0
        if self._reranker is None:
            return rank(candidates, weight, count)
        ranked = [chunk for chunk, _ in rank(candidates, weight, max(self._reranked, count))]
        with tracer.start_as_current_span("gateway.rerank") as span, genai.failures(span):
            scores = await self._reranker.score(question, [chunk.text for chunk in ranked])
        return best(zip(ranked, scores, strict=True), count)

    async def close(self) -> None:
        for model in (self.embedder, self._reranker):
            if model is not None:
                await model.close()


def rank(candidates: Sequence[Candidate], dense_weight: float, count: int) -> list[tuple[Chunk, float]]:
    """The `count` best chunks with their scores, best first, then by document and position.

    The score is a convex combination (Bruch et al. 2022, "An Analysis of Fusion Functions for Hybrid Retrieval") of
    the unscaled cosine and of BM25 divided by the list's best score plus a constant. Unlike ranks, or cosines scaled
    to 0..1 within the list, this preserves the confidence of each score.
    """
    most = max((c.words for c in candidates), default=0.0) + _WEAK
    scored = ((c.chunk, (1 - dense_weight) * c.words / most + dense_weight * c.cosine) for c in candidates)
    return best(scored, count)
