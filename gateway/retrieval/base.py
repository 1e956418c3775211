"""The contract of a retrieval engine: it holds the corpora and finds candidates by words and by meaning."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from fusionkv.kvcache_service import keys
from fusionkv.protos.runtime.errors import FailedPrecondition

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
    """What a corpus depends on: vectors on the weights, token ids on the tokenizer and the chunk template."""

    fingerprint: bytes
    tokenizer: bytes


def check_model(corpus: str, made_with: ModelIdentity, model: ModelIdentity) -> None:
    """Raises FailedPrecondition if a corpus was made with another model."""
    if made_with == model:
        return
    what = "model" if made_with.fingerprint != model.fingerprint else "prompt template"
    raise FailedPrecondition(
        f"corpus {corpus!r} was made with another {what} than the worker runs now: delete it and ingest it again"
    )


@dataclass(frozen=True)
class Chunk:
    """One chunk of a document as it is stored."""

    document: str
    position: int
    text: str
    # Token ids within the prompt template; stored, so that the chunk's digest never depends on tokenising again.
    ids: tuple[int, ...]
    # Digest of the chunk as encoded with its neighbours ahead of time, and how many were asked for; empty and 0: not.
    variant: bytes = b""
    neighbours: int = 0

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


@dataclass(frozen=True)
class Candidate:
    """A chunk that may answer a question. `words` is its BM25 score (0: no word in common), `cosine` is in -1..1."""

    chunk: Chunk
    words: float
    cosine: float


@dataclass(frozen=True)
class Item:
    """A corpus, or one document of a corpus; `bytes` are those of its chunks' texts in UTF-8."""

    name: str
    documents: int
    chunks: int
    tokens: int
    bytes: int


class Retrieval(ABC):
    """Corpora of documents. Safe for concurrent use within one event loop, and never blocks it.

    Once its method has returned, a change survives any end of the process and is seen by every later call. Readers
    see a document as it was before a change or after it, never in between. Methods on a corpus that does not exist
    raise NotFound; a corpus made with another model raises FailedPrecondition from every method that takes `model`.
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
        self, corpus: str, question: str, vector: np.ndarray, depth: int, model: ModelIdentity
    ) -> list[Candidate]:
        """The `depth` best chunks by BM25 and the `depth` best by cosine, joined, in no order."""

    @abstractmethod
    async def chunks(self, corpus: str, document: str, model: ModelIdentity) -> list[tuple[Chunk, np.ndarray]]:
        """The chunks of one document with their vectors, by position; none when there is no such document."""

    @abstractmethod
    async def nearest(self, corpus: str, vector: np.ndarray, count: int, model: ModelIdentity) -> list[Chunk]:
        """The `count` chunks of highest cosine, best first, ties by document and position."""

    @abstractmethod
    async def set_variants(self, corpus: str, chunks: Sequence[Chunk]) -> None:
        """Stores `variant` and `neighbours` of chunks that are still there with the same ids; skips the others."""

    @abstractmethod
    async def close(self) -> None:
        """Ends all work in flight; what was returned from `replace` is safe already."""
