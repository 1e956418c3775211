"""Stores files as documents: parses, splits and embeds them; and rebuilds corpora for another model or embedder."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from opentelemetry import metrics, trace

from fusionkv.gateway.auth.tenants import Shares, Tenant
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.document import metadata_pairs, of_line
from fusionkv.gateway.ingest.parsers import ParsedDocument, Parsers
from fusionkv.gateway.retrieval.base import (
    HybridSearch,
    Retrieval,
    TextChunk,
    check_corpus,
    check_document,
    check_worker,
)
from fusionkv.gateway.tokens import ModelIdentity
from fusionkv.gateway.workers.workers import MODEL_SECONDS, WorkerPool
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from fusionkv.protos.runtime.rpc import MAX_REQUEST_BYTES

tracer = trace.get_tracer(__name__)
_documents = metrics.get_meter(__name__).create_counter(
    "fusionkv.gateway.documents", description="documents ingested"
)
_MAX_SOURCE = 4096  # characters; enough for a path
# Maximum wait for a piece of a document.
_STALL_SECONDS = 30.0


class Ingest:
    """Stores documents. They are parsed in separate processes, so that a hostile document delays no answer."""

    def __init__(self, config: GatewayConfig, workers: WorkerPool, search: HybridSearch) -> None:
        self._config = config
        self._workers = workers
        self._search = search
        self._parsers = Parsers(config)
        # With several tenants, one tenant always leaves room for the largest document of another.
        spare = config.max_document_bytes if config.several_tenants else 0
        self._bytes = Shares(config.max_ingest_bytes, spare=spare)
        self._storing: list[tuple[tuple[str, str], str, frozenset[str]]] = []  # corpora, sources and names

    async def file(self, tenant: Tenant, request: pb.IngestRequest, deadline: Deadline) -> pb.IngestResponse:
        """Stores the documents of a file; each replaces the tenant's document of that name as a whole.

        Raises:
            InvalidArgument: an invalid name or metadata, an unknown media type, or content of another type.
            AlreadyExists: a document of that name came from another source.
            Unavailable: no worker, or the embedder can't be reached.
            FailedPrecondition: the corpus was built with another model or embedder, or a chunk fits no prompt.
            ResourceExhausted: too much is being ingested, all parsers stay busy, or the tenant's quota is exceeded.
        """
        size = len(request.content)
        kind = self._check(request, size)
        with self._room(tenant, size):
            return await self._store(tenant, request, request.content, kind, deadline)

    async def upload(
        self, tenant: Tenant, requests: AsyncIterator[pb.UploadRequest], deadline: Deadline
    ) -> pb.IngestResponse:
        """As `file`, of a file whose content arrives in pieces, for which room is reserved before.

        Raises:
            InvalidArgument: also if the content has another size than announced.
            DeadlineExceeded: nothing arrived for 30 s, or not all of it by the deadline; the end of the call counts.
        """
        first = await anext(requests, pb.UploadRequest())
        request, size = first.document, first.size_bytes
        if request.content:
            raise InvalidArgument("the document of an upload has no content of its own: send it in pieces")
        kind = self._check(request, size)
        # The piece that is arriving takes room too, however small the document is said to be.
        with self._room(tenant, min(max(size, MAX_REQUEST_BYTES), self._config.max_ingest_bytes)):
            content = await _received(first, requests, deadline)
            return await self._store(tenant, request, content, kind, deadline)

    def _check(self, request: pb.IngestRequest, size: int) -> str:
        """The media type of a document of `size` bytes. Raises InvalidArgument as `file` does."""
        check_corpus(request.corpus)
        check_document(request.name)
        check_document(request.prefix + request.name)
        metadata_pairs(request.metadata)
        if len(request.source) > _MAX_SOURCE:
            raise InvalidArgument(f"the source has {len(request.source)} characters; the maximum is {_MAX_SOURCE}")
        if size > self._config.max_document_bytes:
            raise InvalidArgument(f"the document has {size} bytes; the maximum is {self._config.max_document_bytes}")
        return parse.media_type(request.name, request.media_type)

    @contextmanager
    def _room(self, tenant: Tenant, size: int) -> Iterator[None]:
        with self._bytes.holding(tenant.salt, size) as held:
            if not held:
                raise ResourceExhausted(
                    f"documents of {self._bytes.held} bytes are being ingested; try again later", retry_after=0.5
                )
            yield

    async def move(self, retrieval: Retrieval, corpus: str) -> AsyncGenerator[pb.MoveResponse]:
        """Rebuilds a corpus for the worker's model and this gateway's embedder, from its stored text.

        Recomputes vectors and token ids, keeps the division into chunks, and drops variants encoded ahead of time.
        Streams the progress, at the start and after each document.

        Raises:
            InvalidArgument: the corpus's name is invalid.
            NotFound: the corpus does not exist, or was deleted meanwhile.
            FailedPrecondition: the engine does not support it, or another call moved the corpus meanwhile.
            Unavailable: no worker, or the embedder can't be reached.
        """
        check_corpus(corpus)
        total = sum(document.chunks for document in await retrieval.documents(corpus))
        vocabulary = await self._workers.model(Deadline.after(MODEL_SECONDS))

        async def rewrite(chunks: Sequence[TextChunk], _: np.ndarray) -> tuple[Sequence[TextChunk], np.ndarray]:
            ids = await asyncio.to_thread(lambda: [tuple(vocabulary.chunk(chunk.text)) for chunk in chunks])
            rebuilt = [replace(c, ids=i, variant=b"", neighbours=0) for c, i in zip(chunks, ids, strict=True)]
            return rebuilt, await self._search.vectors([chunk.text for chunk in chunks], {})

        done = 0
        yield pb.MoveResponse(total=total)
        async with aclosing(retrieval.move(corpus, rewrite, self._search.identity(vocabulary.identity))) as documents:
            async for chunks in documents:
                done += chunks
                yield pb.MoveResponse(done=done, total=total)

    async def close(self) -> None:
        await self._parsers.close()

    async def _store(
        self, tenant: Tenant, request: pb.IngestRequest, content: bytes, kind: str, deadline: Deadline
    ) -> pb.IngestResponse:
        try:
            made_with = await tenant.retrieval.check(request.corpus)
            vocabulary = await self._workers.model(deadline, partial(check_worker, request.corpus, made_with))
        except NotFound:  # the corpus does not exist yet
            vocabulary = await self._workers.model(deadline)
        with tracer.start_as_current_span("gateway.parse") as span:
            parsed, cost = await self._parsers.parse(tenant, content, kind, vocabulary, request.first_line or 1)
            notes = parse.max_text(len(content), self._config.max_text_bytes)
            documents = _documents_of(request, parsed, notes)
            without_text = [name for name, chunks in documents.items() if not chunks]
            documents = {name: chunks for name, chunks in documents.items() if chunks}
            span.set_attribute("fusionkv.chunks", sum(map(len, documents.values())))
        longest = max((len(chunk.ids) for chunks in documents.values() for chunk in chunks), default=0)
        if longest > (limit := vocabulary.model.max_tokens):
            raise FailedPrecondition(
                f"a chunk has {longest} tokens, more than a prompt of this model can have ({limit}): lower the "
                "gateway's chunk_tokens"
            )
        model = self._search.identity(vocabulary.identity)
        with self._noted(tenant, request, documents):
            done = await self._replace(tenant, request, documents, cost, model)
        done.without_text.extend(without_text)
        _documents.add(len(documents), {"fusionkv.media_type": kind})
        return done

    @contextmanager
    def _noted(self, tenant: Tenant, request: pb.IngestRequest, names: Iterable[str]) -> Iterator[None]:
        """Notes what is being stored. Raises AlreadyExists if a document of that name from another source is."""
        corpus, own = (tenant.salt, request.corpus), frozenset(names)
        for other, source, others in self._storing:
            for name in own & others if other == corpus else ():
                _check_source(request, name, source)
        self._storing.append(noted := (corpus, request.source, own))
        try:
            yield
        finally:
            self._storing.remove(noted)

    async def _replace(
        self,
        tenant: Tenant,
        request: pb.IngestRequest,
        documents: Mapping[str, Sequence[TextChunk]],
        tokens_paid: int,
        model: ModelIdentity,
    ) -> pb.IngestResponse:
        """Embeds and stores the chunks of documents by name; `tokens_paid`: spent on parsing. Raises as `file`."""
        chunks = [chunk for pieces in documents.values() for chunk in pieces]
        stored = await self._stored(tenant, request, [*documents], model)
        vectors_by_text, chunks_by_ids = {c.text: vector for c, vector in stored}, {c.ids: c for c, _ in stored}
        tokens = sum(len(c.ids) for c in chunks)
        async with tenant.meter.storing(sum(len(c.text.encode()) for c in chunks), tenant.stored_bytes):
            rest = max(0, tokens - tokens_paid)
            tenant.meter.spend(rest)
            try:
                with tracer.start_as_current_span("gateway.embed"):
                    vectors = await self._search.vectors([c.text for c in chunks], vectors_by_text, tenant.salt)
            except (ResourceExhausted, Unavailable):  # nothing was computed, and the caller will retry
                tenant.meter.give_back(rest)
                raise
            with tracer.start_as_current_span("gateway.store"):
                writes, at = [], 0
                for name, pieces in documents.items():
                    whole = [_with_variant(chunk, chunks_by_ids.get(chunk.ids)) for chunk in pieces]
                    own = vectors[at : at + len(whole)]
                    writes.append(tenant.retrieval.replace(request.corpus, name, whole, own, model))
                    at += len(whole)
                replaced = sum(await asyncio.gather(*writes))
        return pb.IngestResponse(documents=len(documents), chunks=len(chunks), tokens=tokens, replaced=replaced)

    async def _stored(
        self, tenant: Tenant, request: pb.IngestRequest, names: Sequence[str], model: ModelIdentity
    ) -> list[tuple[TextChunk, np.ndarray]]:
        """The stored chunks of these documents, whose vectors and variants unchanged chunks keep.

        Raises AlreadyExists if a document came from another source.
        """
        stored: list[tuple[TextChunk, np.ndarray]] = []
        for name in names:
            try:
                chunks = await tenant.retrieval.chunks(request.corpus, name, model)
            except NotFound:  # the corpus does not exist yet
                break
            _check_source(request, name, chunks[0][0].source if chunks else "")
            stored += chunks
        return stored


def _check_source(request: pb.IngestRequest, name: str, source: str) -> None:
    """Raises AlreadyExists if a document that came from `source` must stay."""
    if source and request.source and source != request.source and not request.replace:
        raise AlreadyExists(
            f"document {name!r} of corpus {request.corpus!r} came from {source}, but this one is from "
            f"{request.source}: use another name (--name, --prefix), or replace it with --replace"
        )


async def _received(first: pb.UploadRequest, requests: AsyncIterator[pb.UploadRequest], deadline: Deadline) -> bytes:
    """The content that arrives in pieces. Raises as `Ingest.upload` does."""
    content, size = bytearray(first.content), first.size_bytes

    async def following() -> pb.UploadRequest | None:
        try:
            async with asyncio.timeout(min(_STALL_SECONDS, deadline.remaining())):
                return await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(f"{len(content)} of {size} bytes arrived in time, and not the end") from None

    while len(content) < size:
        piece = await following()
        if piece is None or not piece.content:
            raise InvalidArgument(f"the content ended after {len(content)} of {size} bytes")
        content += piece.content
    if len(content) > size or await following() is not None:
        raise InvalidArgument(f"the content is longer than the {size} bytes that were announced")
    return bytes(content)


def _with_variant(chunk: TextChunk, stored: TextChunk | None) -> TextChunk:
    """The chunk with the variant of a stored chunk of the same tokens, if there is one."""
    return chunk if stored is None else replace(chunk, variant=stored.variant, neighbours=stored.neighbours)


def _documents_of(
    request: pb.IngestRequest, parsed: Sequence[ParsedDocument], max_notes: int
) -> dict[str, list[TextChunk]]:
    """The chunks of each document by name; none if it has no text.

    A JSON line without an id is named by the file and the line's number.

    Raises InvalidArgument for an invalid id, the same id in two lines, or more than `max_notes` characters of source
    and metadata, which are stored with each chunk.
    """
    documents: dict[str, list[TextChunk]] = {}
    lines: dict[str, int] = {}
    shared, notes = metadata_pairs(request.metadata), 0
    for document in parsed:
        unnamed = f"{request.name}#{document.line}" if document.line else request.name
        name = request.prefix + (document.name or unnamed)
        with of_line(document.line):
            check_document(name)
            own = dict(document.metadata)
            metadata = metadata_pairs(dict(request.metadata) | own) if own else shared
        if name in documents:
            raise InvalidArgument(f"lines {lines[name]} and {document.line} have the same id {name!r}")
        notes += (len(request.source) + sum(len(key) + len(text) for key, text in metadata)) * len(document.pieces)
        if notes > max_notes:
            raise InvalidArgument(
                f"source and metadata of all chunks have more than {max_notes} characters: shorten them, or split "
                "the file"
            )
        lines[name] = document.line
        about: dict[str, Any] = {"title": document.title, "source": request.source, "metadata": metadata}
        pieces = enumerate(document.pieces)
        documents[name] = [TextChunk(name, at, text, tuple(ids), **about) for at, (text, ids) in pieces]
    return documents
