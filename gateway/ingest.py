"""One document in: parse, split, embed, store."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from opentelemetry import metrics, trace

from fusionkv.gateway import parse
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.retrieval.base import Chunk, Retrieval
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.gateway.workers import WorkerPool
from fusionkv.protos.errors import InvalidArgument, ResourceExhausted

tracer = trace.get_tracer(__name__)
_documents = metrics.get_meter(__name__).create_counter(
    "fusionkv.gateway.documents", description="documents ingested"
)
_CORPUS = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_NAME = 512


@dataclass(frozen=True)
class Ingested:
    chunks: int
    tokens: int
    replaced: bool


class Ingest:
    """Stores documents. Parsing runs in threads of its own, so a slow document delays no answer."""

    def __init__(self, config: GatewayConfig, retrieval: Retrieval, workers: WorkerPool) -> None:
        self._config = config
        self._retrieval = retrieval
        self._workers = workers
        self._threads = ThreadPoolExecutor(config.parse_threads, thread_name_prefix="parse")
        self._stuck = 0

    async def document(self, corpus: str, name: str, kind: str, content: bytes, timeout: float) -> Ingested:
        """Replaces the document `name` as a whole.

        Raises:
            InvalidArgument: a bad name, an unknown media type, or content that is not of it.
            Unavailable: no worker can be reached.
            FailedPrecondition: the corpus was made with another model.
            ResourceExhausted: every parsing thread is held by a document that ran out of its time.
        """
        check_corpus(corpus)
        check_document(name)
        kind = parse.media_type(name, kind)
        if len(content) > self._config.max_document_bytes:
            raise InvalidArgument(
                f"the document has {len(content)} bytes; at most {self._config.max_document_bytes} are taken"
            )
        vocabulary = await self._workers.model(timeout)
        with tracer.start_as_current_span("gateway.parse") as span:
            pieces = await self._parse(content, kind, vocabulary)
            span.set_attribute("fusionkv.chunks", len(pieces))
        chunks = [Chunk(name, position, text, tuple(ids)) for position, (text, ids) in enumerate(pieces)]
        with tracer.start_as_current_span("gateway.embed"):
            vectors = await self._workers.embed([c.text for c in chunks], timeout)
        with tracer.start_as_current_span("gateway.store"):
            replaced = await self._retrieval.replace(corpus, name, chunks, vectors, vocabulary.identity)
        _documents.add(1, {"fusionkv.media_type": kind})
        return Ingested(len(chunks), sum(len(c.ids) for c in chunks), replaced)

    def close(self) -> None:
        """Does not wait for a document that is being parsed."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _parse(self, content: bytes, kind: str, vocabulary: Vocabulary) -> list[tuple[str, list[int]]]:
        if self._stuck >= self._config.parse_threads:
            raise ResourceExhausted(
                "every parsing thread is held by a document that ran out of its time; try again later"
            )
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._split, content, kind, vocabulary)
        try:
            return await asyncio.wait_for(asyncio.shield(work), self._config.parse_seconds)
        except TimeoutError as error:
            # A thread can't be stopped: it counts as stuck until it ends by itself.
            if not work.cancel():
                self._stuck += 1
            work.add_done_callback(self._freed)
            raise InvalidArgument(
                f"parsing took longer than {self._config.parse_seconds:g} s: split it, or raise parse_seconds"
            ) from error

    def _freed(self, work: "asyncio.Future[list[tuple[str, list[int]]]]") -> None:
        if not work.cancelled():
            self._stuck -= 1
            work.exception()

    def _split(self, content: bytes, kind: str, vocabulary: Vocabulary) -> list[tuple[str, list[int]]]:
        config = self._config
        pieces = vocabulary.chunks(parse.parse(content, kind), config.chunk_tokens, config.overlap_tokens)
        if len(pieces) > config.max_document_chunks:
            raise InvalidArgument(
                f"the document has {len(pieces)} chunks; at most {config.max_document_chunks} are taken"
            )
        return pieces


def check_corpus(name: str) -> None:
    """Raises InvalidArgument unless the name is one for a corpus."""
    if not _CORPUS.fullmatch(name):
        raise InvalidArgument(f"bad corpus name {name!r}: 1 to 64 of A-Z a-z 0-9 . _ -")


def check_document(name: str) -> None:
    """Raises InvalidArgument unless the name is one for a document."""
    if not name or len(name) > _MOST_NAME or not name.isprintable():
        raise InvalidArgument(f"bad document name {name[:80]!r}: 1 to {_MOST_NAME} printable characters")
