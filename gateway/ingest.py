"""One document in: parse, split, embed, store."""

import asyncio
import contextlib
import re
import threading
from dataclasses import dataclass

from opentelemetry import metrics, trace

from fusionkv.gateway import parse
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.retrieval.base import Chunk
from fusionkv.gateway.tenants import Tenant
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.gateway.workers import WorkerPool
from fusionkv.protos.errors import InvalidArgument, ResourceExhausted, Unavailable

tracer = trace.get_tracer(__name__)
_documents = metrics.get_meter(__name__).create_counter(
    "fusionkv.gateway.documents", description="documents ingested"
)
_CORPUS = re.compile(r"[A-Za-z0-9._-]{1,64}")
MOST_NAME = 512
Piece = tuple[str, list[int]]  # a chunk's text and its token ids


@dataclass(frozen=True)
class Ingested:
    chunks: int
    tokens: int
    replaced: bool


class Ingest:
    """Stores documents. Parsing runs in threads of its own, so a slow document delays no answer."""

    def __init__(self, config: GatewayConfig, workers: WorkerPool) -> None:
        self._config = config
        self._workers = workers
        self._bytes = 0
        self._slots = asyncio.Semaphore(config.parse_threads)

    async def document(
        self, tenant: Tenant, corpus: str, name: str, kind: str, content: bytes, timeout: float
    ) -> Ingested:
        """Replaces the tenant's document `name` as a whole.

        Raises:
            InvalidArgument: a bad name, an unknown media type, or content that is not of it.
            Unavailable: no worker can be reached.
            FailedPrecondition: the corpus was made with another model.
            ResourceExhausted: too much is in work already, all parsers stay busy, or it is over the tenant's quota.
        """
        check_corpus(corpus)
        check_document(name)
        kind = parse.media_type(name, kind)
        if len(content) > self._config.max_document_bytes:
            raise InvalidArgument(
                f"the document has {len(content)} bytes; at most {self._config.max_document_bytes} are taken"
            )
        if self._bytes + len(content) > self._config.max_ingest_bytes:
            raise ResourceExhausted(
                f"documents of {self._bytes} bytes are in work already; try again later", retry_after=0.5
            )
        self._bytes += len(content)
        try:
            return await self._store(tenant, corpus, name, kind, content, timeout)
        finally:
            self._bytes -= len(content)

    async def _store(
        self, tenant: Tenant, corpus: str, name: str, kind: str, content: bytes, timeout: float
    ) -> Ingested:
        vocabulary = await self._workers.model(timeout)
        with tracer.start_as_current_span("gateway.parse") as span:
            pieces = await self._parse(content, kind, vocabulary)
            span.set_attribute("fusionkv.chunks", len(pieces))
        chunks = [Chunk(name, position, text, tuple(ids)) for position, (text, ids) in enumerate(pieces)]
        tokens = sum(len(c.ids) for c in chunks)
        async with tenant.meter.storing(sum(len(c.text.encode()) for c in chunks), tenant.stored_bytes):
            tenant.meter.spend(tokens)
            try:
                with tracer.start_as_current_span("gateway.embed"):
                    vectors = await self._workers.embed([c.text for c in chunks], timeout)
            except (ResourceExhausted, Unavailable):  # no worker computed anything, and the caller will come again
                tenant.meter.give_back(tokens)
                raise
            with tracer.start_as_current_span("gateway.store"):
                replaced = await tenant.retrieval.replace(corpus, name, chunks, vectors, vocabulary.identity)
        _documents.add(1, {"fusionkv.media_type": kind})
        return Ingested(len(chunks), tokens, replaced)

    async def _parse(self, content: bytes, kind: str, vocabulary: Vocabulary) -> list[Piece]:
        limit = self._config.parse_seconds
        try:
            async with asyncio.timeout(limit):
                await self._slots.acquire()
        except TimeoutError as error:
            raise ResourceExhausted(
                f"all parsers have been busy for {limit:g} s; try again later", retry_after=0.5
            ) from error
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[Piece]] = loop.create_future()

        def finish(pieces: list[Piece], error: Exception | None) -> None:
            self._slots.release()
            if done.cancelled():  # it ran out of its time, or its caller left
                return
            if error is None:
                done.set_result(pieces)
            else:
                done.set_exception(error)

        def run() -> None:
            pieces, failure = [], None
            try:
                pieces = self._split(content, kind, vocabulary)
            except Exception as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(finish, pieces, failure)

        # A thread can't be stopped: it keeps its slot until it ends, and being a daemon it never holds up an exit.
        threading.Thread(target=run, name="parse", daemon=True).start()
        try:
            async with asyncio.timeout(limit):
                return await done
        except TimeoutError as error:
            raise InvalidArgument(
                f"parsing took longer than {limit:g} s: split it, or raise parse_seconds"
            ) from error

    def _split(self, content: bytes, kind: str, vocabulary: Vocabulary) -> list[Piece]:
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
        raise InvalidArgument(f"bad corpus name {name[:80]!r}: 1 to 64 of A-Z a-z 0-9 . _ -")


def check_document(name: str) -> None:
    """Raises InvalidArgument unless the name is one for a document."""
    if not name or len(name) > MOST_NAME or not name.isprintable():
        raise InvalidArgument(f"bad document name {name[:80]!r}: 1 to {MOST_NAME} printable characters")
