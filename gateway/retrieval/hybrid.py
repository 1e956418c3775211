"""One ranking out of BM25 and cosine."""

from collections.abc import Sequence

from fusionkv.gateway.retrieval.base import Candidate, Chunk


def rank(candidates: Sequence[Candidate], dense_weight: float, count: int) -> list[tuple[Chunk, float]]:
    """The `count` best chunks with their scores in about 0..1, best first, ties by document and position.

    A convex combination with theoretical lower bounds (Bruch et al. 2022, "An Analysis of Fusion Functions for
    Hybrid Retrieval"): BM25 by its best, cosine as it is. Scaling cosine to 0..1 within the list, or counting
    ranks only, makes as much of a weak embedding's noise as of a strong one's opinion.
    """
    best = max((c.words for c in candidates), default=0.0) or 1.0
    scored = [(c.chunk, (1 - dense_weight) * c.words / best + dense_weight * c.cosine) for c in candidates]
    return sorted(scored, key=lambda pair: (-pair[1], pair[0].key))[:count]
