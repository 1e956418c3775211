"""Retrieval: the interface of engines, which find candidate chunks by BM25 and by embeddings; and their ranking."""

import asyncio
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from opentelemetry import trace

from fusionkv.gateway.client.results import Item
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.embed.base import Embedder, Reranker
from fusionkv.gateway.ingest.text import WORD, acts
from fusionkv.gateway.retrieval.duplicates import distinct
from fusionkv.gateway.tokens import ModelIdentity
from fusionkv.kvcache_service import keys
from fusionkv.protos.deadline import NO_DEADLINE, Deadline
from fusionkv.protos.fusion.v1.fusion_pb2 import GetModelResponse
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument, NotFound, error_type

tracer = trace.get_tracer(__name__)
PROVIDER = "fusionkv"  # in spans, by the GenAI conventions
_CORPUS = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_NAME = 512  # characters of a document's name
# Candidates per requested chunk in each list: deep enough that chunks usually have both scores.
_DEPTH = 4
_MIN_DEPTH = 100
# Deeper searches for what copies displace: at most this many, of at most this depth.
_MAX_SEARCHES, _MAX_DEPTH = 8, 1600
# Share of copies among candidates above which a search is repeated.
_MAX_COPIES = 0.25
# Added to the best BM25 score: if chunks share only common words with the question, whose scores are low, BM25
# then has little weight.
_WEAK = 20.0
_deadline: ContextVar[Deadline] = ContextVar("_deadline", default=NO_DEADLINE)


@contextmanager
def within(deadline: Deadline) -> Iterator[None]:
    """Sets the deadline of calls made inside. Engines apply it to their calls to servers."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def current_deadline() -> Deadline:
    """The deadline set by `within`."""
    return _deadline.get()


@contextmanager
def step(
    name: str, operation: str = "", attributes: Mapping[str, str | int] = MappingProxyType({})
) -> Iterator[None]:
    """A span, which records the type of an error raised inside; `operation` is its name in the GenAI conventions."""
    conventions = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER} if operation else {}
    with tracer.start_as_current_span(name, attributes={**conventions, **attributes}) as span:
        try:
            yield
        except Exception as error:
            span.set_attribute("error.type", error_type(error))
            raise


def no_corpus(corpus: str) -> NotFound:
    """The error of an unknown corpus."""
    return NotFound(f"no corpus {corpus!r}: list the corpora to see their names, or ingest a document to create it")


def no_document(document: str) -> NotFound:
    """The error of an unknown document."""
    return NotFound(f"no document {document!r}: list the corpus to see the names of its documents")


def check_model(corpus: str, made_with: ModelIdentity, model: ModelIdentity) -> None:
    """Raises FailedPrecondition if a corpus was built with another model or embedder."""
    if made_with == model:
        return
    if made_with.fingerprint != model.fingerprint:
        before, after = (f" ({m.name})" if m.name else "" for m in (made_with, model))
        reason = f"with another model{before} than the worker's{after}"
    elif made_with.tokenizer != model.tokenizer:
        reason = "with another prompt template than the worker's"
    else:
        now = f"the gateway's embedder is {model.embedder}" if model.embedder else "the gateway has no embedder"
        reason = f"with {f'embeddings of {made_with.embedder}' if made_with.embedder else 'no embeddings'}, but {now}"
    remedy = f"run `fusionkv move {corpus}` (in Milvus: delete the corpus and ingest it again)"
    raise FailedPrecondition(f"corpus {corpus!r} was built {reason}: {remedy}")


def check_worker(corpus: str, made_with: ModelIdentity, model: GetModelResponse) -> None:
    """Raises FailedPrecondition if a corpus was built with another model than a worker's, which another may have."""
    check_model(corpus, made_with, replace(made_with, fingerprint=model.fingerprint, name=model.name))


def check_corpus(name: str) -> None:
    """Raises InvalidArgument if a corpus's name is invalid."""
    if not _CORPUS.fullmatch(name):
        raise InvalidArgument(f"invalid corpus name {name[:80]!r}: must be 1 to 64 characters of A-Z a-z 0-9 . _ -")


def check_document(name: str) -> None:
    """Raises InvalidArgument if a document's name is invalid."""
    if not name or len(name) > MAX_NAME or any(map(acts, name)):
        raise InvalidArgument(f"invalid document name {name[:80]!r}: must be 1 to {MAX_NAME} printable characters")


@dataclass(frozen=True)
class TextChunk:
    """One stored chunk of a document."""

    document: str
    position: int
    text: str  # in the prompt, with the document's title, if any, on a separate line above it
    ids: tuple[int, ...]  # within the prompt template; stored, so that the digest needs no tokenising again
    variant: bytes = b""  # digest of the chunk as encoded with neighbours ahead of time; empty if it was not
    neighbours: int = 0  # number of neighbours requested for that encoding
    title: str = ""
    source: str = ""  # where the document came from, as its caller named it
    metadata: tuple[tuple[str, str], ...] = ()  # the document's, sorted by key

    @property
    def key(self) -> tuple[str, int]:
        return self.document, self.position

    @property
    def digest(self) -> bytes:
        """The chunk's digest in the cache service's keys."""
        return keys.chunk_digest(self.ids)


def by_shared_words(text: str, chunks: Sequence[TextChunk]) -> list[TextChunk]:
    """Sorts chunks by the words shared with a text, weighted by rarity, then by document and position.

    Unlike BM25 scores of an engine, which change with every commit, this order is stable, and so are the variants of
    chunks encoded with their neighbours.
    """
    words = {chunk.key: set(WORD.findall(chunk.text.lower())) for chunk in chunks}
    counts = Counter(word for chunk_words in words.values() for word in chunk_words)
    text_words = set(WORD.findall(text.lower()))

    def shared(chunk: TextChunk) -> float:
        return math.fsum(math.log1p(len(chunks) / counts[word]) for word in words[chunk.key] & text_words)

    return sorted(chunks, key=lambda chunk: (-shared(chunk), chunk.key))


def best(scored: Iterable[tuple[TextChunk, float]], count: int) -> list[tuple[TextChunk, float]]:
    """The `count` chunks of highest score, best first, then by document and position."""
    return sorted(scored, key=lambda pair: (-pair[1], pair[0].key))[:count]


@dataclass(frozen=True)
class Candidate:
    """A candidate for a question. `words` is its BM25 score (0: no common word); `cosine` is in -1..1."""

    chunk: TextChunk
    words: float
    cosine: float


@dataclass(frozen=True)
class Query:
    """What a corpus is searched for.

    Attributes:
        where: metadata that a document must have.
        without: digests of chunks that are left out.
    """

    corpus: str
    question: str
    where: Mapping[str, str] = field(default_factory=dict)
    without: Set[bytes] = frozenset()


# Converts a document's chunks and vectors to those of another model.
Rewrite = Callable[[Sequence[TextChunk], np.ndarray], Awaitable[tuple[Sequence[TextChunk], np.ndarray]]]


class Retrieval(ABC):
    """Corpora of documents. For concurrent use within one event loop, which it never blocks.

    A change is durable and visible to later calls once its method has returned. Readers see a document as it was
    before or after a change, never a mixture. Methods raise NotFound for an unknown corpus, and those that take
    `model` raise FailedPrecondition for a corpus built with another model. Without an embedder, vectors have width 0
    and `vector` is None.
    """

    @abstractmethod
    async def replace(
        self, corpus: str, document: str, chunks: Sequence[TextChunk], vectors: np.ndarray, model: ModelIdentity
    ) -> bool:
        """Stores all chunks of a document, replacing earlier ones; creates the corpus if necessary.

        vectors: unit vectors, float32 `[chunk, dim]`. Returns whether the document existed before.
        """

    @abstractmethod
    async def delete(self, corpus: str, document: str = "") -> tuple[int, int]:
        """Deletes one document, or the whole corpus. Returns the number of deleted documents and chunks."""

    @abstractmethod
    async def corpora(self) -> list[Item]:
        """All corpora, sorted by name."""

    @abstractmethod
    async def check(self, corpus: str) -> ModelIdentity:
        """The models that the corpus was built with, at a cost that does not depend on its size.

        Raises NotFound if the corpus does not exist.
        """

    @abstractmethod
    async def documents(self, corpus: str, after: str = "", limit: int = 0) -> list[Item]:
        """Documents sorted by name, from the one after `after`; at most `limit`, or all if it is 0."""

    @abstractmethod
    async def candidates(
        self, query: Query, vector: np.ndarray | None, depth: int, model: ModelIdentity
    ) -> list[Candidate]:
        """The `depth` best chunks by BM25 and the `depth` best by cosine, merged, in no particular order."""

    @abstractmethod
    async def chunks(self, corpus: str, document: str, model: ModelIdentity) -> list[tuple[TextChunk, np.ndarray]]:
        """The chunks of a document with their vectors, by position; empty if the document does not exist."""

    @abstractmethod
    async def nearest(
        self, corpus: str, text: str, vector: np.ndarray | None, count: int, model: ModelIdentity
    ) -> list[TextChunk]:
        """The `count` chunks of highest cosine, best first, then by document and position.

        Without a vector, the chunks that share the most words with the text.
        """

    @abstractmethod
    async def set_variants(self, corpus: str, chunks: Sequence[TextChunk]) -> None:
        """Stores `variant` and `neighbours` of chunks that still exist with the same ids; skips others."""

    @abstractmethod
    def move(self, corpus: str, rewrite: Rewrite, model: ModelIdentity) -> AsyncGenerator[int]:
        """Rebuilds a corpus for another model; yields the number of chunks of each rebuilt document.

        Concurrent changes of the corpus wait. Readers see the old corpus until all documents are rebuilt, then the
        new one. Raises FailedPrecondition if this engine does not support it, and NotFound if the corpus is deleted
        meanwhile.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends all work in flight. Changes whose method has returned are durable."""


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

    async def vectors(self, texts: Sequence[str], known: Mapping[str, np.ndarray], tenant: str = "") -> np.ndarray:
        """Vectors of texts to store, float32 `[text, dim]`, computed unless known; of width 0 without an embedder.

        Known vectors of another width, from an earlier model of the embedder, are not used.

        Raises as `Embedder.embed`.
        """
        if self.embedder is None:
            return np.zeros((len(texts), 0), np.float32)
        dim = self.embedder.dim
        new = [*dict.fromkeys(text for text in texts if text not in known or len(known[text]) != dim)]
        computed = dict(zip(new, await self.embedder.embed(new, tenant=tenant), strict=True)) if new else {}
        vectors = [computed[text] if text in computed else known[text] for text in texts]
        return np.stack(vectors) if vectors else np.zeros((0, dim), np.float32)

    async def search(
        self, retrieval: Retrieval, query: Query, count: int, model: ModelIdentity, tenant: str = ""
    ) -> list[tuple[TextChunk, float]]:
        """The `count` best chunks with their scores, best first; the reranker's scores if there is one.

        Raises as `Retrieval.candidates`, `Embedder.embed` and `Reranker.score`.
        """
        vector = None
        if self.embedder is not None:
            with step("gateway.embed", "embeddings", {"gen_ai.request.model": self.embedder.name}):
                vector = (await self.embedder.embed([query.question], question=True, tenant=tenant))[0]
        needed = max(self._reranked, count) if self._reranker is not None else count
        ranked = await self._distinct(retrieval, query, vector, needed, self.identity(model))
        if self._reranker is None:
            return ranked
        chunks = [chunk for chunk, _ in ranked]
        with step("gateway.rerank"):
            scores = await self._reranker.score(query.question, [chunk.text for chunk in chunks])
        return best(zip(chunks, scores, strict=True), count)

    async def _distinct(
        self, retrieval: Retrieval, query: Query, vector: np.ndarray | None, count: int, model: ModelIdentity
    ) -> list[tuple[TextChunk, float]]:
        """The `count` best chunks of different texts; searches deeper while copies displace other candidates."""
        weight = self._weight if vector is not None else 0.0
        depth, candidates, dropped = max(_DEPTH * count, _MIN_DEPTH), list[Candidate](), 0
        for _ in range(_MAX_SEARCHES):
            batch = await retrieval.candidates(query, vector, depth, model)
            candidates += batch
            ranked = rank(candidates, weight, len(candidates))
            places = await asyncio.to_thread(distinct, (chunk.text for chunk, _ in ranked), query.question, count)
            new = {candidate.chunk.digest for candidate in batch}
            passed = places[-1] + 1 if len(places) == count else len(ranked)
            copies = max(len(batch) - len(new), passed - len(places) - dropped)
            dropped = passed - len(places)
            # Fewer than the depth: there are no others.
            if len(batch) < depth or (len(places) == count and copies <= _MAX_COPIES * len(batch)):
                break
            query = replace(query, without=query.without | new)
            depth = min(2 * depth, _MAX_DEPTH)
        trace.get_current_span().set_attribute("fusionkv.candidates", len(candidates))
        return [ranked[place] for place in places]

    async def close(self) -> None:
        for model in (self.embedder, self._reranker):
            if model is not None:
                await model.close()


def rank(candidates: Sequence[Candidate], dense_weight: float, count: int) -> list[tuple[TextChunk, float]]:
    """The `count` best chunks with their scores, best first, then by document and position.

    The score is a convex combination (Bruch et al. 2022, "An Analysis of Fusion Functions for Hybrid Retrieval") of
    the unscaled cosine and of BM25 divided by the list's best score plus a constant. Unlike ranks, or cosines scaled
    to 0..1 within the list, this preserves the confidence of each score.
    """
    most = max((c.words for c in candidates), default=0.0) + _WEAK
    scored = ((c.chunk, (1 - dense_weight) * c.words / most + dense_weight * c.cosine) for c in candidates)
    return best(scored, count)
