"""One document in: parse, split, embed, store."""

import re
from dataclasses import dataclass

from opentelemetry import metrics, trace

from fusionkv.gateway.auth.shares import Shares
from fusionkv.gateway.auth.tenants import Tenant
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.ingest import parse
from fusionkv.gateway.ingest.parsers import Parsers
from fusionkv.gateway.retrieval.base import Chunk
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.runtime.errors import InvalidArgument, ResourceExhausted, Unavailable

tracer = trace.get_tracer(__name__)
_documents = metrics.get_meter(__name__).create_counter(
    "fusionkv.gateway.documents", description="documents ingested"
)
_CORPUS = re.compile(r"[A-Za-z0-9._-]{1,64}")
MOST_NAME = 512


@dataclass(frozen=True)
class Ingested:
    chunks: int
    tokens: int
    replaced: bool


class Ingest:
    """Stores documents. They are parsed in other processes, so that a hostile one delays no answer."""

    def __init__(self, config: GatewayConfig, workers: WorkerPool) -> None:
        self._config = config
        self._workers = workers
        self._parsers = Parsers(config)
        # Where there are several tenants, the largest document of another one always fits beside one tenant's.
        spare = config.max_document_bytes if config.several_tenants else 0
        self._bytes = Shares(config.max_ingest_bytes, spare=spare)

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
        with self._bytes.holding(tenant.salt, len(content)) as held:
            if not held:
                raise ResourceExhausted(
                    f"documents of {self._bytes.held} bytes are in work already; try again later", retry_after=0.5
                )
            return await self._store(tenant, corpus, name, kind, content, timeout)

    async def close(self) -> None:
        """Ends the parsers."""
        await self._parsers.close()

    async def _store(
        self, tenant: Tenant, corpus: str, name: str, kind: str, content: bytes, timeout: float
    ) -> Ingested:
        vocabulary = await self._workers.model(timeout)
        with tracer.start_as_current_span("gateway.parse") as span:
            parsed = await self._parsers.parse(tenant, content, kind, vocabulary)
            span.set_attribute("fusionkv.chunks", len(parsed.pieces))
        chunks = [Chunk(name, position, text, tuple(ids)) for position, (text, ids) in enumerate(parsed.pieces)]
        tokens = sum(len(c.ids) for c in chunks)
        async with tenant.meter.storing(sum(len(c.text.encode()) for c in chunks), tenant.stored_bytes):
            rest = max(0, tokens - parsed.cost)
            tenant.meter.spend(rest)
            try:
                with tracer.start_as_current_span("gateway.embed"):
                    vectors = await self._workers.embed([c.text for c in chunks], timeout)
            except (ResourceExhausted, Unavailable):  # no worker computed anything, and the caller will come again
                tenant.meter.give_back(rest)
                raise
            with tracer.start_as_current_span("gateway.store"):
                replaced = await tenant.retrieval.replace(corpus, name, chunks, vectors, vocabulary.identity)
        _documents.add(1, {"fusionkv.media_type": kind})
        return Ingested(len(chunks), tokens, replaced)


def check_corpus(name: str) -> None:
    """Raises InvalidArgument unless the name is one for a corpus."""
    if not _CORPUS.fullmatch(name):
        raise InvalidArgument(f"bad corpus name {name[:80]!r}: 1 to 64 of A-Z a-z 0-9 . _ -")


def check_document(name: str) -> None:
    """Raises InvalidArgument unless the name is one for a document."""
    if not name or len(name) > MOST_NAME or not name.isprintable():
        raise InvalidArgument(f"bad document name {name[:80]!r}: 1 to {MOST_NAME} printable characters")
