"""The contract of a retrieval engine: it holds the corpora and finds candidates by words and by meaning."""

import math
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from fusionkv.kvcache_service import keys
from fusionkv.protos.runtime.errors import FailedPrecondition

_WORD = re.compile(r"\w+")
NO_FILTER: Mapping[str, str] = {}
_until: ContextVar[float] = ContextVar("_until", default=math.inf)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The caller waits no longer for what is begun inside: an engine that asks others passes it on."""
    token = _until.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _until.reset(token)


def left() -> float:
    """Seconds that the caller still waits."""
    return _until.get() - time.monotonic()


@dataclass(frozen=True)
class ModelIdentity:
    """What a corpus depends on: variants on the weights, token ids on the tokenizer and the chunk template, and
    vectors on the embedder; an empty one stands for no vectors. name: what people call the model.
    """

    fingerprint: bytes
    tokenizer: bytes
    embedder: str = ""
    name: str = field(default="", compare=False)


def check_model(corpus: str, made_with: ModelIdentity, model: ModelIdentity) -> None:
    """Raises FailedPrecondition if a corpus was made with another model or embedder."""
    if made_with == model:
        return
    if made_with.fingerprint != model.fingerprint:
        what = f"with another model{_named(made_with.name)} than the worker runs now{_named(model.name)}"
    elif made_with.tokenizer != model.tokenizer:
        what = "with another prompt template than the worker has now"
    else:
        now = f"the gateway embeds by {model.embedder}" if model.embedder else "the gateway has no embedder"
        what = f"with embeddings of {made_with.embedder or 'no model'}, and {now}"
    raise FailedPrecondition(f"corpus {corpus!r} was made {what}: run `fusionkv move {corpus}`")


def _named(name: str) -> str:
    return f" ({name})" if name else ""


@dataclass(frozen=True)
class Chunk:
    """One chunk of a document as it is stored.

    text: as it stands in the prompt, with the title of the document on a line of its own above it, if there is one.
    source: where the document came from, in its caller's words. metadata: of the document, sorted by key.
    """

    document: str
    position: int
    text: str
    # Token ids within the prompt template; stored, so that the chunk's digest never depends on tokenising again.
    ids: tuple[int, ...]
    # Digest of the chunk as encoded with its neighbours ahead of time, and how many were asked for; empty and 0: not.
    variant: bytes = b""
    neighbours: int = 0
    title: str = ""
    source: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        return self.document, self.position

    @property
    def digest(self) -> bytes:
        """What the cache service knows the chunk by."""
        return keys.chunk_digest(self.ids)


def packed(neighbours: int) -> bytes:
    """A chunk's `neighbours` as engines store it: nothing for 0, otherwise four bytes."""
    return neighbours.to_bytes(4, "little") if neighbours else b""


def unpacked(stored: bytes) -> int:
    """What `packed` made; 0 for anything else, such as the digest of 32 bytes that gateways before stored there."""
    return int.from_bytes(stored, "little") if len(stored) == 4 else 0


def by_shared_words(text: str, chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks by the words that they share with a text, rare ones counting more, ties by document and position.

    An engine's own BM25 scores change with every commit, and chunks that are encoded behind their neighbours would
    have others each time.
    """
    words = {chunk.key: set(_WORD.findall(chunk.text.lower())) for chunk in chunks}
    counts = Counter(word for found in words.values() for word in found)
    own = set(_WORD.findall(text.lower()))

    def shared(chunk: Chunk) -> float:
        return math.fsum(math.log1p(len(chunks) / counts[word]) for word in words[chunk.key] & own)

    return sorted(chunks, key=lambda chunk: (-shared(chunk), chunk.key))


@dataclass(frozen=True)
class Candidate:
    """A chunk that may answer a question. `words` is its BM25 score (0: no word in common), `cosine` is in -1..1."""

    chunk: Chunk
    words: float
    cosine: float


@dataclass(frozen=True)
class Item:
    """A corpus, or one document of a corpus; `bytes` are those of its chunks' texts in UTF-8.

    model, embedder: what a corpus was made with.
    """

    name: str
    documents: int
    chunks: int
    tokens: int
    bytes: int
    model: str = ""
    embedder: str = ""


# Chunks of a document with their vectors, to the same made with another model.
Rewrite = Callable[[Sequence[Chunk], np.ndarray], Awaitable[tuple[Sequence[Chunk], np.ndarray]]]


class Retrieval(ABC):
    """Corpora of documents. Safe for concurrent use within one event loop, and never blocks it.

    Once its method has returned, a change survives any end of the process and is seen by every later call. Readers
    see a document as it was before a change or after it, never in between. Methods on a corpus that does not exist
    raise NotFound; a corpus made with another model raises FailedPrecondition from every method that takes `model`.
    Where the model has no embedder, vectors are 0 wide and `vector` is None.
    """

    @abstractmethod
    async def replace(
        self, corpus: str, document: str, chunks: Sequence[Chunk], vectors: np.ndarray, model: ModelIdentity
    ) -> bool:
        """Stores all chunks of one document in place of what it had; `vectors` are unit float32 `[chunk, dim]`.

        Makes the corpus when there is none. Says whether the document was there before.
        """

    @abstractmethod
    async def delete(self, corpus: str, document: str = "") -> tuple[int, int]:
        """Deletes one document, or the whole corpus. Returns how many documents and chunks are gone."""

    @abstractmethod
    async def corpora(self) -> list[Item]:
        """All corpora by name."""

    @abstractmethod
    async def check(self, corpus: str) -> None:
        """Raises NotFound if there is no such corpus. Costs the same however many documents there are."""

    @abstractmethod
    async def documents(self, corpus: str, after: str = "", limit: int = 0) -> list[Item]:
        """Documents by name, those after `after`, at most `limit` (0: all)."""

    @abstractmethod
    async def candidates(
        self,
        corpus: str,
        question: str,
        vector: np.ndarray | None,
        depth: int,
        model: ModelIdentity,
        where: Mapping[str, str] = NO_FILTER,
    ) -> list[Candidate]:
        """The `depth` best chunks by BM25 and the `depth` best by cosine, joined, in no order.

        where: only of documents that have all of this metadata.
        """

    @abstractmethod
    async def chunks(self, corpus: str, document: str, model: ModelIdentity) -> list[tuple[Chunk, np.ndarray]]:
        """The chunks of one document with their vectors, by position; none when there is no such document."""

    @abstractmethod
    async def nearest(
        self, corpus: str, text: str, vector: np.ndarray | None, count: int, model: ModelIdentity
    ) -> list[Chunk]:
        """The `count` chunks of highest cosine, best first, ties by document and position; without a vector those
        that have most words of the text.
        """

    @abstractmethod
    async def set_variants(self, corpus: str, chunks: Sequence[Chunk]) -> None:
        """Stores `variant` and `neighbours` of chunks that are still there with the same ids; skips the others."""

    @abstractmethod
    def move(self, corpus: str, rewrite: Rewrite, model: ModelIdentity) -> AsyncGenerator[int]:
        """Makes the corpus anew for another model, whatever it was made with; changes of it wait meanwhile.

        Yields how many chunks of each document are done. All of it is there as it was until the last one is, and then
        all of it is new.

        Raises:
            FailedPrecondition: this engine can't.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends all work in flight; what was returned from `replace` is safe already."""
