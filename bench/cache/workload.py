"""Generates the queries of a RAG service as paths of chunks: from a knowledge base, shared uploads, or unique."""

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from fusionkv.kvcache_service import keys

SYSTEM = keys.chunk_digest([0])
# Shares of the queries' chunks (FusionRAG 5.3.3).
KNOWLEDGE, SHARED = 0.6, 0.3


@dataclass(frozen=True, slots=True)
class Workload:
    """A seeded sequence of queries.

    A query has `chunks` different chunks, each from the knowledge base with probability 0.6, from the shared uploads
    with probability 0.3, and otherwise unique to the query. Every query belongs to one of `topics`, drawn with the
    same exponent as the chunks within it. Each topic has an equal part of the knowledge base and of the uploads.
    Chunk r of a topic is drawn with a probability proportional to (r + 1) ** -zipf.
    """

    queries: int
    chunks: int
    knowledge: int
    """Number of chunks of the knowledge base."""
    shared: int
    """Number of chunks of shared uploads."""
    zipf: float
    topics: int = 1
    sorted: bool = False
    """Whether chunks are in the order of their documents, as the gateway sends them, or in the order drawn."""
    seed: int = 0

    def corpus(self) -> list[bytes]:
        """Digests of the knowledge base."""
        return [_digest("knowledge", i) for i in range(self.knowledge)]

    def __iter__(self) -> Iterator[list[bytes]]:
        """Yields each query's digests, the system prompt first."""
        draw = random.Random(self.seed)
        pools = {"knowledge": self.knowledge // self.topics, "shared": self.shared // self.topics}
        ranks = {kind: _cumulated(size, self.zipf) for kind, size in pools.items()}
        topics = _cumulated(self.topics, self.zipf)
        unique = 0
        for _ in range(self.queries):
            topic = _pick(draw, topics)
            chosen: dict[tuple[str, int], None] = {}
            while len(chosen) < self.chunks:
                kind = draw.random()
                if kind >= KNOWLEDGE + SHARED:
                    chosen["unique", unique] = None
                    unique += 1
                    continue
                name = "knowledge" if kind < KNOWLEDGE else "shared"
                if sum(1 for other, _ in chosen if other == name) == pools[name]:
                    raise ValueError(f"a topic has {pools[name]} {name} chunks, too few for queries of {self.chunks}")
                before = len(chosen)
                while len(chosen) == before:
                    chosen[name, topic * pools[name] + _pick(draw, ranks[name])] = None
            yield [SYSTEM, *(_digest(*chunk) for chunk in (sorted(chosen) if self.sorted else chosen))]


def _digest(kind: str, number: int) -> bytes:
    return keys.chunk_digest([*kind.encode(), number])


def _cumulated(count: int, zipf: float) -> list[float]:
    return list(accumulate((rank + 1.0) ** -zipf for rank in range(count)))


def _pick(draw: random.Random, cumulated: list[float]) -> int:
    return bisect_right(cumulated, draw.random() * cumulated[-1], hi=len(cumulated) - 1)
